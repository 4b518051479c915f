"""What a run is: its config, where it ran, its data and its model. Read from small files and from headers."""

from __future__ import annotations

import json
import struct
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from drumline.data import TOKENIZER
from drumline.files import CHECKPOINT_PREFIX, RunFolder
from drumline.watch.lines import open_inside, read_inside

_HEADER_BYTES = 64 << 20
_MOST_FILES = 256
_EXCERPTS, _EXCERPT_TOKENS, _EXCERPT_CHARACTERS = 4, 96, 400
_MANIFEST = "manifest.json"
_DTYPE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_STACKS = ("blocks", "layers", "h", "block", "layer")
"""Modules whose numbered children are the layers of a model."""


def read_json(root: Path, path: Path) -> dict[str, Any]:
    """A JSON object; {} if there is none."""
    with suppress(ValueError, RecursionError):
        content = json.loads(read_inside(root, path) or b"{}")
        if isinstance(content, dict):
            return content
    return {}


def config_of(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """config.toml by section, or trainer.json."""
    with suppress(ValueError, RecursionError):
        tables = tomllib.loads(read_inside(folder.path, folder.config).decode())
        flat = {name: value for name, value in tables.items() if not isinstance(value, dict)}
        sections = {name: value for name, value in tables.items() if isinstance(value, dict)}
        if tables:
            return ({"": flat} if flat else {}) | sections
    trainer = read_json(folder.path, folder.trainer)
    return {"trainer": trainer} if trainer else {}


def tokens_per_step(config: dict[str, dict[str, Any]]) -> float | None:
    """Of a run whose records do not say how many tokens it has seen."""
    batch, context = config.get("batch", {}).get("global_batch_size"), config.get("model", {}).get("context")
    return float(batch * context) if isinstance(batch, int) and isinstance(context, int) else None


def checkpoints(folder: RunFolder) -> list[Path]:
    """Complete checkpoints by step, the newest last."""
    found = []
    with suppress(OSError):
        for path in folder.checkpoints.glob(f"{CHECKPOINT_PREFIX}*"):
            number = path.name.removeprefix(CHECKPOINT_PREFIX)
            if number.isdecimal() and (path / _MANIFEST).is_file():
                found.append((int(number), path))
    return [path for _, path in sorted(found)]


def model_card(folder: RunFolder) -> dict[str, Any]:
    """Parameters and bytes by part, of the newest checkpoint's headers; {} without one."""
    paths = checkpoints(folder)
    if not paths:
        return {}
    parts: dict[str, dict[str, int]] = {}
    layers: set[str] = set()
    for name, parameters, _ in _tensors(folder, paths[-1], "model"):
        part, layer = _part_of(name)
        layers |= {layer} if layer else set()
        sizes = parts.setdefault(part, {"parameters": 0, "weights": 0, "gradients": 0, "optimizer": 0})
        sizes["parameters"] += parameters
        sizes["weights"] += 4 * parameters
        sizes["gradients"] += 4 * parameters
    for name, _, size in _tensors(folder, paths[-1], "optimizer"):
        part, _ = _part_of(name.rpartition("/")[2])
        parts.setdefault(part, {"parameters": 0, "weights": 0, "gradients": 0, "optimizer": 0})["optimizer"] += size
    largest = sorted(parts.items(), key=lambda item: -item[1]["parameters"])
    rows = [{"part": part, **sizes} for part, sizes in largest]
    step = int(paths[-1].name.removeprefix(CHECKPOINT_PREFIX))
    return {"step": step, "layers": len(layers), "parts": rows} if rows else {}


def _part_of(name: str) -> tuple[str, str]:
    """blocks.3.attention.qkv.weight -> attention, 3."""
    words = name.split(".")
    for place, word in enumerate(words[:-1]):
        if word in _STACKS and words[place + 1].isdecimal() and len(words) > place + 2:
            return words[place + 2], words[place + 1]
    return words[0], ""


def _tensors(folder: RunFolder, checkpoint: Path, kind: str) -> Iterator[tuple[str, int, int]]:
    """Name, number of elements and bytes of each tensor in the files of a kind."""
    for path in sorted(checkpoint.glob(f"{kind}*.safetensors"))[:_MOST_FILES]:
        file = open_inside(folder.path, path)
        if file is None:
            continue
        with file, suppress(ValueError, TypeError, KeyError, struct.error, OSError, RecursionError, AttributeError):
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size)) if size <= _HEADER_BYTES else {}
            for name, tensor in header.items():
                if name != "__metadata__":
                    elements = int(np.prod([int(n) for n in tensor["shape"]], dtype=np.int64))
                    yield str(name).partition("@")[0], elements, elements * _DTYPE_BYTES.get(str(tensor["dtype"]), 1)


