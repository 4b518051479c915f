"""Start one rank per GPU from within the script, and train a linear layer for 50 epochs, saving every 10:

    python multi_gpus.py 50 10

Run again, it resumes if it was stopped; after a finished run, or with other settings, it starts a new run in
runs/multi_gpus-2, runs/multi_gpus-3, ...
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from drumline import Trainer
from drumline.elastic.launch import start_ranks


def train(total_epochs: int, save_every: int, batch_size: int, run_dir: str | None) -> None:
    """Runs on each rank."""
    torch.manual_seed(0)  # every rank creates the same data and trains on its share
    dataset = TensorDataset(torch.rand(2048, 20), torch.rand(2048, 1))
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = Trainer(model, dataset, optimizer, loss=F.mse_loss, batch_size=batch_size, run_dir=run_dir)
    trainer.fit(epochs=total_epochs, save_every=save_every)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A linear layer on every GPU of this machine")
    parser.add_argument("total_epochs", type=int, help="total number of epochs")
    parser.add_argument("save_every", type=int, help="epochs between checkpoints")
    parser.add_argument("--batch_size", type=int, default=32, help="samples per rank (default: 32)")
    parser.add_argument("--nproc", type=int, help="ranks to start (default: one per GPU)")
    parser.add_argument("--run_dir", help="run folder (default: runs/multi_gpus, or the next free number)")
    args = parser.parse_args()
    nproc = args.nproc or torch.cuda.device_count() or 1
    sys.exit(start_ranks(train, (args.total_epochs, args.save_every, args.batch_size, args.run_dir), nproc=nproc))
