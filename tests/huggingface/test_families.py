"""One table per class, for both directions: settings <-> config.json, tensors <-> tensors."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.config.model import GPTConfig
from drumline.config.presets import PRESETS, gpt_config, with_preset
from drumline.config.settings import TrainConfig
from drumline.errors import ConfigError
from drumline.huggingface.families import ARCEE, FAMILIES, GPT2, LLAMA, QWEN3, config_json, native_family
from drumline.huggingface.reading_config import read_config, simplest
from drumline.huggingface.tensors import mapped, shapes

ROPE = {"positions": "rope", "norm": "rmsnorm", "bias": False}


@st.composite
def gpts(draw: st.DrawFn) -> GPTConfig:
    """Any GPT that a class of transformers computes."""
    family = draw(st.sampled_from(FAMILIES))
    heads, width = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([2, 4, 6]))
    options: dict[str, Any] = {**family.needs, "activation": draw(st.sampled_from(sorted(family.activations)))}
    options["bias"] = options.get("bias", draw(st.booleans()))
    if family is not GPT2:
        options["n_kv_heads"] = draw(st.sampled_from([each for each in (1, 2, 4) if heads % each == 0]))
        options["head_dim"] = draw(st.sampled_from([None, 8]))
        options["rope_theta"] = draw(st.sampled_from([None, 500_000.0]))
    return simplest(
        GPTConfig(
            vocab_size=draw(st.integers(3, 9)),
            max_position_embeddings=draw(st.integers(1, 5)),
            n_layers=draw(st.integers(1, 3)),
            n_heads=heads,
            d_model=heads * width,
            d_ff=draw(st.integers(1, 9)),
            tie_embeddings=draw(st.booleans()),
            norm_weights=draw(st.booleans()),
            norm_eps=draw(st.sampled_from([None, 3e-5])),
            **options,
        )
    )


@settings(max_examples=100)
@given(gpts())
def test_a_config_json_gives_back_the_gpt_that_it_was_written_for(config: GPTConfig) -> None:
    family = native_family(config)
    assert family is not None
    back = read_config(config_json(family, config), "here")
    # What the class has always, the model that comes back has as well: ones and zeros in the places of none.
    assert back == replace(config, norm_weights=True, bias=config.bias or family.biased)


@settings(max_examples=50)
@given(gpts())
def test_every_tensor_gives_back_the_one_that_it_was_made_of(config: GPTConfig) -> None:
    family = native_family(config)
    assert family is not None
    every = mapped(family, config)
    ours = {name: torch.randn(shape) for name, shape in shapes(config).items()}
    names = [name for each in every for name in each.theirs]
    assert len(names) == len(set(names))
    for each in every:
        tensor = ours.pop(each.ours, None)
        assert (tensor is None) == (each.fill is not None)
        theirs = each.to_theirs(tensor)
        assert [tuple(part.shape) for part in theirs] == each.their_shapes
        expected = torch.full(each.shape, each.fill) if tensor is None else tensor  # type: ignore[arg-type]
        assert torch.equal(each.to_ours(theirs), expected)
    assert not ours


@pytest.mark.parametrize(
    ("options", "family"),
    [
        ({}, GPT2),
        ({"bias": False, "activation": "gelu_exact", "tie_embeddings": False}, GPT2),
        ({**ROPE, "activation": "swiglu", "n_kv_heads": 4}, LLAMA),
        ({**ROPE, "activation": "swiglu", "qk_norm": True}, QWEN3),
        ({**ROPE, "activation": "relu2", "bias": True}, ARCEE),
        ({**ROPE, "activation": "relu2", "qk_norm": True}, None),
        ({**ROPE, "activation": "swiglu", "softcap": 15.0}, None),
        ({**ROPE, "activation": "swiglu", "smear": True}, None),
        ({"n_kv_heads": 4}, None),
        ({"positions": "rope"}, None),
    ],
)
def test_a_model_is_of_the_class_that_computes_it_or_of_none(options: dict[str, Any], family: Any) -> None:
    assert native_family(GPTConfig(**options)) is family


def test_the_classic_presets_stay_native_and_the_modern_ones_do_not() -> None:
    for name in PRESETS:
        model = with_preset(TrainConfig(model=replace(TrainConfig().model, preset=name))).model
        family = native_family(gpt_config(model, vocab_size=64))
        assert family is {"modern": None, "llama": LLAMA}.get(name.partition("-")[0], GPT2)


LLAMA_JSON = config_json(LLAMA, GPTConfig(**ROPE, activation="swiglu"))  # type: ignore[arg-type]
QWEN3_JSON = config_json(QWEN3, GPTConfig(**ROPE, activation="swiglu", qk_norm=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "is a MixtralForCausalLM"),
        ({"architectures": [], "model_type": "bert"}, "model_type bert"),
        ({}, "model_type None"),
        ({**LLAMA_JSON, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type llama3"),
        ({**LLAMA_JSON, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type yarn"),
        ({**LLAMA_JSON, "architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding windows"),
        ({**QWEN3_JSON, "use_sliding_window": True}, "sliding windows"),
        ({**QWEN3_JSON, "layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({**QWEN3_JSON, "attention_bias": True}, "biases in attention only"),
        ({**LLAMA_JSON, "attention_bias": True}, "biases in attention only"),
        ({**LLAMA_JSON, "num_local_experts": 8}, "mixture of experts"),
        ({**LLAMA_JSON, "quantization_config": {"bits": 4}}, "is quantized"),
        ({**LLAMA_JSON, "hidden_act": "gelu"}, "activation gelu"),
        ({**LLAMA_JSON, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA_JSON, "hidden_size": "many"}, "hidden_size|d_model is 'many'"),
        ({**LLAMA_JSON, "hidden_size": -4}, "d_model is -4"),
        ({**config_json(GPT2, GPTConfig()), "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse"),
    ],
)
def test_what_drumline_does_not_compute_is_refused_by_name(content: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        read_config(content, "models/x")
    assert raised.value.fix


def test_configs_of_other_versions_and_of_the_same_layout_are_read() -> None:
    plain = read_config(LLAMA_JSON, "x")
    old = {key: value for key, value in LLAMA_JSON.items() if key not in ("rope_parameters", "head_dim", "mlp_bias")}
    assert read_config({**old, "rope_scaling": None}, "x") == plain
    new = {key: value for key, value in LLAMA_JSON.items() if key != "rope_theta"}
    assert read_config({**new, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "x").rope_theta == 7.0
    assert read_config({**LLAMA_JSON, "architectures": ["MistralForCausalLM"], "sliding_window": None}, "x") == plain
    gpt2 = config_json(GPT2, GPTConfig())
    assert read_config({**gpt2, "n_inner": None}, "x") == GPTConfig()
    assert (
        read_config({"model_type": "gpt2", **{k: gpt2[k] for k in ("n_embd", "n_layer", "n_head")}}, "x").d_ff == 3072
    )
