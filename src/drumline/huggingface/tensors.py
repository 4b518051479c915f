"""Tensors of a GPT <-> tensors of a class of transformers, one at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from drumline.config import GPTConfig
from drumline.huggingface.families import OWN, Family
from drumline.model import GPT

_VOCABULARY = re.compile(r"token_embedding\.weight|head\.weight|value_tables\.\d+\.weight")
"""Tensors with one row per token id."""
_LINEAR = (".qkv", ".out", ".up", ".gate", ".down")


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """One tensor of ours, and what it is there."""

    ours: str
    theirs: tuple[str, ...]
    shape: tuple[int, ...]
    """Of ours."""
    rows: tuple[int, ...]
    """Of ours in each of theirs."""
    transposed: bool = False
    fill: float | None = None
    """Our model has none: this value in its place computes the same. None: it has one."""

    @property
    def their_shapes(self) -> list[tuple[int, ...]]:
        shapes = [(rows, *self.shape[1:]) for rows in self.rows]
        return [shape[::-1] if self.transposed else shape for shape in shapes]

    def to_theirs(self, tensor: Tensor | None) -> list[Tensor]:
        """tensor: ours; None if it is to be filled. Rows beyond the shape are padding of the vocabulary."""
        if tensor is None:
            assert self.fill is not None
            tensor = torch.full(self.shape, self.fill)
        parts = torch.split(tensor[: self.shape[0]], list(self.rows))
        return [part.t().contiguous() if self.transposed else part.contiguous() for part in parts]

    def to_ours(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor.t() if self.transposed else tensor for tensor in tensors]).contiguous()


def mapped(family: Family, config: GPTConfig) -> list[Mapped]:
    """Every tensor of a GPT with this config, in the order of its layers, and those that only the class has."""
    ours = shapes(config)
    if family is OWN:
        return [Mapped(ours=name, theirs=(name,), shape=shape, rows=shape[:1]) for name, shape in ours.items()]
    every: list[Mapped] = []
    for module, names in family.modules.items():
        for layer in range(config.n_layers) if "N" in module.split(".") else [0]:
            every += _of_module(family, config, _numbered(module, layer), _numbered(names, layer).split(), ours)
    place = {name: number for number, name in enumerate(ours)}
    assert {each.ours for each in every} >= ours.keys(), "a tensor of the model has no name there"
    return sorted(every, key=lambda each: place.get(each.ours, len(place)))


def shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a GPT by name."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in GPT(config).state_dict().items()}


def padded_rows(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a tensor has more rows than wanted only because the vocabulary was rounded up."""
    return bool(_VOCABULARY.fullmatch(name)) and shape[1:] == wanted[1:] and shape[0] >= wanted[0]


def _numbered(name: str, layer: int) -> str:
    return re.sub(r"\bN\b", str(layer), name)


def _of_module(
    family: Family, config: GPTConfig, module: str, names: list[str], ours: dict[str, tuple[int, ...]]
) -> list[Mapped]:
    """The weight of a module and its bias, if our model or the class has one."""
    if module == "head" and config.tie_embeddings:
        return []
    is_linear, is_norm = module.endswith(_LINEAR), module.endswith("_norm")
    width = config.head_width if module.endswith(("query_norm", "key_norm")) else config.d_model
    weight = ours.get(f"{module}.weight", (width,))
    rows = _rows(config) if len(names) > 1 else (weight[0],)
    parts = [("weight", weight, 1.0, is_linear and family.transposed)]
    if f"{module}.bias" in ours or (family.biased and (is_linear or is_norm)):
        parts.append(("bias", (weight[0],), 0.0, False))
    return [
        Mapped(
            ours=f"{module}.{part}",
            theirs=tuple(f"{name}.{part}" for name in names),
            shape=shape,
            rows=rows,
            transposed=transposed,
            fill=None if f"{module}.{part}" in ours else fill,
        )
        for part, shape, fill, transposed in parts
    ]


def _rows(config: GPTConfig) -> tuple[int, int, int]:
    """Of queries, keys and values."""
    kv_rows = config.kv_heads * config.head_width
    return config.n_heads * config.head_width, kv_rows, kv_rows
