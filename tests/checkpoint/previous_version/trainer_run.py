"""A run by Trainer, as its user wrote it: python trainer_run.py TOTAL_STEPS [RUN_DIR]."""

import sys

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from drumline import Trainer

torch.manual_seed(0)
model = nn.Linear(4, 1)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
run_dir = sys.argv[2] if len(sys.argv) > 2 else "runs/linear"
trainer = Trainer(model, data, optim.AdamW(model.parameters(), lr=1e-3), loss=F.mse_loss, batch_size=8, run_dir=run_dir)
trainer.fit(total_steps=int(sys.argv[1]), save_every=4)
