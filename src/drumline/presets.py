"""Presets, and how a config's open settings are filled from them. No torch here."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from typing import Any

from drumline.config import GPTConfig, ModelSettings, TrainConfig
from drumline.errors import ConfigError

CLASSIC: dict[str, Any] = {}
"""GPT-2's family is GPTConfig's default."""

MODERN: dict[str, Any] = {
    "positions": "rope",
    "norm": "rmsnorm",
    "activation": "relu2",
    "qk_norm": True,
    "bias": False,
}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A shape, and the settings that suit it."""

    shape: dict[str, int]
    family: dict[str, Any]
    context: int = 1024
    vocab_size: int = 50257
    batch_size: int = 8
    lr: float
    total_steps: int | None = None


TINY = {"n_layers": 4, "n_heads": 4, "d_model": 192, "d_ff": 768}
SMALL = {"n_layers": 12, "n_heads": 12, "d_model": 768, "d_ff": 3072}
MEDIUM = {"n_layers": 24, "n_heads": 16, "d_model": 1024, "d_ff": 4096}
LARGE = {"n_layers": 36, "n_heads": 20, "d_model": 1280, "d_ff": 5120}
XL = {"n_layers": 48, "n_heads": 25, "d_model": 1600, "d_ff": 6400}


def _tiny(family: dict[str, Any]) -> Preset:
    return Preset(shape=TINY, family=family, context=128, vocab_size=2048, batch_size=16, lr=2e-3, total_steps=800)


PRESETS: dict[str, Preset] = {
    "tiny": _tiny(CLASSIC),
    "gpt2": Preset(shape=SMALL, family=CLASSIC, lr=6e-4),
    "gpt2-medium": Preset(shape=MEDIUM, family=CLASSIC, lr=3e-4),
    "gpt2-large": Preset(shape=LARGE, family=CLASSIC, lr=2.5e-4),
    "gpt2-xl": Preset(shape=XL, family=CLASSIC, lr=2e-4),
    "modern-tiny": _tiny(MODERN),
    "modern": Preset(shape=SMALL, family=MODERN, lr=6e-4),
    "modern-medium": Preset(shape=MEDIUM, family=MODERN, lr=3e-4),
    "modern-large": Preset(shape=LARGE, family=MODERN, lr=2.5e-4),
    "modern-xl": Preset(shape=XL, family=MODERN, lr=2e-4),
}


def preset(name: str) -> Preset:
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean --preset {near[0]}? " if near else ""
        raise ConfigError(f"there is no preset {name!r}", fix=f"{hint}choose one of: {', '.join(PRESETS)}")
    return PRESETS[name]


def with_preset(config: TrainConfig) -> TrainConfig:
    """The same config with every setting that the preset decides filled in."""
    chosen = preset(config.model.preset)
    gpt = {**chosen.shape, **chosen.family}
    model: dict[str, Any] = {"context": chosen.context}
    for setting in fields(ModelSettings):
        if getattr(config.model, setting.name) is None and setting.name != "context":
            model[setting.name] = gpt.get(setting.name, getattr(GPTConfig(), setting.name))
    if config.model.context is not None:
        del model["context"]
    batch = config.batch
    if batch.total_steps is None and batch.epochs is None:
        batch = replace(batch, total_steps=chosen.total_steps, epochs=None if chosen.total_steps else 1.0)
    return replace(
        config,
        model=replace(config.model, **model),
        data=replace(config.data, vocab_size=config.data.vocab_size or chosen.vocab_size),
        batch=batch,
        optim=replace(config.optim, lr=chosen.lr if config.optim.lr is None else config.optim.lr),
    )


def gpt_config(settings: ModelSettings, *, vocab_size: int) -> GPTConfig:
    """The GPT that these settings (already filled in) describe."""
    assert settings.context is not None
    return GPTConfig(
        vocab_size=vocab_size,
        max_position_embeddings=settings.context,
        **{
            f.name: getattr(settings, f.name)
            for f in fields(ModelSettings)
            if f.name not in ("preset", "model", "context")
        },
    )
