"""torch's DistributedDataParallel as a strategy."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from drumline.data import BatchPlan
from drumline.parallel.heartbeat import waiting_for
from drumline.parallel.strategies import Plain
from drumline.parallel.world import World

# torch 2.13 renamed this argument and warns about the old name, the only one that 2.11 knows.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


class Ddp(Plain):
    """Gradients are all-reduced once per step, bucket by bucket, overlapping with backward."""

    def __init__(self, model: nn.Module, plan: BatchPlan, world: World) -> None:
        self.scale = world.size  # DDP averages over the ranks, but losses are already parts of the whole step
        self._world, self._last = world, len(plan.share(world.rank, world.size)) - 1
        most = len(plan.share(0, world.size))
        buffers: dict[str, Any] = {
            _SYNC_BUFFERS: bool(model.state_dict().keys() - dict(model.named_parameters()).keys())
        }
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **buffers,
            static_graph=most == 1,  # with accumulation, the first backward of a step is not synchronized
        )
        super().__init__(self._ddp)

    def micro_batch(self, number: int) -> AbstractContextManager[None]:
        plain = super().micro_batch(number)
        return plain if number == self._last else self._ddp.no_sync()

    def finish(self, extras: Tensor) -> Tensor:
        own = super().finish(extras)
        with waiting_for("the sum of the losses"):
            return self._world.sum(own)
