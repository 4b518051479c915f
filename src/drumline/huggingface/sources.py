"""Models from elsewhere: a folder in the format of Hugging Face, a name on its hub, or nanoGPT's ckpt.pt.

No code of a model is run, and no pickle is loaded but by torch's weights-only reader.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from torch import Tensor

from drumline.config import GPTConfig
from drumline.data import TOKENIZER
from drumline.errors import CheckpointError, ConfigError, DataError, MissingExtraError
from drumline.huggingface.companions import CONFIG, KEPT, read_json
from drumline.huggingface.families import GPT2, Family, config_json
from drumline.huggingface.reading_config import family_of, read_config
from drumline.huggingface.weights import DTYPES, INDEX, SUFFIX, StoredTensors

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_WANTED = [CONFIG, *KEPT, TOKENIZER, f"*{SUFFIX}", INDEX]
_WRAPPER = "_orig_mod."
"""What torch.compile puts before the names of weights."""


class Tensors(Protocol):
    """Tensors by name, each read when it is asked for."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model from elsewhere: what it is, and where its files are."""

    name: str
    """As the user wrote it."""
    path: Path
    family: Family
    config: GPTConfig
    content: dict[str, Any]
    """Its config.json."""

    @property
    def tokenizer(self) -> Path | None:
        path = self.path / TOKENIZER
        return path if path.is_file() else None

    def tensors(self) -> Tensors:
        if self.path.is_dir():
            return StoredTensors(weight_files(self.path))
        return _Loaded(_nanogpt(self.path)["model"])


class _Loaded:
    """Tensors of a file that torch has mapped into memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name.removeprefix(_WRAPPER): tensor for name, tensor in tensors.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        kinds = {getattr(torch, ours): theirs for ours, theirs in DTYPES.items()}
        self.dtypes = {name: kinds.get(tensor.dtype, str(tensor.dtype)) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def open_source(name: str) -> Source:
    """What a model from elsewhere is; refused if drumline cannot compute it. Its weights are not read yet."""
    path = _located(name)
    if path.is_file():
        return _nanogpt_source(name, path)
    return folder_source(name, path)


def folder_source(name: str, path: Path) -> Source:
    content = _config(path)
    return Source(
        name=name, path=path, family=family_of(content, name), config=read_config(content, name), content=content
    )


def _located(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_file() and path.suffix in (".pt", ".pth"):
        return path
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(
            f"{name} is neither a folder nor a .pt file",
            fix=f"give the folder with {CONFIG} and model{SUFFIX}, or nanoGPT's ckpt.pt",
        )
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"there is no folder {name}", fix="check the path, or give a Hugging Face name: OWNER/NAME")
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise MissingExtraError(f"there is no folder {name}, and the Hugging Face name {name}", extra="hf") from None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_WANTED))
    except (
        Exception
    ) as error:  # no network, no such name, no rights: the library has a class for each, and so has httpx
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"there is no folder {name}, and the Hugging Face model {name} cannot be downloaded: {why}",
            fix="check the name and the network, or download it elsewhere and give its folder",
        ) from None


def _config(path: Path) -> dict[str, Any]:
    if (path / "adapter_config.json").exists():
        raise ConfigError(
            f"{path} is an adapter (LoRA), not a whole model",
            fix="merge it into its model first: peft's merge_and_unload(), then save_pretrained",
        )
    if not (path / CONFIG).exists():
        raise ConfigError(
            f"{path} has no {CONFIG}, so it is no Hugging Face model",
            fix="give the folder that save_pretrained or `drumline export` wrote; a run is resumed with --run_dir",
        )
    content = read_json(inside(path, CONFIG))
    if not content:
        raise CheckpointError(f"{path / CONFIG} is damaged: it is no JSON object", fix="copy or download it again")
    return content


def inside(folder: Path, name: str) -> Path:
    """A file of a folder, which must not lead out of it; the hub's cache keeps its files in blobs/, beside it."""
    path = folder / name
    cache = folder.resolve().parent.parent / "blobs"
    if Path(name).name != name or not any(
        path.resolve().is_relative_to(home) for home in (folder.resolve(), cache) if home is not None
    ):
        raise CheckpointError(
            f"{folder} names a file outside of it: {name}"
            + (f", a link to {path.resolve()}" if path.is_symlink() else ""),
            fix="do not use this folder, or put in its place what it leads to",
        )
    return path


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model."""
    index, single = folder / INDEX, folder / f"model{SUFFIX}"
    if index.exists():
        weight_map = read_json(inside(folder, INDEX)).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index} is damaged: it has no weight_map", fix="copy or download it again")
        files = [inside(folder, name) for name in sorted(set(weight_map.values()))]
    elif single.exists():
        files = [inside(folder, single.name)]
    else:
        raise _no_weights(folder)
    for path in files:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, which {INDEX} lists", fix="copy or download it again")
    return files


def _no_weights(folder: Path) -> CheckpointError:
    pickled = [path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in sorted(folder.glob(pattern))]
    other = [path.name for pattern in ("*.gguf", "*.h5", "*.msgpack") for path in sorted(folder.glob(pattern))]
    if not pickled and not other:
        return CheckpointError(f"{folder} has no weights: no model{SUFFIX}", fix="copy or download it again")
    what = "a pickle, which could run any code when loaded" if pickled else "not read by drumline"
    return CheckpointError(
        f"{folder} has its weights in {(pickled or other)[0]}, {what}",
        fix="where you trust it, load it with transformers and save it as safetensors: model.save_pretrained(FOLDER)",
    )


def _nanogpt(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError:
        raise CheckpointError(
            f"{path} has Python objects besides tensors, numbers and text, which could run any code when loaded",
            fix="load it where it was made, and save only its model, model_args and numbers",
        ) from None
    except Exception as error:  # a damaged archive can fail in any way
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is damaged, or no file of torch.save: {why}", fix="copy it again") from None
    if isinstance(content, dict) and "format" in content:
        raise ConfigError(f"{path} is a checkpoint of drumline", fix=f"drumline train --resume_from {path}")
    arguments = content.get("model_args") if isinstance(content, dict) else None
    if not isinstance(arguments, dict) or not isinstance(content.get("model"), dict):
        raise CheckpointError(
            f"{path} is no checkpoint of nanoGPT: it has no model and model_args",
            fix="give nanoGPT's ckpt.pt, or a folder of Hugging Face",
        )
    if not all(isinstance(each, Tensor) for each in content["model"].values()):
        raise CheckpointError(f"{path} has something other than tensors in its model", fix="copy it again")
    return dict(content)


def _nanogpt_source(name: str, path: Path) -> Source:
    """nanoGPT has GPT-2's names, but matrices as torch keeps them, may have no biases, and has the exact GELU."""
    found = _nanogpt(path)["model_args"]
    try:
        config = GPTConfig(
            vocab_size=int(found["vocab_size"]),
            max_position_embeddings=int(found["block_size"]),
            n_layers=int(found["n_layer"]),
            n_heads=int(found["n_head"]),
            d_model=int(found["n_embd"]),
            d_ff=4 * int(found["n_embd"]),
            bias=bool(found["bias"]),
            activation="gelu_exact",
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has damaged model_args ({error!r})", fix="copy it again") from None
    family = replace(GPT2, name="nanoGPT", transposed=False, biased=config.bias)
    return Source(name=name, path=path, family=family, config=config, content=config_json(GPT2, config))