def versions_of(folder: RunFolder) -> dict[str, Any]:
    """Of the program and its libraries, in the newest checkpoint."""
    paths = checkpoints(folder)
    versions = read_json(folder.path, paths[-1] / _MANIFEST).get("versions") if paths else None
    return versions if isinstance(versions, dict) else {}


def data_card(folder: RunFolder) -> dict[str, Any]:
    """Documents, tokens and vocabulary, and the beginnings of a few documents.

    The tokens lie outside of the run folder. They are opened only if the manifest beside them has the hash that the
    run has: what anyone writes into a data.json opens nothing else.
    """
    origin = read_json(folder.path, folder.data)
    card: dict[str, Any] = {name: origin[name] for name in ("sha256", "tokens", "text_bytes") if name in origin}
    if not isinstance(origin.get("train"), str):
        return card
    prepared = Path(origin["train"]).parent
    card["folder"] = str(prepared)
    manifest = read_json(prepared, prepared / _MANIFEST)
    with suppress(KeyError, TypeError, ValueError, OSError):
        if manifest["format"] != "drumline-tokens" or manifest["files"]["train.bin"]["sha256"] != origin["sha256"]:
            return card
        card |= {name: manifest[name] for name in ("source", "source_key", "vocab_size")}
        card["splits"] = manifest["splits"]
        card["excerpts"] = list(_excerpts(prepared, manifest))
    return card


def _excerpts(prepared: Path, manifest: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Name and beginning of documents at even distances."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(read_inside(prepared, prepared / TOKENIZER, most_bytes=_HEADER_BYTES).decode())
    ends = _mapped(prepared, "train.documents.bin", "<u8")
    tokens = _mapped(prepared, "train.bin", "<u2" if manifest["vocab_size"] <= 1 << 16 else "<u4")
    names = read_inside(prepared, prepared / "train.names.txt").decode(errors="replace").splitlines()
    for number in dict.fromkeys(np.linspace(0, len(ends) - 1, _EXCERPTS + 2).astype(int)[1:-1].tolist()):
        start = int(ends[number - 1]) if number else 0
        part = tokens[start : min(int(ends[number]) - 1, start + _EXCERPT_TOKENS)]
        text = tokenizer.decode([int(token) for token in part], skip_special_tokens=True)
        yield {"name": names[number] if number < len(names) else "", "text": text[:_EXCERPT_CHARACTERS]}


def _mapped(prepared: Path, name: str, dtype: str) -> np.memmap[Any, np.dtype[Any]]:
    file = open_inside(prepared, prepared / name)
    if file is None:
        raise FileNotFoundError(name)
    with file:
        return np.memmap(file, dtype=dtype, mode="r")


def task_results(folder: RunFolder) -> list[dict[str, Any]]:
    """Results of tasks: evals/step-N.json, newest first."""
    paths = []
    with suppress(OSError):
        paths = sorted(folder.evals.glob("*.json"), reverse=True)[:20]
    return [{"file": path.name, "results": read_json(folder.path, path)} for path in paths]
