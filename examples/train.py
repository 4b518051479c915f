"""Train a small network on random data; the same script works on one device and on several:

    python train.py --batch_size 8
    torchrun --nproc_per_node=4 train.py --batch_size 8

Run again, it resumes if it was stopped; after a finished run, or with other settings, it starts a new run in
runs/train-2, runs/train-3, ...
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drumline import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description="A small network on random numbers")
    parser.add_argument("--batch_size", type=int, default=32, help="samples per rank (default: 32)")
    parser.add_argument("--epochs", type=int, default=10, help="total number of epochs (default: 10)")
    parser.add_argument("--run_dir", help="run folder (default: runs/train, or the next free number)")
    args = parser.parse_args()
    torch.manual_seed(0)  # every rank creates the same data and trains on its share
    dataset = TensorDataset(torch.randn(1000, 10), torch.randn(1000, 1))
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = Trainer(model, dataset, optimizer, loss=F.mse_loss, batch_size=args.batch_size, run_dir=args.run_dir)
    trainer.fit(epochs=args.epochs)


if __name__ == "__main__":
    main()
