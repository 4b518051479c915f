"""Kernels without a GPU: Triton's interpreter, which must be chosen before anything imports Triton."""

import importlib.util
import os
from types import ModuleType

import pytest

from drumline.config.model import GPTConfig

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WHY_NOT = "Triton is not installed" if not HAS_TRITON else "interpreted in a process of its own"
MODERN = GPTConfig(
    vocab_size=512,
    max_position_embeddings=64,
    n_layers=3,
    n_heads=4,
    d_model=64,
    d_ff=256,
    positions="rope",
    norm="rmsnorm",
    activation="relu2",
    qk_norm=True,
    bias=False,
)


def give_programs_more_rows(monkeypatch: pytest.MonkeyPatch, ops: ModuleType) -> None:
    """The interpreter takes milliseconds for a program of a kernel, however many rows it has: whole models need few."""
    if INTERPRETED:
        monkeypatch.setattr(ops, "_NORM_ROWS", 64)
        monkeypatch.setattr(ops, "_TURN_ROWS", 64)
