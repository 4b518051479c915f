"""Samples of any map-style Dataset -> micro-batches, in an order that depends on the seed and the step alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from drumline.data import BatchPlan, mix, visits
from drumline.errors import ConfigError, DataError
from drumline.signals import blocked

Samples = Dataset[Any] | Sequence[Any]
Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A dataset and how its samples are read: what torch's DataLoader knows, less the order."""

    dataset: Any
    batch_size: int = 32
    shuffle: bool = True
    collate: Collate = default_collate
    workers: int = 0
    """Processes that read ahead; 0: this one reads."""
    worker_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the DataLoader that has the workers."""

    def __post_init__(self) -> None:
        if isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__getitem__"):
            raise DataError(
                f"{type(self.dataset).__name__} can only be read from its beginning, but ranks and resumed runs read "
                "samples by number",
                fix="use a dataset with __len__ and __getitem__, for example list(dataset)",
            )
        if len(self.dataset) < 1:
            raise DataError("the dataset has no samples", fix="use a dataset whose len() is 1 or more")
        for name, least in (("batch_size", 1), ("workers", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}", fix=f"give a value of {least} or more")

    def __len__(self) -> int:
        return len(self.dataset)

    def loader(self, dataset: Dataset[Any], order: Any = None) -> DataLoader[Any]:
        """A DataLoader whose workers read whole micro-batches."""
        options = {name: value for name, value in self.worker_options.items() if value is not None}
        if sys.platform == "linux":
            # Ranks that are forked from a server would start their workers from another one, which imports torch first.
            options.setdefault("multiprocessing_context", "fork")
        return DataLoader(
            dataset, batch_size=None, sampler=order, num_workers=self.workers, collate_fn=_as_it_is, **options
        )

    def read(self, numbers: Sequence[int]) -> Any:
        """The collated samples of these numbers."""
        batch = self.collate([self.dataset[number] for number in numbers])
        # Tokenizers give mappings that are not dicts.
        return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def source_of(
    data: Samples | DataLoader[Any],
    *,
    batch_size: int | None = None,
    shuffle: bool | None = None,
    collate_fn: Collate | None = None,
    num_workers: int | None = None,
) -> Source:
    """A dataset, or a DataLoader without its sampler: the order of the samples is ours. Arguments override it."""
    source = _taken_apart(data) if isinstance(data, DataLoader) else Source(dataset=data)
    given: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": shuffle,
        "collate": collate_fn,
        "workers": num_workers,
    }
    return replace(source, **{name: value for name, value in given.items() if value is not None})


def _taken_apart(loader: DataLoader[Any]) -> Source:
    sampler = loader.sampler
    in_order = isinstance(sampler, SequentialSampler)
    if loader.batch_size is None or not isinstance(sampler, RandomSampler | SequentialSampler | DistributedSampler):
        what = type(loader.batch_sampler if loader.batch_size is None else sampler).__name__
        raise ConfigError(
            f"the DataLoader chooses its samples by {what}, which ranks cannot share and a resumed run cannot continue",
            fix="give a DataLoader with batch_size and shuffle=True or False, or the dataset itself (a Subset, to "
            "leave samples out)",
        )
    options = {name: getattr(loader, name) for name in ("prefetch_factor", "timeout", "multiprocessing_context")}
    options["worker_init_fn"] = loader.worker_init_fn
    return Source(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        shuffle=sampler.shuffle if isinstance(sampler, DistributedSampler) else not in_order,
        collate=loader.collate_fn,
        workers=loader.num_workers,
        worker_options=options if loader.num_workers else {},
    )


class DatasetBatches:
    """Micro-batches of a source, as the training loop needs them."""

    def __init__(self, source: Source | Samples, plan: BatchPlan, *, seed: int, share: range | None = None) -> None:
        """share: the micro-batches of a step that this rank computes, which its workers read ahead"""
        self.source = source if isinstance(source, Source) else Source(dataset=source)
        self.plan = plan
        self.items = len(self.source)
        self.tokens_per_item = 1
        self._seed, self._share = seed, share or range(plan.micro_batches)
        self._ahead: Iterator[Any] | None = None
        self._next: tuple[int, int] | None = None

    def micro_batch(self, step: int, index: int) -> Any:
        if not self.source.workers:
            return self.read(step, index)
        if self._next != (step, index) or self._ahead is None:  # the first one, or the run has gone back
            self.close()
            self._ahead = self._read_ahead(step, index)
        batch, state = next(self._ahead)
        torch.set_rng_state(state)  # dropout goes on with the random numbers where the dataset stopped
        last = index == self._share[-1]
        self._next = (step + 1, self._share[0]) if last else (step, index + 1)
        return batch

    def read(self, step: int, index: int) -> Any:
        """A micro-batch, read by this process; torch is seeded already."""
        seed = mix(self._seed, step, index)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # augmentations may draw from either
        return self.source.read(self._numbers(step, index))

    def names(self, step: int, index: int | None = None) -> list[str]:
        return [f"sample {number}" for number in self._numbers(step, index)]

    def close(self) -> None:
        """End the workers."""
        self._ahead = None

    def _numbers(self, step: int, index: int | None) -> list[int]:
        if self.source.shuffle:
            return [int(number) for number in visits(self, self._seed, step, index)]
        start = step * self.plan.sequences + (index or 0) * self.plan.micro_batch_size
        count = self.plan.sequences if index is None else self.plan.micro_batch_size
        return [position % self.items for position in range(start, start + count)]

    def _read_ahead(self, step: int, index: int) -> Iterator[Any]:
        loader = self.source.loader(_Reader(self, self._seed), _Places(self._share, step, index))
        with blocked():  # Ctrl-C reaches every process of a terminal, but a rank that is to save still needs its data
            return iter(loader)


class _Places:
    """(step, index) of this rank's micro-batches from one on, without end."""

    def __init__(self, share: range, step: int, index: int) -> None:
        self._share, self._step, self._index = share, step, index

    def __iter__(self) -> Iterator[tuple[int, int]]:
        step, first = self._step, self._index
        while True:
            yield from ((step, index) for index in self._share if index >= first)
            step, first = step + 1, 0


class _Reader(Dataset[Any]):
    """What a worker reads: a micro-batch, and the state of its random numbers afterwards."""

    def __init__(self, batches: DatasetBatches, seed: int) -> None:
        self._batches, self._seed = batches, seed

    def __getitem__(self, place: tuple[int, int]) -> tuple[Any, Tensor]:
        torch.manual_seed(mix(self._seed, *place))
        return self._batches.read(*place), torch.get_rng_state()


def _as_it_is(batch: Any) -> Any:
    return batch
