"""Presets and recipes, and how a config's unset values are resolved from them. No torch here.

A preset is a model size, an architecture (its family) and a recipe. A recipe is how such a model is trained.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from drumline.config.model import GPTConfig, GPTOptions, ModelSettings, Recipe
from drumline.config.settings import LENGTHS, BatchConfig, OptimConfig, TrainConfig
from drumline.lazy import room

CLASSIC: dict[str, Any] = {}
"""GPT-2's family is GPTConfig's default."""

_ROPE: dict[str, Any] = {"positions": "rope", "norm": "rmsnorm", "bias": False}
LLAMA: dict[str, Any] = {**_ROPE, "activation": "swiglu", "n_kv_heads": 8, "rope_theta": 5e5, "norm_eps": 1e-5}
"""That of Llama 3: a native class of transformers, so that others can load it."""

MODERN: dict[str, Any] = {**_ROPE, "activation": "relu2", "qk_norm": True}


_ADAMW = {"optimizer": "adamw", "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "grad_clip": 1.0}
_MUON = {"optimizer": "muon", "beta1": 0.8, "beta2": 0.95, "eps": 1e-10, "weight_decay": 0.0, "grad_clip": 0.0}
_COSINE = {"schedule": "cosine", "min_lr_ratio": 0.1, "decay_fraction": 0.2}
_WSD = {"schedule": "wsd", "warmup_steps": 0, "min_lr_ratio": 0.0, "decay_fraction": 0.5}
_UNTIED = {"tie_embeddings": False, "init": "zero", "norm_weights": False, "embedding_lr": 0.4, "head_lr": 0.003}
RECIPES: dict[Recipe, dict[str, Any]] = {
    "classic": {"short_contexts": 0.0, "momentum": 0.9, **_ADAMW, **_COSINE},
    "portable": {"short_contexts": 0.5, "momentum": 0.9, **_MUON, **_WSD, **_UNTIED},
}
RECIPES["modern"] = {**RECIPES["portable"], "softcap": 15.0, "value_tables": 3, "smear": True}
"""The settings of each recipe; model settings that it does not list have GPTConfig's defaults. See docs/recipe.md."""
HEAD_LR_WIDTH = 768
"""The width that a recipe's `head_lr` is for: the learning rate is inversely proportional to it."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model size, and settings that suit it."""

    shape: dict[str, int]
    family: dict[str, Any]
    context: int = 1024
    vocab_size: int = 50257
    batch_size: int = 8
    lr: float
    """For AdamW."""
    muon_lr: float = 0.035
    recipe: Recipe
    adjusted: dict[str, Any] = field(default_factory=dict)
    """Values that suit this size better than its recipe's."""
    total_steps: int | None = None


TINY = {"n_layers": 4, "n_heads": 4, "d_model": 192, "d_ff": 768}
SMALL = {"n_layers": 12, "n_heads": 12, "d_model": 768, "d_ff": 3072}
MEDIUM = {"n_layers": 24, "n_heads": 16, "d_model": 1024, "d_ff": 4096}
LARGE = {"n_layers": 36, "n_heads": 20, "d_model": 1280, "d_ff": 5120}
XL = {"n_layers": 48, "n_heads": 25, "d_model": 1600, "d_ff": 6400}
LLAMA_8B: dict[str, Any] = {**LLAMA, "tie_embeddings": False}
_LONG: dict[str, Any] = {"context": 2048, "vocab_size": 128256, "batch_size": 1, "recipe": "classic", "lr": 3e-4}
_SHORT: dict[str, Any] = {"context": 128, "vocab_size": 2048}
_QUICK: dict[str, Any] = {"context": 256, "vocab_size": 2048, "adjusted": {"short_contexts": 0.0}, "total_steps": 380}


