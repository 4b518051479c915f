"""Build a model whose weights are restored afterwards, which need not be initialized, or spread over ranks first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drumline.lazy import room

_DRAWS = frozenset({Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_})


class _NoDraws(TorchFunctionMode):
    """Tensors stay as they were allocated where random numbers would be drawn."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return (args[0] if args else kwargs["tensor"]) if func in _DRAWS else func(*args, **kwargs)


def uninitialized(
    make: Callable[[], nn.Module], device: torch.device, *, ranks: Any = None
) -> tuple[nn.Module, Callable[[], None]]:
    """A GPT on the device whose weights may be anything, and what initializes them after all.

    ranks: the World that it will be spread over, if it will: it has no memory yet
    """
    if ranks is not None:
        return room("sharding").undrawn(make, ranks)  # type: ignore[no-any-return]
    with device, _NoDraws():
        model = make()

    def initialize() -> None:
        model.load_state_dict(make().state_dict())

    return model, initialize
