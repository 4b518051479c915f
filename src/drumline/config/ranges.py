"""The values that settings may have, for the error of one that has another. No torch here."""

from __future__ import annotations

import math
from typing import NoReturn

from drumline.errors import ConfigError

_ABOVE_0 = "epochs minutes lr embedding_lr head_lr base_batch_size hang_timeout".split()
RANGES = {
    **dict.fromkeys(_ABOVE_0, "above 0"),
    **dict.fromkeys(("short_contexts", "min_lr_ratio"), "from 0 to 1"),
    **dict.fromkeys(("momentum", "beta1", "beta2"), "from 0 to less than 1"),
    "decay_fraction": "above 0, at most 1",
    "spike_factor": "above 1",
    "nnodes": "like 2, or a range like 1:4",
}
"""Any other one: 0 or more."""


def refuse(settings: object, name: str) -> NoReturn:
    """Raise the error of a setting that is out of its range."""
    value = getattr(settings, name)
    finite = "finite " if isinstance(value, float) and not math.isfinite(value) else ""
    fix = f"give --{name} a {finite}value {RANGES.get(name, 'of 0 or more')}"
    raise ConfigError(f"{name} is {value}, out of range", fix=fix)
