"""How the weights of a model that only generates lie in memory."""

from __future__ import annotations

import platform

import torch
from torch import Tensor, nn

from drumline.model import GPT

_X86 = ("x86_64", "AMD64")


def store_as(model: GPT, dtype: torch.dtype) -> None:
    """Let the weights be of a dtype: what each token costs on a GPU is to read them. Rotary angles stay float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def store_for_cpu(model: GPT) -> None:
    """Let the matrices lie in memory as a CPU multiplies by them fastest, for inference in float32."""
    if can_pack():
        store_packed(model)
    else:
        store_by_columns(model)


def can_pack() -> bool:
    """Whether torch has oneDNN, where its order of weights is known to be faster."""
    operators = ("_reorder_linear_weight", "_linear_pointwise")
    if platform.machine() not in _X86 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return all(hasattr(torch.ops.mkldnn, name) for name in operators)


def store_packed(model: GPT) -> None:
    """Let the matrices of the blocks and of the head be packed. A tied head becomes a copy of the embedding."""
    for module in [*model.blocks.modules()]:
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, PackedLinear(child.weight, child.bias))
    packed_head = PackedLinear(model.head_weight)
    model.head = None
    model.__class__ = _PackedGPT
    model.packed_head = packed_head


def store_by_columns(model: GPT) -> None:
    """Let the matrices of the blocks lie in memory column by column: with the few rows of a step of generation, a CPU
    multiplies by them faster. Their values and shapes stay."""
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().t().contiguous().t())


class PackedLinear(nn.Module):
    """A linear layer whose weights oneDNN has put, once, into the order in which it reads them: float32 on a CPU, and
    no gradients."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., O)"""
        rows = x if x.dim() > 1 else x[None]
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return output if x.dim() > 1 else output[0]


class _PackedGPT(GPT):
    """A GPT after `store_packed`."""

    packed_head: PackedLinear

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.packed_head(hidden)
        softcap = self.config.softcap
        return softcap * torch.tanh(logits / softcap) if softcap else logits
