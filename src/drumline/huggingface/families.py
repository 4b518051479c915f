"""The classes of transformers that compute what a GPT of drumline computes, one table each, for both directions.

`Family` says which options of the GPT a class needs, what its config.json calls the other options, and what it calls
each module. `reading_config.py` reads a config.json by these tables, `tensors.py` maps tensors. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from drumline.config import GPTConfig, ModelSettings, gpt_config

NO_EXTRAS: dict[str, Any] = {"softcap": 0.0, "value_tables": 0, "smear": False}
"""What no class of transformers has as drumline does."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A class of transformers."""

    name: str
    model_type: str
    same: tuple[str, ...] = ()
    """Other classes with the same layout: they can be read, and are written as this one."""
    needs: dict[str, Any]
    """The values that options of the GPT must have; tuples: one of several."""
    keys: dict[str, str]
    """Option of the GPT -> key of config.json."""
    activations: dict[str, tuple[str, ...]]
    """Activation -> its names in config.json; the first is written."""
    activation_key: str = "hidden_act"
    absent: dict[str, Any]
    """Key of config.json -> what the class takes if it is absent."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Key of config.json -> the only value that drumline computes."""
    modules: dict[str, str]
    """Module -> its name there; several for a module whose rows are divided. N: the number of the layer."""
    transposed: bool = False
    """Whether matrices of linear layers are stored as (inputs, outputs)."""
    biased: bool = False
    """Whether linear layers and norms always have biases there."""


