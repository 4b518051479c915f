"""config.json -> options of the GPT. What drumline does not compute is refused by name."""

from __future__ import annotations

from typing import Any

from drumline.config import GPTConfig
from drumline.errors import ConfigError
from drumline.huggingface.families import FAMILIES, OWN, Family, own_options

ELSEWHERE = "fine-tune it with transformers instead: examples/finetune_hugging_face.py"


def family_of(content: dict[str, Any], where: str) -> Family:
    """The family of a config.json; refused if drumline has none."""
    names = content.get("architectures")
    name = names[0] if isinstance(names, list) and names else f"model_type {content.get('model_type')}"
    for family in (*FAMILIES, OWN):
        if name in (family.name, *family.same) or (not names and content.get("model_type") == family.model_type):
            return family
    known = ", ".join(each for family in FAMILIES for each in (family.name, *family.same))
    raise ConfigError(f"{where} is a {name}, which drumline does not know", fix=f"use one of: {known}; or {ELSEWHERE}")


def read_config(content: dict[str, Any], where: str) -> GPTConfig:
    """The GPT that a config.json describes, in its simplest form: None for what is a default anyway."""
    family = family_of(content, where)
    if family is OWN:
        return _own_config(content, where)
    known = {**family.absent, **{key: value for key, value in content.items() if value is not None}}
    _refuse(family, known, where)
    options: dict[str, Any] = {name: value for name, value in family.needs.items() if name != "bias"}
    options["activation"] = _activation(family, known, where)
    options["bias"] = family.biased or bool(known.get("attention_bias"))
    theta = _rope(known, where).get("rope_theta")
    found = {option: known.get(key) for option, key in family.keys.items() if option != "dropout"}
    found |= {"rope_theta": theta} if "rope_theta" in family.keys else {}
    if family.biased and found["d_ff"] is None:
        found["d_ff"] = 4 * (found["d_model"] or 0)  # n_inner is null in GPT-2's own
    try:
        options |= {name: _number(name, value) for name, value in found.items() if value is not None}
        return simplest(GPTConfig(**options))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: config.json is damaged ({error})", fix="copy or download it again") from None


def _own_config(content: dict[str, Any], where: str) -> GPTConfig:
    try:
        return simplest(GPTConfig(**{**own_options(content), "dropout": 0.0}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: config.json is damaged ({error})", fix="copy or download it again") from None


def simplest(config: GPTConfig) -> GPTConfig:
    """The same GPT with None for every option that has the value that None stands for."""
    from dataclasses import replace

    eps = 1e-6 if config.norm == "rmsnorm" else 1e-5
    return replace(
        config,
        n_kv_heads=None if config.kv_heads == config.n_heads else config.kv_heads,
        head_dim=None if config.head_width * config.n_heads == config.d_model else config.head_width,
        rope_theta=None if config.rope_theta == 10_000.0 else config.rope_theta,
        norm_eps=None if config.norm_eps == eps else config.norm_eps,
    )


def _number(name: str, value: Any) -> Any:
    if name == "tie_embeddings":
        return bool(value)
    kind = float if name in ("rope_theta", "norm_eps") else int
    if isinstance(value, bool) or not isinstance(value, int | float) or kind(value) != value:
        raise ValueError(f"{name} is {value!r}")
    return kind(value)


def _activation(family: Family, known: dict[str, Any], where: str) -> str:
    name = known.get(family.activation_key)
    for ours, theirs in family.activations.items():
        if name in theirs:
            return ours
    raise ConfigError(
        f"{where} has the activation {name}, which a {family.name} of drumline does not have", fix=ELSEWHERE
    )


def _rope(known: dict[str, Any], where: str) -> dict[str, Any]:
    """Old versions of transformers say rope_theta and rope_scaling, new ones rope_parameters."""
    parts = [known.get(key) for key in ("rope_scaling", "rope_parameters")]
    rope: dict[str, Any] = {"rope_theta": known.get("rope_theta", 10_000.0)}
    for part in parts:
        if isinstance(part, dict):
            kind = part.get("rope_type", part.get("type", "default"))
            if kind != "default":
                raise ConfigError(
                    f"{where} scales its rotary positions (rope_type {kind}), which drumline does not", fix=ELSEWHERE
                )
            rope |= {key: value for key, value in part.items() if key == "rope_theta"}
    return rope


def _refuse(family: Family, known: dict[str, Any], where: str) -> None:
    """What changes what the model computes, and drumline does not have."""
    kinds = known.get("layer_types")
    problems = {
        "is quantized (quantization_config)": "quantization_config" in known,
        "has rotary positions in a part of each head (partial_rotary_factor)": known.get("partial_rotary_factor", 1)
        != 1,
        f"has layers other than full attention (layer_types {kinds})": isinstance(kinds, list)
        and any(kind != "full_attention" for kind in kinds),
        "has experts (mixture of experts)": any("experts" in key for key in known),
        "has biases in attention only (attention_bias without mlp_bias)": not family.biased
        and bool(known.get("attention_bias")) != bool(known.get("mlp_bias")),
    }
    for key, value in family.fixed.items():
        if key in known and known[key] != value:
            what = "sliding windows" if "window" in key and known[key] else f"{key} {known[key]}"
            problems[f"has {what} ({key})" if "window" in key else f"has {what}"] = True
    for problem, holds in problems.items():
        if holds:
            fix = "use the version of the model that is not quantized" if "quantized" in problem else ELSEWHERE
            raise ConfigError(f"{where} {problem}, which drumline does not support", fix=fix)
