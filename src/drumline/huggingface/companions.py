"""What lies beside the weights: config.json, generation_config.json, and the files of the tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from drumline import __version__
from drumline.chats import STYLE, ChatStyle, ChatTemplate
from drumline.config import GPTConfig
from drumline.data import TOKENIZER, Tokenizer
from drumline.files import RunFolder
from drumline.huggingface.families import Family, config_json

CONFIG, GENERATION = "config.json", "generation_config.json"
KEPT = (
    CONFIG,
    GENERATION,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Files of a model that a run began from, which it keeps and gives back."""


def write_companions(
    folder: Path, family: Family, config: GPTConfig, *, dtype: str, tokenizer: Tokenizer | None, run: RunFolder
) -> None:
    """run: it has the files of the model that it began from, if it began from one, and how its conversations look"""
    kept = run.pretrained
    original = read_json(kept / CONFIG) if (kept / CONFIG).exists() else {}
    end = None if tokenizer is None else tokenizer.end_of_text
    ids = {"bos_token_id": end, "eos_token_id": end}
    content = {**ids, **original, **config_json(family, config), "torch_dtype": dtype, "dtype": dtype}
    content.pop("_name_or_path", None)
    if original and config.positions == "rope":  # trained on with a shorter context, it still has all its positions
        content["max_position_embeddings"] = original["max_position_embeddings"]
    content["drumline_version"] = __version__
    _write(folder / CONFIG, content)
    # Batches of prompts are padded with some token: the end of a text is one that no prompt has.
    _write(folder / GENERATION, {**ids, "pad_token_id": end} if end is not None else ids)
    if tokenizer is not None:
        tokenizer.save(folder / TOKENIZER)
        _write(folder / "tokenizer_config.json", _tokenizer_config(tokenizer, context=config.max_position_embeddings))
    for name in KEPT[1:]:
        if (kept / name).exists():
            shutil.copyfile(kept / name, folder / name)
    if tokenizer is not None and (run.path / STYLE).is_file():
        _write_chat(folder, tokenizer, ChatStyle.found(run.path))


def _write_chat(folder: Path, tokenizer: Tokenizer, style: ChatStyle) -> None:
    """How the model is talked to, for `apply_chat_template`, and what ends an answer, for `generate`."""
    path = folder / "tokenizer_config.json"
    content = {**read_json(path), "chat_template": style.jinja}
    if style.template:  # which may write these tokens: as text that the run has seen, or not at all
        names = {"bos_token": style.bos_token, "eos_token": style.eos_token}
        content = {name: value for name, value in content.items() if name not in names}
        content |= {name: token for name, token in names.items() if token}
    _write(path, content)
    was = read_json(folder / GENERATION)
    known = was.get("eos_token_id")
    known = known if isinstance(known, list) else [] if known is None else [known]
    ends = list(dict.fromkeys([*known, *ChatTemplate(tokenizer, style=style).ends]))
    _write(folder / GENERATION, {**was, "eos_token_id": ends if len(ends) > 1 else ends[0]})


def _tokenizer_config(tokenizer: Tokenizer, *, context: int) -> dict[str, Any]:
    end = tokenizer.decode([tokenizer.end_of_text])
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "model_input_names": ["input_ids", "attention_mask"],  # older versions add one that these models do not take
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "clean_up_tokenization_spaces": False,
    }


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
