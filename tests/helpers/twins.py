"""transformers' own implementations, filled with our weights: what our models are compared with."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.model.gpt import GPT


def gpt2_twin(model: GPT, attention: str) -> Any:
    """transformers' GPT-2 with our weights; its Conv1D stores matrices transposed."""
    transformers = pytest.importorskip("transformers")
    c = model.config
    twin_config = transformers.GPT2Config(
        vocab_size=c.vocab_size,
        n_positions=c.max_position_embeddings,
        n_embd=c.d_model,
        n_layer=c.n_layers,
        n_head=c.n_heads,
        n_inner=c.d_ff,
        activation_function="gelu_new",
        attn_implementation=attention,
    )
    twin = transformers.GPT2LMHeadModel(twin_config).eval()
    names = {
        "token_embedding": "wte",
        "position_embedding": "wpe",
        "blocks": "h",
        "attention_norm": "ln_1",
        "attention": "attn",
        "qkv": "c_attn",
        "out": "c_proj",
        "feed_forward_norm": "ln_2",
        "feed_forward": "mlp",
        "up": "c_fc",
        "down": "c_proj",
        "final_norm": "ln_f",
    }
    theirs = {}
    for name, weight in model.state_dict().items():
        linear = name.endswith((".qkv.weight", ".out.weight", ".up.weight", ".down.weight"))
        theirs["transformer." + ".".join(names.get(p, p) for p in name.split("."))] = weight.T if linear else weight
    theirs["lm_head.weight"] = theirs["transformer.wte.weight"]
    twin.load_state_dict(theirs)
    return twin


def qwen3_twin(model: GPT) -> Any:
    """transformers' Qwen3 with our weights; it keeps queries, keys and values in three matrices."""
    transformers = pytest.importorskip("transformers")
    c = model.config
    twin_config = transformers.Qwen3Config(
        vocab_size=c.vocab_size,
        max_position_embeddings=c.max_position_embeddings,
        hidden_size=c.d_model,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_width,
        intermediate_size=c.d_ff,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        rope_theta=c.rope_theta or 10_000.0,
    )
    names = {
        "attention_norm": "input_layernorm",
        "attention.out": "self_attn.o_proj",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "feed_forward_norm": "post_attention_layernorm",
        "feed_forward.gate": "mlp.gate_proj",
        "feed_forward.up": "mlp.up_proj",
        "feed_forward.down": "mlp.down_proj",
    }
    ours = model.state_dict()
    theirs = {
        "model.embed_tokens.weight": ours["token_embedding.weight"],
        "model.norm.weight": ours["final_norm.weight"],
        "lm_head.weight": ours["head.weight"],
    }
    widths = (c.d_model, c.kv_heads * c.head_width, c.kv_heads * c.head_width)
    for layer in range(c.n_layers):
        for name, their_name in names.items():
            theirs[f"model.layers.{layer}.{their_name}.weight"] = ours[f"blocks.{layer}.{name}.weight"]
        parts = ours[f"blocks.{layer}.attention.qkv.weight"].split(widths)
        for letter, part in zip("qkv", parts, strict=True):
            theirs[f"model.layers.{layer}.self_attn.{letter}_proj.weight"] = part
    twin = transformers.Qwen3ForCausalLM(twin_config).eval()
    twin.load_state_dict(theirs)
    return twin
