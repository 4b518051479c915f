"""The values that settings may have, for the error of one that has another. No torch here."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from drumline.errors import ConfigError
from drumline.units import counted

if TYPE_CHECKING:
    from drumline.config.model import GPTConfig
    from drumline.config.settings import BatchConfig

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


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str, flag: str = "") -> str:
    """The known name closest to a misspelled one, as a question; `otherwise` if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {flag}{close[0]}?" if close else otherwise


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


def refuse_lengths(given: Mapping[str, object], known: Sequence[str]) -> NoReturn:
    """Raise the error of a run with more than one length."""
    raise ConfigError(
        f"{' and '.join(f'{name} {value}' for name, value in given.items())} both set the length of the run",
        fix=f"give only one of {', '.join(f'--{name}' for name in known)}",
    )


def refuse_scale(scale_lr: str, base_batch_size: int | None) -> NoReturn:
    """Raise the error of a scaled learning rate without its batch size, or the other way round."""
    raise ConfigError(
        f"scale_lr {scale_lr} and base_batch_size {base_batch_size} belong together",
        fix="give both, as --scale_lr linear --base_batch_size 32, or neither",
    )


def refuse_batch(batch: BatchConfig, *, size: int | None = None) -> NoReturn:
    """Raise the error of a batch that is set twice or, if its micro-batches have a size, is no whole number of them."""
    total = batch.global_batch_size or 0
    if size is None:
        raise ConfigError(
            f"global_batch_size {total} and gradient_accumulation_steps {batch.gradient_accumulation_steps} both set "
            "the batch size of a step",
            fix="give --global_batch_size or --gradient_accumulation_steps, not both",
        )
    raise ConfigError(
        f"global_batch_size {total} is not a whole number of micro-batches of {size} sequences",
        fix=f"use --global_batch_size {max(1, total // size) * size} or another --batch_size",
    )


def refuse_ranks(ranks: int, micro_batches: int, *, batch_size: int) -> NoReturn:
    """Raise the error of more ranks than micro-batches."""
    raise ConfigError(
        f"{ranks} ranks cannot share a step of {counted(micro_batches, 'micro-batch')} "
        f"(global_batch_size {micro_batches * batch_size} / batch_size {batch_size})",
        fix="raise --global_batch_size, lower --batch_size, or start fewer ranks",
    )


def refuse(settings: object, name: str) -> NoReturn:
    """Raise the error of a setting that is out of its range."""
    value = getattr(settings, name)
    finite = "finite " if isinstance(value, float) and not math.isfinite(value) else ""
    fix = f"give --{name} a {finite}value {RANGES.get(name, 'of 0 or more')}"
    raise ConfigError(f"{name} is {value}, out of range", fix=fix)
