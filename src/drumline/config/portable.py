"""The portable recipe: models that classes of transformers compute, and so other programs can load. No torch here."""

from __future__ import annotations

from dataclasses import replace

from drumline.config.presets import Preset

_MULTIPLE = 64


def as_portable(chosen: Preset) -> Preset:
    """A preset whose block has a class: with QK norm, that is Qwen3's, which has SwiGLU in the place of squared ReLU.

    Its third matrix makes the feed-forward layers narrower: the number of weights stays about the same.
    """
    if chosen.family.get("activation") != "relu2":
        return chosen
    d_ff = -(-2 * chosen.shape["d_ff"] // (3 * _MULTIPLE)) * _MULTIPLE
    return replace(chosen, family={**chosen.family, "activation": "swiglu"}, shape={**chosen.shape, "d_ff": d_ff})
