"""One step of a run, computed in this process, tensor by tensor."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drumline.checkpoint import Checkpoint, load, weights
from drumline.data import mix
from drumline.files import RunFolder
from drumline.model import token_objective
from drumline.parallel import join, leave
from drumline.reasons.runs import PureRun
from drumline.train import Backward, Setup, set_up


@contextmanager
def at_step(run: PureRun, start: Checkpoint | None) -> Iterator[Setup]:
    """What the run consists of, with the weights and optimizer state of a checkpoint; None: the initial ones."""
    own = replace(run.config.run, compile=False, resume_from="auto", allow_change=(), offload="none")
    # Of a sharded run too, all of it is here: hooks see whole tensors.
    config = replace(run.config, run=own, ranks=replace(run.config.ranks, shard="none"))
    threads = torch.get_num_threads()
    world = join(device=config.run.device, bitwise=config.ranks.bitwise)
    try:
        with tempfile.TemporaryDirectory(prefix="drumline-again-") as folder:
            setup = set_up(config, RunFolder(Path(folder)), run.data(), world, total_steps=run.total_steps)
        step = setup.step
        # Kernels are called one by one, not as a graph that was captured: hooks must see them.
        weight = setup.batches.plan.sequences * setup.batches.tokens_per_item
        step.backward = Backward(token_objective, step.precision, weight, step.strategy.scale)
        if start is not None:
            load(start, model=step.model, optimizer=step.optimizer)
            step.precision.scaler.load_state_dict(start.state.scaler)
        yield setup
    finally:
        leave()
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Seen:
    """A tensor of a step."""

    kind: str
    """weight before, batch, activation, gradient, or weight after"""
    name: str
    sha256: str


class Trace:
    """Every tensor of a step in the order in which it was computed: hashes, and one of them as a whole."""

    def __init__(self, keep: int | None = None) -> None:
        self.seen: list[Seen] = []
        self.kept: Tensor | None = None
        self._keep = keep

    def add(self, kind: str, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            own = value.detach().contiguous().cpu()
            if len(self.seen) == self._keep:
                self.kept = own.clone()
            bits = own.reshape(-1).view(torch.uint8) if own.numel() else torch.empty(0, dtype=torch.uint8)
            digest = hashlib.sha256(f"{own.dtype} {tuple(own.shape)}\n".encode())
            digest.update(bits.numpy().tobytes())
            self.seen.append(Seen(kind, name, digest.hexdigest()))
        elif isinstance(value, list | tuple):
            for number, each in enumerate(value):
                self.add(kind, name if number == 0 else f"{name} [{number}]", each)

    def hooks(self, model: nn.Module) -> Callable[[], None]:
        """Follow what goes in and out of every module; returns what ends it."""

        def before(name: str) -> Callable[..., None]:
            return lambda module, args: self.add("activation", f"input of {name}", args)

        def after(name: str) -> Callable[..., None]:
            return lambda module, args, output: self.add("activation", f"output of {name}", output)

        handles = []
        for name, module in model.named_modules():
            if name:  # what goes in and out of the whole model is the batch and the loss
                handles.append(module.register_forward_pre_hook(before(name)))
                handles.append(module.register_forward_hook(after(name)))

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove


def traced(run: PureRun, start: Checkpoint | None, *, step: int, keep: int | None = None) -> Trace:
    """The tensors of a step, counted from 0. start: of that step. keep: the index of a tensor to keep"""
    trace = Trace(keep)
    with at_step(run, start) as setup:
        model = setup.step.model
        for name, tensor in weights(model).items():
            trace.add("weight before the step", name, tensor)
        gradient = setup.step.gradient(_micro_batches(setup, run.data_step(step), trace))
        parameters = [(name, each) for name, each in model.named_parameters() if each.grad is not None]
        for name, parameter in reversed(parameters):  # backward computes the last ones first
            trace.add("gradient", name, parameter.grad)
        setup.step.update(gradient, lr=setup.lr(step) if setup.lr else None)()
        for name, tensor in weights(model).items():
            trace.add("weight after the step", name, tensor)
    return trace


def _micro_batches(setup: Setup, data_step: int, trace: Trace) -> Iterator[Any]:
    setup.step.model.train()
    remove = trace.hooks(setup.step.model)
    try:
        for index in setup.batches.plan.share(0, 1):
            torch.manual_seed(mix(setup.seed, data_step, index))
            batch = setup.batches.micro_batch(data_step, index)
            trace.add("batch", f"tokens of micro-batch {index}", batch)
            yield batch
    finally:
        remove()