_ROPE_NEEDS = {"positions": "rope", "norm": "rmsnorm", **NO_EXTRAS}
_ROPE_KEYS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "head_dim": "head_dim",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "dropout": "attention_dropout",
}
_ROPE_ABSENT = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}
_ROPE_MODULES = {
    "token_embedding": "model.embed_tokens",
    "blocks.N.attention_norm": "model.layers.N.input_layernorm",
    "blocks.N.attention.qkv": " ".join(f"model.layers.N.self_attn.{letter}_proj" for letter in "qkv"),
    "blocks.N.attention.out": "model.layers.N.self_attn.o_proj",
    "blocks.N.feed_forward_norm": "model.layers.N.post_attention_layernorm",
    "blocks.N.feed_forward.up": "model.layers.N.mlp.up_proj",
    "blocks.N.feed_forward.down": "model.layers.N.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
_GATE = {"blocks.N.feed_forward.gate": "model.layers.N.mlp.gate_proj"}
_QK_NORM = {f"blocks.N.attention.{each}_norm": f"model.layers.N.self_attn.{each[0]}_norm" for each in ("query", "key")}

GPT2 = Family(
    name="GPT2LMHeadModel",
    model_type="gpt2",
    needs={"positions": "learned", "norm": "layernorm", "qk_norm": False, **NO_EXTRAS},
    keys={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "n_positions",
        "n_layers": "n_layer",
        "n_heads": "n_head",
        "d_model": "n_embd",
        "d_ff": "n_inner",
        "norm_eps": "layer_norm_epsilon",
        "tie_embeddings": "tie_word_embeddings",
        "dropout": "resid_pdrop",
    },
    activations={"gelu": ("gelu_new", "gelu_pytorch_tanh"), "gelu_exact": ("gelu",)},
    activation_key="activation_function",
    absent={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "activation_function": "gelu_new"},
    fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    modules={
        "token_embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "blocks.N.attention_norm": "transformer.h.N.ln_1",
        "blocks.N.attention.qkv": "transformer.h.N.attn.c_attn",
        "blocks.N.attention.out": "transformer.h.N.attn.c_proj",
        "blocks.N.feed_forward_norm": "transformer.h.N.ln_2",
        "blocks.N.feed_forward.up": "transformer.h.N.mlp.c_fc",
        "blocks.N.feed_forward.down": "transformer.h.N.mlp.c_proj",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    transposed=True,
    biased=True,
)
LLAMA = Family(
    name="LlamaForCausalLM",
    model_type="llama",
    same=("MistralForCausalLM",),
    needs={**_ROPE_NEEDS, "activation": "swiglu", "qk_norm": False},
    keys=_ROPE_KEYS,
    activations={"swiglu": ("silu", "swish")},
    absent={**_ROPE_ABSENT, "hidden_act": "silu"},
    fixed={"sliding_window": None},
    modules={**_ROPE_MODULES, **_GATE},
)
QWEN3 = Family(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    needs={**_ROPE_NEEDS, "activation": "swiglu", "qk_norm": True, "bias": False},
    keys=_ROPE_KEYS,
    activations=LLAMA.activations,
    absent={**_ROPE_ABSENT, "hidden_act": "silu", "head_dim": 128},
    fixed={"use_sliding_window": False, "attention_bias": False},
    modules={**_ROPE_MODULES, **_GATE, **_QK_NORM},
)
ARCEE = Family(
    name="ArceeForCausalLM",
    model_type="arcee",
    needs={**_ROPE_NEEDS, "activation": "relu2", "qk_norm": False},
    keys=_ROPE_KEYS,
    activations={"relu2": ("relu2",)},
    absent={**_ROPE_ABSENT, "hidden_act": "relu2", "rms_norm_eps": 1e-5},
    modules=_ROPE_MODULES,
)
FAMILIES = (GPT2, LLAMA, QWEN3, ARCEE)
OWN = Family(
    name="DrumlineForCausalLM",
    model_type="drumline",
    needs={},
    keys={each: each for each in (*_ROPE_KEYS, *GPT2.keys)},
    activations={},
    absent={},
    modules={},
)
"""Every GPT, with a modelling file of our own beside the weights: what has no class in transformers."""
OWN_FILE = "modeling_drumline.py"
_OWN_OPTIONS = "positions norm activation qk_norm bias norm_weights softcap value_tables smear".split()


def own_options(content: dict[str, Any]) -> dict[str, Any]:
    """The options in a config.json of our own."""
    return {name: content[name] for name in (*sizes(GPTConfig()), *_OWN_OPTIONS) if name in content}


def native_family(config: GPTConfig) -> Family | None:
    """The class that computes what a GPT with this config computes; None if there is none."""
    return next((family for family in FAMILIES if not misfits(family, config)), None)


def export_note(model: ModelSettings) -> str:
    """What a model of these settings (already resolved) can be exported as."""
    if model.model != "gpt":
        return "a custom model has no class in transformers"
    config = gpt_config(model, vocab_size=1)
    family = native_family(config)
    if family is not None:
        return f"can be exported to: {family.name}"
    nearest = min(FAMILIES, key=lambda each: len(misfits(each, config)))
    why = ", ".join(misfits(nearest, config))
    return f"with its own modelling file, since no class has {why}; --recipe portable stays native"


def misfits(family: Family, config: GPTConfig) -> list[str]:
    """The options that keep a GPT from being of this family."""
    unfit = [
        f"{name} {getattr(config, name)}" for name, value in family.needs.items() if getattr(config, name) != value
    ]
    if config.activation not in family.activations and "activation" not in family.needs:
        unfit.append(f"activation {config.activation}")
    if "n_kv_heads" not in family.keys and config.kv_heads != config.n_heads:
        unfit.append(f"n_kv_heads {config.kv_heads}")
    if "head_dim" not in family.keys and config.head_width * config.n_heads != config.d_model:
        unfit.append(f"head_dim {config.head_width}")
    return unfit


def sizes(config: GPTConfig) -> dict[str, Any]:
    """The options by which models of a family differ, with what None stands for."""
    return {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_kv_heads": config.kv_heads,
        "d_model": config.d_model,
        "d_ff": config.d_ff,
        "head_dim": config.head_width,
        "rope_theta": config.rope_theta or 10_000.0,
        "norm_eps": config.norm_eps or (1e-6 if config.norm == "rmsnorm" else 1e-5),
        "tie_embeddings": config.tie_embeddings,
        "dropout": config.dropout,
    }


def config_json(family: Family, config: GPTConfig) -> dict[str, Any]:
    """What config.json says about the architecture, for old and new versions of transformers."""
    options = sizes(config)
    if family is OWN:
        module = OWN_FILE.removesuffix(".py")
        classes = {"AutoConfig": f"{module}.DrumlineConfig", "AutoModelForCausalLM": f"{module}.{family.name}"}
        about = {"architectures": [family.name], "model_type": family.model_type, "auto_map": classes}
        return {**about, **options, **{name: getattr(config, name) for name in _OWN_OPTIONS}}
    content: dict[str, Any] = {"architectures": [family.name], "model_type": family.model_type}
    content |= {key: options[option] for option, key in family.keys.items()}
    content[family.activation_key] = family.activations[config.activation][0]
    content |= {key: value for key, value in family.fixed.items() if value is not None}
    if config.positions == "rope":
        content["rope_parameters"] = {"rope_type": "default", "rope_theta": content["rope_theta"]}
        content |= {"attention_bias": config.bias} if "bias" not in family.needs else {}
        content |= {"mlp_bias": config.bias} if "bias" not in family.needs else {}
    else:
        content |= {"embd_pdrop": config.dropout, "attn_pdrop": config.dropout}
        content["n_ctx"] = config.max_position_embeddings  # its former name, which llama.cpp's converter reads
    return content
