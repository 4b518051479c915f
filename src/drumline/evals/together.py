"""Log-likelihoods by a sharded model: each rank has its own texts, and all of them go through the model together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from drumline.evals.scoring import Pair, Score, Scorer, evaluating
from drumline.model import GPT
from drumline.parallel import World, waiting_for
from drumline.sharding import inside
from drumline.train import Precision


@dataclass(frozen=True, kw_only=True)
class ShardedScorer(Scorer):
    """In the precision of the run, in which the weights are gathered."""

    world: World
    precision: Precision

    @property
    def device(self) -> torch.device:
        return self.precision.device  # the weights may be in host memory

    @torch.no_grad()
    def scores(self, pairs: Sequence[Pair], *, each_batch: Callable[[], None] = lambda: None) -> list[Score]:
        with waiting_for("the other ranks' part of the tasks"):
            most = max(self.world.gather(self.batches(len(pairs))))
            found = super().scores(pairs, each_batch=each_batch)
            with evaluating(self.model):
                for _ in range(self.batches(len(pairs)), most):  # others have more batches
                    self._in_vain()
        return found

    def _in_vain(self) -> None:
        self._predicted(
            torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1).long()
        )

    def _scores(self, pairs: Sequence[Pair]) -> list[Score]:
        if not any(after for _, after in pairs):
            self._in_vain()
        return super()._scores(pairs)

    def _predicted(self, inputs: Tensor, places: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        model = self.model
        head = model.head if isinstance(model, GPT) else None
        with self.precision.autocast():
            if not isinstance(model, GPT):
                return super()._predicted(inputs, places, targets)
            if not isinstance(head, FSDPModule):
                return inside(model, lambda: super(ShardedScorer, self)._predicted(inputs, places, targets))
            # Ranks may call it as often as they have targets: it stays gathered until the last time.
            head.set_reshard_after_forward(False, recurse=False)
            try:
                return inside(model, lambda: super(ShardedScorer, self)._predicted(inputs, places, targets))
            finally:
                head.set_reshard_after_forward(True, recurse=False)
                head.reshard()
