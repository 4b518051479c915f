"""Loss and metrics over a validation dataset; ranks share the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from drumline.parallel import Pulse, World, waiting_for
from drumline.report import Record
from drumline.train import Precision, to_device
from drumline.trainer.objectives import Loss, computed
from drumline.trainer.samples import Source

Metric = Callable[[Any, Any], Tensor | float]
"""(prediction, target) of a micro-batch -> mean over its samples; (output, batch) if the model has its own loss."""


def validate(
    model: nn.Module,
    source: Source,
    *,
    loss: Loss | None,
    metrics: Mapping[str, Metric],
    precision: Precision,
    world: World,
    pulse: Pulse,
) -> Record:
    """valid_loss and valid_NAME of each metric: means over all samples."""
    bounds = [len(source) * rank // world.size for rank in (world.rank, world.rank + 1)]
    chunks = _chunks(range(*bounds), source.batch_size)
    # As many on each rank: a forward of a sharded model takes all of them.
    missing = len(_chunks(range(-(-len(source) // world.size)), source.batch_size)) - len(chunks)
    sums, counted = [0.0] * (1 + len(metrics)), 0
    with _evaluating(model):
        for number, batch in enumerate(_batches(source, [*chunks, *[range(1)] * missing])):
            with precision.autocast():
                result = computed(loss, model, to_device(batch, precision.device))
                if number >= len(chunks):
                    continue
                values = [result.loss, *(metric(result.prediction, result.target) for metric in metrics.values())]
            sums = [total + float(value) * result.samples for total, value in zip(sums, values, strict=True)]
            counted += result.samples
            pulse.still_there()
    dtype = torch.float64 if precision.device.type != "mps" else torch.float32
    own = torch.tensor([*sums, counted], dtype=dtype, device=precision.device)
    with waiting_for("the sums of the validation"):
        *totals, count = world.sum(own).tolist()
    names = ["valid_loss", *(f"valid_{name}" for name in metrics)]
    return {name: total / count for name, total in zip(names, totals, strict=True)}


def _chunks(numbers: range, size: int) -> list[range]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def _batches(source: Source, chunks: Sequence[range]) -> Iterator[Any]:
    if not source.workers:
        yield from map(source.read, chunks)
        return
    yield from source.loader(_Chunks(source, chunks))


class _Chunks(Dataset[Any]):
    def __init__(self, source: Source, chunks: Sequence[Sequence[int]]) -> None:
        self._source, self._chunks = source, chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, index: int) -> Any:
        return self._source.read(self._chunks[index])


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        # What a dataset draws here must not change what the next step draws, and need not be new each time.
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        model.train(was_training)
