"""Micro-batches that are made before they are needed: which ones come is known from the seed and the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any

from drumline.data import TokenBatches
from drumline.stores.working import computers, waited

TOKENS, MOST = 1 << 21, 128
"""Tokens that are made ahead: a fast GPU takes seconds for them, in which a store may be slow or gone. And the most
micro-batches."""


def read_ahead(make: Callable[..., TokenBatches], *, total_steps: int) -> Callable[..., TokenBatches]:
    """What makes the same batches, which then make those of the next steps while one is used.

    total_steps: nothing is made ahead for what comes after the last step
    """

    def made(*given: Any, **more: Any) -> TokenBatches:
        batches = make(*given, **more)
        # Of this object alone: whatever kind of batches it is, all else of it stays.
        vars(batches)["micro_batch"] = Ahead(batches, total_steps)
        return batches

    return made


class Ahead:
    """micro_batch(step, index) of some batches.

    A rank asks for the same places in every step; those that it asked for in one step are made ahead for the next ones.
    """

    def __init__(self, batches: TokenBatches, total_steps: int) -> None:
        self._batches, self._make, self._total_steps = batches, batches.micro_batch, total_steps
        self._step, self._own, self._asked = -1, list[int](), list[int]()
        self._made: dict[tuple[int, int], Future[Any]] = {}

    def __call__(self, step: int, index: int) -> tuple[Any, ...]:
        if step != self._step:
            self._step, self._own, self._asked = step, self._asked or self._own, []
        self._asked.append(index)
        made = self._made.pop((step, index), None)
        self._begin(step, index)
        batch: tuple[Any, ...] = waited(made) if made is not None else self._make(step, index)
        return batch

    def _begin(self, step: int, index: int) -> None:
        """Make what comes next, and forget what does not: a run may go back to an earlier step."""
        plan = self._batches.plan
        own = self._own or self._asked
        size = plan.micro_batch_size * self._batches.tokens_per_item
        count = max(2 * len(own), min(MOST, TOKENS // size))
        coming = list(islice(_after(step, index, own, self._total_steps), count))
        wanted = set(coming)
        for place in [place for place in self._made if place not in wanted]:
            self._made.pop(place).cancel()
        for place in coming:
            if place not in self._made:
                self._made[place] = computers().submit(partial(self._make, *place))


def _after(step: int, index: int, own: list[int], total_steps: int) -> Iterator[tuple[int, int]]:
    yield from ((step, each) for each in own if each > index)
    for later in range(step + 1, total_steps):
        yield from ((later, each) for each in own)