PRESETS: dict[str, Preset] = {
    "tiny": Preset(shape=TINY, family=CLASSIC, recipe="classic", lr=2e-3, total_steps=800, batch_size=16, **_SHORT),
    "gpt2": Preset(shape=SMALL, family=CLASSIC, recipe="classic", lr=6e-4),
    "gpt2-medium": Preset(shape=MEDIUM, family=CLASSIC, recipe="classic", lr=3e-4),
    "gpt2-large": Preset(shape=LARGE, family=CLASSIC, recipe="classic", lr=2.5e-4),
    "gpt2-xl": Preset(shape=XL, family=CLASSIC, recipe="classic", lr=2e-4),
    # The default of `drumline train`: small enough for a few minutes on two cores.
    # Attention is an eighth of the FLOPs at 256 tokens: shorter contexts would save little.
    "modern-tiny": Preset(shape={**TINY, "n_layers": 3}, family=MODERN, recipe="modern", lr=2e-3, **_QUICK),
    "modern": Preset(shape=SMALL, family=MODERN, recipe="modern", lr=6e-4),
    "modern-medium": Preset(shape=MEDIUM, family=MODERN, recipe="modern", lr=3e-4),
    "modern-large": Preset(shape=LARGE, family=MODERN, recipe="modern", lr=2.5e-4),
    "modern-xl": Preset(shape=XL, family=MODERN, recipe="modern", lr=2e-4),
    # As Llama 3.2 1B, 3.2 3B and 3.1 8B.
    "llama-1b": Preset(shape={"n_layers": 16, "n_heads": 32, "d_model": 2048, "d_ff": 8192}, family=LLAMA, **_LONG),
    "llama-3b": Preset(shape={"n_layers": 28, "n_heads": 24, "d_model": 3072, "d_ff": 8192}, family=LLAMA, **_LONG),
    "llama-8b": Preset(shape={"n_layers": 32, "n_heads": 32, "d_model": 4096, "d_ff": 14336}, family=LLAMA_8B, **_LONG),
}


PRETRAINED = "pretrained"
"""The preset of a model from elsewhere, which has its own shape: small steps, so that it forgets little."""


def preset(name: str) -> Preset:
    if name not in PRESETS:
        from drumline.config.portable import other_preset

        return other_preset(name)
    return PRESETS[name]


Section = TypeVar("Section", ModelSettings, BatchConfig, OptimConfig)


def filled(section: Section, defaults: dict[str, Any]) -> Section:
    """A section with unset values taken from the defaults."""
    names = [f.name for f in fields(section) if getattr(section, f.name) is None and f.name in defaults]
    return replace(section, **{name: defaults[name] for name in names})


def with_preset(config: TrainConfig) -> TrainConfig:
    """The same config with everything resolved that the preset and its recipe determine."""
    if config.model.init_from is not None and config.model.preset != PRETRAINED:
        config = room("huggingface").with_architecture(config)
    chosen = preset(config.model.preset)
    name = config.model.recipe or chosen.recipe
    if name == "portable":
        from drumline.config.portable import as_portable

        chosen = as_portable(chosen)
    recipe = {**RECIPES[name], **chosen.adjusted}
    gpt = {**asdict(GPTConfig()), **recipe, **chosen.shape, **chosen.family, "context": chosen.context, "recipe": name}
    model = filled(config.model, gpt)
    if "head_lr" in recipe and model.d_model:
        # The input of the head has the same scale at any width, so an update of its weights moves logits in proportion.
        recipe["head_lr"] *= HEAD_LR_WIDTH / model.d_model
    rates = {"lr": chosen.lr}
    if (config.optim.optimizer or recipe["optimizer"]) == "muon":
        rates = {"lr": chosen.muon_lr, "embedding_lr": chosen.lr, "head_lr": chosen.lr}
    batch = filled(config.batch, recipe)
    if all(getattr(batch, name) is None for name in LENGTHS):
        batch = replace(batch, total_steps=chosen.total_steps, epochs=None if chosen.total_steps else 1.0)
    return replace(
        config,
        model=model,
        data=replace(config.data, vocab_size=config.data.vocab_size or chosen.vocab_size),
        batch=batch,
        optim=filled(config.optim, {**rates, **recipe}),
    )


def gpt_config(settings: ModelSettings, *, vocab_size: int) -> GPTConfig:
    """The GPTConfig of these settings (already resolved)."""
    assert settings.context is not None
    options = {option.name: getattr(settings, option.name) for option in fields(GPTOptions)}
    given = {name: value for name, value in options.items() if value is not None}
    return GPTConfig(vocab_size=vocab_size, max_position_embeddings=settings.context, **given)
