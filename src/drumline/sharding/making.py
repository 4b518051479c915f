"""A model that no rank ever has whole: made without memory, its weights drawn tensor by tensor.

The draws are those of the whole model, in the same order, so that each weight has the same bits as without sharding.
Each rank keeps its rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from drumline.errors import ConfigError
from drumline.parallel import World, compare
from drumline.pieces import local_part
from drumline.sharding.weights import own_rows

_aten = torch.ops.aten
_WRITES = frozenset({_aten.normal_.default, _aten.uniform_.default, _aten.fill_.Scalar, _aten.zero_.default})
_DRAWS = frozenset({_aten.normal_.default, _aten.uniform_.default})


@dataclass(frozen=True)
class _Write:
    """What a whole tensor is filled with."""

    tensor: Tensor
    """On no device."""
    function: Any
    arguments: tuple[Any, ...]
    more: dict[str, Any]

    def made(self, space: Tensor) -> Tensor:
        """The whole tensor, at the start of `space`, which is bytes."""
        whole = space[: self.tensor.nbytes].view(self.tensor.dtype).view(self.tensor.shape)
        self.function(whole, *self.arguments, **self.more)
        return whole


class _Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers what tensors without memory are filled with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes: list[_Write] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _WRITES and args[0].is_meta:
            self.writes.append(_Write(args[0], func, args[1:], kwargs or {}))
        return func(*args, **(kwargs or {}))


def undrawn(make: Callable[[], nn.Module], world: World) -> tuple[nn.Module, Callable[[], None]]:
    """A model without memory for its weights, and what draws them once it is sharded; all ranks call that."""
    with torch.device("meta"), _Recorded() as recorded:
        model = make()
    seeded = torch.get_rng_state()  # nothing has been drawn since
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    writes = [each for each in recorded.writes if id(each.tensor) in names]
    last = {id(each.tensor): number for number, each in enumerate(writes)}
    if len(last) < len(names):
        name = next(name for key, name in names.items() if key not in last)
        raise ConfigError(f"{name} has no initial value", fix="initialize it with torch.nn.init")

    def initialize() -> None:
        torch.set_rng_state(seeded)
        parameters, digest = dict(model.named_parameters()), hashlib.sha256()
        # Fresh memory for each tensor would take longer than the draws.
        space = torch.empty(max((each.tensor.nbytes for each in writes), default=0), dtype=torch.uint8, device="cpu")
        for number, write in enumerate(writes):
            keeps = last[id(write.tensor)] == number
            if not keeps and write.function not in _DRAWS:
                continue
            whole = write.made(space)
            if keeps:
                parameter = cast(DTensor, parameters[names[id(write.tensor)]])
                rows = own_rows(parameter)
                local_part(parameter).copy_(whole[rows.start : rows.stop])
                if world.size > 1:
                    words = whole.view(-1).view(torch.int32 if whole.nbytes % 8 else torch.int64)
                    digest.update(str(int(words.sum())).encode())
        if world.size > 1:
            compare(world, {"initial weights": digest.hexdigest()})

    return model, initialize
