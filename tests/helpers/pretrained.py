"""Models as transformers writes them, small and with random weights, and a tokenizer beside them."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from drumline.data.tokenizer import Tokenizer

ROPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CLASSES: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "activation_function": "gelu_new"},
    "Llama": {**ROPE, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    "Mistral": {**ROPE, "sliding_window": None, "tie_word_embeddings": True},
    "Qwen3": {**ROPE, "head_dim": 8, "tie_word_embeddings": True},
    "Arcee": {**ROPE, "attention_bias": True, "mlp_bias": True},
}


def written(
    folder: Path, name: str, *, dtype: torch.dtype = torch.bfloat16, shard_size: str = "50GB", **more: Any
) -> Path:
    """A folder with a model of this class, as save_pretrained writes it, and a tokenizer.json."""
    import transformers

    torch.manual_seed(0)
    folder.mkdir(parents=True)
    tokenizer = Tokenizer.train(["the drum beats the line, and the line beats the drum. " * 20], vocab_size=280)
    tokenizer.save(folder / "tokenizer.json")
    size = tokenizer.vocab_size + 3  # as in models whose embedding is rounded up
    config = getattr(transformers, f"{name}Config")(vocab_size=size, **{**CLASSES[name], **more})
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = getattr(transformers, kind)(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, which begin as ones and zeros
            parameter.normal_(std=0.5)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found
