"""Train a small network on random numbers; the same script on one device and on many:

    python train.py --batch_size 8
    torchrun --nproc_per_node=4 train.py --batch_size 8

Started again, the run goes on where it was; another --run_dir starts a new one.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drumline import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description="A small network on random numbers")
    parser.add_argument("--batch_size", type=int, default=32, help="samples on each rank (default: 32)")
    parser.add_argument("--run_dir", default="runs/train", help="where the run is kept")
    args = parser.parse_args()
    torch.manual_seed(0)  # every rank draws the same samples and takes its own share of them
    dataset = TensorDataset(torch.randn(1000, 10), torch.randn(1000, 1))
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    Trainer(model, dataset, optimizer, loss=F.mse_loss, batch_size=args.batch_size, run_dir=args.run_dir).fit(epochs=10)


if __name__ == "__main__":
    main()
