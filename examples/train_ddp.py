"""Train a small GPT on random tokens, through Trainer, with a dataset whose samples are the model's arguments:

    torchrun --nproc-per-node=2 train_ddp.py

Run again, it resumes if it was stopped; after a finished run, or with other settings, it starts a new run in
runs/train_ddp-2, runs/train_ddp-3, ...
"""

import argparse

import torch
from torch import Tensor
from torch.utils.data import Dataset

from drumline import GPTConfig, GPTModel, Trainer


class ToyRandomDataset(Dataset[dict[str, Tensor]]):
    """Random sequences, generated on access. Trainer seeds them by step: the same on any number of ranks."""

    def __init__(self, vocab_size: int, seq_len: int, num_samples: int) -> None:
        self.vocab_size, self.seq_len, self.num_samples = vocab_size, seq_len, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        input_ids = torch.randint(self.vocab_size, (self.seq_len,))
        return {"input_ids": input_ids, "labels": input_ids, "attention_mask": torch.ones_like(input_ids)}


def main() -> None:
    parser = argparse.ArgumentParser(description="A small GPT on random tokens")
    parser.add_argument("--run_dir", help="run folder (default: runs/train_ddp, or the next free number)")
    args = parser.parse_args()
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=10000, max_position_embeddings=128, n_layers=2, n_heads=4, d_model=128, d_ff=512, dropout=0.1
    )
    model = GPTModel(config)
    dataset = ToyRandomDataset(vocab_size=config.vocab_size, seq_len=32, num_samples=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    Trainer(model, dataset, optimizer, batch_size=8, run_dir=args.run_dir).fit(total_steps=50, log_every=10)


if __name__ == "__main__":
    main()
