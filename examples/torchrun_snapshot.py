"""Train a linear layer for 50 epochs, saving every 10, under torchrun:

    torchrun --standalone --nproc_per_node=2 torchrun_snapshot.py 50 10

Run again after a crash, or with more epochs, it resumes from its last checkpoint, including optimizer state, and ends
with the same weights as a run that was never interrupted.
"""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from drumline import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description="A linear layer, trained by ranks that torchrun starts")
    parser.add_argument("total_epochs", type=int, help="total number of epochs")
    parser.add_argument("save_every", type=int, help="epochs between checkpoints")
    parser.add_argument("--batch_size", type=int, default=4, help="samples per rank (default: 4)")
    parser.add_argument("--run_dir", help="run folder (default: runs/SCRIPT, or the next free number)")
    args = parser.parse_args()
    torch.manual_seed(0)  # every rank creates the same data and trains on its share
    dataset = TensorDataset(torch.rand(16, 8), torch.rand(16, 1))
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    trainer = Trainer(model, dataset, optimizer, loss=F.mse_loss, batch_size=args.batch_size, run_dir=args.run_dir)
    trainer.fit(epochs=args.total_epochs, save_every=args.save_every)


if __name__ == "__main__":
    main()
