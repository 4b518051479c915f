"""What few runs need of presets: the portable recipe, whose models classes of transformers compute, so that other
programs can load them; and the preset of a model from elsewhere. No torch here."""

from __future__ import annotations

from dataclasses import replace

from drumline.config.presets import PRESETS, PRETRAINED, Preset
from drumline.config.ranges import did_you_mean
from drumline.errors import UsageError

_MULTIPLE = 64


def other_preset(name: str) -> Preset:
    """That of a model from elsewhere; any other name is refused."""
    if name == PRETRAINED:
        return Preset(shape={}, family={}, recipe="classic", lr=1e-4, muon_lr=0.002)
    hint = did_you_mean(name, PRESETS, flag="--preset ", otherwise="")
    raise UsageError(f"there is no preset {name!r}", fix=f"{hint} choose one of: {', '.join(PRESETS)}".lstrip())


def as_portable(chosen: Preset) -> Preset:
    """A preset whose block has a class: with QK norm, that is Qwen3's, which has SwiGLU in the place of squared ReLU.

    Its third matrix makes the feed-forward layers narrower: the number of weights stays about the same.
    """
    if chosen.family.get("activation") != "relu2":
        return chosen
    d_ff = -(-2 * chosen.shape["d_ff"] // (3 * _MULTIPLE)) * _MULTIPLE
    return replace(chosen, family={**chosen.family, "activation": "swiglu"}, shape={**chosen.shape, "d_ff": d_ff})
