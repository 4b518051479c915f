"""The values that settings may have, for the error of one that has another. No torch here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NoReturn

from drumline.errors import ConfigError

if TYPE_CHECKING:
    from drumline.config.model import GPTConfig

_ABOVE_0 = "epochs minutes lr embedding_lr head_lr base_batch_size hang_timeout rope_theta norm_eps".split()
RANGES = {
    **dict.fromkeys(_ABOVE_0, "above 0"),
    **dict.fromkeys(("short_contexts", "min_lr_ratio"), "from 0 to 1"),
    **dict.fromkeys(("momentum", "beta1", "beta2", "dropout"), "from 0 to less than 1"),
    "decay_fraction": "above 0, at most 1",
    "spike_factor": "above 1",
    "nnodes": "like 2, or a range like 1:4",
}
"""Any other one: 0 or more."""


def refuse_shape(config: GPTConfig) -> NoReturn:
    """Raise the error of a GPT whose heads do not fit."""
    if config.head_dim is None and config.d_model % config.n_heads:
        raise ConfigError(
            f"d_model {config.d_model} cannot be divided over {config.n_heads} heads",
            fix="choose --d_model as a multiple of --n_heads",
        )
    if config.n_heads % config.kv_heads:
        raise ConfigError(
            f"{config.n_heads} heads cannot share {config.kv_heads} key/value heads evenly",
            fix="choose --n_kv_heads as a divisor of --n_heads",
        )
    raise ConfigError(
        f"rotary positions need an even head width, not {config.head_width} (d_model / n_heads)",
        fix="change --d_model or --n_heads, or use --positions learned",
    )


def refuse(settings: object, name: str) -> NoReturn:
    """Raise the error of a setting that is out of its range."""
    value = getattr(settings, name)
    finite = "finite " if isinstance(value, float) and not math.isfinite(value) else ""
    fix = f"give --{name} a {finite}value {RANGES.get(name, 'of 0 or more')}"
    raise ConfigError(f"{name} is {value}, out of range", fix=fix)
