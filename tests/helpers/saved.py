"""Small checkpoints for tests, and savers that write them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drumline.checkpoint.checkpoints import RunState, commit
from drumline.checkpoint.retention import Retention
from drumline.checkpoint.saver import Saver
from drumline.checkpoint.state import optimizer_state, tensors_of
from drumline.checkpoint.storage import FileFacts, write_tensors
from drumline.files.run_folder import RunFolder
from drumline.parallel.world import Place, World
from drumline.snapshots.folder import Snapshots

ALONE = World(Place(), torch.device("cpu"))
Tell = Callable[[str, dict[str, Any]], None]


class Tied(nn.Module):
    """Shared weights, buffers and integers: all that a checkpoint must keep apart or together."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def trained(
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW, *, seed: int = 0, **settings: object
) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    optimizer = kind(model.parameters(), lr=0.1, **settings)  # type: ignore[call-arg,arg-type]
    for _ in range(3):
        model.head(model.norm(model.embedding(torch.randint(7, (5,))))).square().mean().backward()
        optimizer.step()
    return model, optimizer


def save(folder: RunFolder, step: int, *, valid_loss: float | None = None, parts: int = 1) -> Path:
    """A checkpoint as a saver of so many ranks makes it; each step has weights of its own."""
    model, optimizer = trained(seed=step)
    tensors = tensors_of(model, optimizer)
    aside = folder.checkpoints / f".step-{step}"
    aside.mkdir(parents=True)
    files: FileFacts = {}
    for part in range(parts):
        own = dict(list(tensors.items())[part::parts])
        files |= write_tensors(own, aside, part=part, parts=parts, reached=lambda point: None)
    state = RunState(
        step=step, facts={"seed": 1}, optimizer=optimizer_state(model, optimizer)[1], valid_loss=valid_loss
    )
    return commit(aside, folder.checkpoint(step), state, files, about={"versions": {"torch": "2"}}).path


def saver_of(
    folder: RunFolder,
    *,
    world: World = ALONE,
    tell: Tell = lambda message, event: None,
    reached: Callable[[str], None] = lambda point: None,
    snapshots: Snapshots | None = None,
    snapshot_every: int | None = 1,
    of: tuple[nn.Module, torch.optim.Optimizer] | None = None,
) -> Saver:
    model, optimizer = of or trained()
    return Saver(
        folder,
        world,
        model,
        optimizer,
        retention=Retention(),
        snapshots=snapshots,
        snapshot_every=snapshot_every,
        about={},
        tell=tell,
        reached=reached,
    )


def state(step: int) -> RunState:
    return RunState(step=step, facts={"seed": 1})


def flipped(content: bytes, draw: random.Random) -> bytes:
    """With one bit of another value."""
    place = draw.randrange(len(content) * 8)
    harmed = bytearray(content)
    harmed[place // 8] ^= 1 << place % 8
    return bytes(harmed)
