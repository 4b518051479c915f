"""Train an image classifier with validation accuracy, a schedule, worker processes and a callback:

    python image_classifier.py --epochs 5
    torchrun --nproc_per_node=2 image_classifier.py --epochs 5 --batch_size 32

The images are random, with one quarter brighter: put any map-style Dataset of (image, class) in place of `quarters`.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drumline import Callback, Trainer


def quarters(images: int, *, seed: int) -> TensorDataset:
    """Noise of 3 x 16 x 16; the class is the quarter that is brighter."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(images, 3, 2, 8, 2, 8, generator=generator)
    classes = torch.randint(4, (images,), generator=generator)
    noise[torch.arange(images), :, classes // 2, :, classes % 2] += 1.0
    return TensorDataset(noise.view(images, 3, 16, 16), classes)


class Best(Callback):
    """Says when the validation accuracy is better than ever."""

    best = 0.0

    def on_evaluate(self, trainer: Trainer, step: int, record: dict[str, float]) -> None:
        if record["valid_accuracy"] > self.best and trainer.rank == 0:
            self.best = record["valid_accuracy"]
            print(f"step {step}: best accuracy so far, {self.best:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A classifier of random images")
    parser.add_argument("--epochs", type=int, default=5, help="total number of epochs (default: 5)")
    parser.add_argument("--batch_size", type=int, default=64, help="images per rank (default: 64)")
    args = parser.parse_args()
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(32 * 9, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    trainer = Trainer(
        model,
        DataLoader(quarters(2048, seed=1), args.batch_size, shuffle=True, num_workers=2),
        optimizer,
        valid_dataset=quarters(256, seed=2),
        metrics={"accuracy": lambda logits, classes: (logits.argmax(1) == classes).float().mean()},
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs),
        schedule_unit="epoch",
        callbacks=[Best()],
    )
    trainer.fit(epochs=args.epochs)
