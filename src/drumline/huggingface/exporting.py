"""A run -> a folder that transformers loads: written aside, hashed, compared with drumline's own logits, renamed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drumline.config import GPTConfig, gpt_config
from drumline.errors import ConfigError
from drumline.files import flush
from drumline.generate import FoundRun, find_run
from drumline.huggingface.card import write_card
from drumline.huggingface.companions import CONFIG, read_json, write_companions
from drumline.huggingface.comparing import can_compare, largest_difference, own_logits, text_ids
from drumline.huggingface.families import OWN, OWN_FILE, native_family
from drumline.huggingface.tensors import Mapped, mapped
from drumline.huggingface.weights import DTYPES, shards, write_shards
from drumline.pieces import reading, stored_in

Read = Callable[[Mapped], Tensor | None]
"""Our tensor of a mapping; None if we have none."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    folder: Path
    architecture: str
    step: int
    dtype: str
    bytes: int
    files: int
    """Of weights."""
    compared: str
    """On which tokens logits were compared."""
    difference: float | None
    """The largest between logits; None if they were not compared."""
    warnings: tuple[str, ...] = ()


def export_run(path: Path, out: Path, *, dtype: str | None, shard_bytes: int, license: str) -> Exported:
    """dtype: None for that of the model that the run began from, or float32"""
    if os.path.lexists(out):
        raise ConfigError(f"{out} already exists", fix="choose another folder: -o FOLDER, or remove it")
    run = find_run(path)
    if run.config.model.model != "gpt":
        raise ConfigError(
            f"the model of {path} is {run.config.model.model}, for which transformers has no class",
            fix="export a run of drumline's own GPT; the weights are in its checkpoints, as safetensors",
        )
    config = exported_config(run)
    family = native_family(config) or OWN
    dtype = dtype or _own_dtype(run)
    kind = getattr(torch, dtype)
    tensors = mapped(family, config)
    every = shards(tensors, kind, largest_bytes=shard_bytes)
    size_bytes = sum(shard.bytes(kind) for shard in every)
    with _aside(out, size_bytes) as aside:
        sha256s = write_shards(every, aside, kind, read=_reader(run, tensors))
        write_companions(aside, family, config, dtype=dtype, tokenizer=run.tokenizer, run=run.folder)
        write_card(
            aside / "README.md",
            name=out.name,
            architecture=family.name,
            run=run.folder,
            config=run.config,
            step=run.step,
            parameters=sum(torch.Size(each.shape).numel() for each in tensors),
            license=license,
            sha256s=sha256s,
            needs_code=family is OWN,
        )
        if family is OWN:
            shutil.copyfile(Path(__file__).with_name(OWN_FILE), aside / OWN_FILE)
        for file in aside.iterdir():
            flush(file)
        ids, what = text_ids(run, context=config.max_position_embeddings)
        difference = None
        if can_compare():
            own = own_logits(run, ids, dtype=kind, vocab_size=config.vocab_size)
            difference = largest_difference(aside, ids, own, has_code=family is OWN)
    return Exported(
        folder=out,
        architecture=family.name,
        step=run.step,
        dtype=dtype,
        bytes=size_bytes,
        files=len(every),
        compared=f"{ids.numel()} {what}",
        difference=difference,
        warnings=run.warnings,
    )


def exported_config(run: FoundRun) -> GPTConfig:
    """The GPT of a run, without the rows that only round up its vocabulary.

    Nothing can then generate an id that its tokenizer does not have, and who computes faster with round sizes pads for
    itself, as vLLM does. The rows of a model that came from elsewhere all go back.
    """
    rows = run.config.data.vocab_size if run.config.model.init_from else run.vocab_size
    return gpt_config(run.config.model, vocab_size=rows or run.vocab_size)


def _own_dtype(run: FoundRun) -> str:
    dtype = str(read_json(run.folder.pretrained / CONFIG).get("dtype", "float32"))
    return dtype if dtype in DTYPES else "float32"


def _reader(run: FoundRun, tensors: list[Mapped]) -> Read:
    """Reads our tensors from the checkpoint, one by one; a single file was read as a whole."""
    whole = run.checkpoint.tensors
    stored = stored_in(run.checkpoint.path, "model-") if whole is None else None

    def read(each: Mapped) -> Tensor | None:
        if each.fill is not None:
            return None
        if whole is not None:
            return whole[each.ours]
        assert stored is not None
        with reading(run.checkpoint.path):
            return stored.read(each.ours)

    return read


@contextmanager
def _aside(out: Path, size_bytes: int) -> Iterator[Path]:
    """A folder beside `out`, which gets its name at the end; if anything fails, nothing of it is left."""
    made = [parent for parent in out.absolute().parents if not parent.exists()]
    aside = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        free_bytes = shutil.disk_usage(aside).free
        if free_bytes < size_bytes:
            raise OSError(errno.ENOSPC, f"{size_bytes:,} bytes are needed, {free_bytes:,} are free")
        yield aside
        flush(aside)
        aside.rename(out)
        flush(out.parent)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            raise ConfigError(
                f"{out} is not writable ({error.strerror or error})", fix="free up space, or choose another folder: -o"
            ) from None
        raise
