"""The folders of a mix: opened, and refused if they do not belong together."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from drumline.config import LENGTHS, DataConfig, MixSource, MixStage, TrainConfig, parse_mix, parse_stages
from drumline.data import MANIFEST, TOKENIZER, BatchPlan, Data, TokenFile, Tokenizer, open_tokens, read_manifest
from drumline.data import Skipped as Unread
from drumline.errors import ConfigError, DataError
from drumline.parallel import Pulse
from drumline.report import Record, Records
from drumline.train import Setup

if TYPE_CHECKING:
    from drumline.mixes.batches import MixBatches


@dataclass(frozen=True)
class Source:
    """A prepared folder of a mix."""

    about: MixSource
    train: TokenFile
    valid: TokenFile | None

    @property
    def name(self) -> str:
        return self.about.name


@dataclass(frozen=True)
class MixTokens(TokenFile):
    """The tokens of all sources, one after the other."""

    parts: tuple[TokenFile, ...] = ()
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def windows(self, context: int) -> int:
        return sum(part.windows(context) for part in self.parts)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        read, first = [], 0
        for part in self.parts:
            low, high = max(start - first, 0), min(stop - first, len(part))
            if low < high:
                read.append(part.read(low, high))
            first += len(part)
        return np.concatenate(read) if read else np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Mix:
    """The sources of a run, sorted by name, and the stages of their weights."""

    sources: tuple[Source, ...]
    stages: tuple[MixStage, ...]

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.sources]

    @property
    def valid(self) -> dict[str, TokenFile]:
        """The validation data of the sources that have some."""
        return {each.name: each.valid for each in self.sources if each.valid is not None}

    def batches(self, _: TokenFile, plan: BatchPlan, *, total_steps: int, **more: Any) -> MixBatches:
        """The batches of a run of this length."""
        from drumline.mixes.batches import MixBatches

        return MixBatches(self, plan, total_steps=total_steps, **more)

    def described(self, plan: BatchPlan, config: TrainConfig) -> list[str]:
        """What a run would have of each source; nothing while its length is not known."""
        from drumline.mixes.batches import MixBatches
        from drumline.mixes.losses import introduction

        make = partial(MixBatches, self, plan, context=config.model.context or 1, seed=config.run.seed)
        total_steps = config.batch.total_steps
        if config.batch.epochs is not None:
            total_steps = math.ceil(config.batch.epochs * make(total_steps=0).items / plan.sequences)
        return introduction(make(total_steps=total_steps), total_steps=total_steps) if total_steps else []

    def follow(self, setup: Setup, records: Records, *, total_steps: int) -> None:
        """Say what the run has of each source, and record the loss of each."""
        from drumline.mixes.losses import follow

        follow(self, setup, records, total_steps=total_steps)

    def evaluator(self, config: TrainConfig, data: Data, setup: Setup) -> Callable[[Pulse], Record]:
        """The evaluation of each source's validation data."""
        from drumline.mixes.evaluation import evaluator

        return evaluator(self, config, data, setup)


@dataclass(frozen=True)
class MixData(Data):
    """The data of a run that has a mix."""

    def origin(self) -> str:
        sources = [
            {
                "name": each.name,
                "train": str(each.train.path.absolute()),
                "sha256": each.train.sha256,
                "tokens": len(each.train),
                "text_bytes": each.train.text_bytes,
            }
            for each in self.mix.sources
        ]
        whole = {"sha256": self.train.sha256, "tokens": len(self.train), "text_bytes": self.train.text_bytes}
        about = {"cwd": os.getcwd(), "train": sources[0]["train"], **whole, "sources": sources}
        return json.dumps(about, indent=2) + "\n"


def checked_mix(config: TrainConfig) -> TrainConfig:
    """Refuse settings that do not go with a mix, and folders that do not go together; nothing large is read.

    A mix of amounts alone is a run of that length, unless another one is given.
    """
    sources, data = parse_mix(config.data.train_data_path), config.data
    if data.skip_list is not None:
        raise ConfigError(
            f"--skip_list {data.skip_list} is for one folder, not for a mix of {len(sources)}",
            fix="prepare the folder again without those documents, or train on one folder",
        )
    if data.format == "chat":
        raise ConfigError("--format chat is for one source, not for a mix", fix="drop --format chat, or train on one")
    stages = parse_stages(data.stages, [each.name for each in sources])
    by_amount = [each for each in sources if each.kind != "weight"]
    if stages and by_amount:
        raise ConfigError(
            f"stages have weights, but {by_amount[0].name} has {by_amount[0].kind}",
            fix="give every source of the mix a weight, or drop --stages",
        )
    _check_alike(sources)
    if len(by_amount) == len(sources) and all(getattr(config.batch, name) is None for name in LENGTHS):
        return replace(config, batch=replace(config.batch, epochs=1.0))
    return config


def _check_alike(sources: Sequence[MixSource]) -> None:
    """By the manifests: prepared folders of text, all with one tokenizer."""
    first: tuple[str, str] | None = None
    for each in sources:
        folder = Path(each.path)
        if not (folder / MANIFEST).exists():
            _refuse_unprepared(each)
        manifest = read_manifest(folder)
        sha256 = manifest.files[TOKENIZER].sha256
        first = first or (each.path, sha256)
        if sha256 != first[1]:
            raise DataError(
                f"the sources of the mix have different tokenizers: {first[0]} has one with sha256 {first[1]}, "
                f"{each.path} one with {sha256}",
                fix=f"prepare both with one: drumline prepare TEXT --out FOLDER --tokenizer {first[0]}/{TOKENIZER}",
            )
        if any(name.endswith(".targets.bin") for name in manifest.files):
            _refuse_chats(each.path)
        if "train" not in manifest.splits:
            raise DataError(f"{each.path} has no train tokens, only {', '.join(manifest.splits)}", fix="leave it out")


def _refuse_chats(path: str) -> NoReturn:
    raise DataError(
        f"{path} has conversations, which cannot be part of a mix",
        fix="mix plain text, and fine-tune on conversations afterwards: --resume_from RUN or --init_from",
    )


def _refuse_unprepared(source: MixSource) -> NoReturn:
    prepare = f"drumline prepare {source.path} --out FOLDER --tokenizer tokenizer.json"
    if not os.path.exists(source.path):
        raise DataError(
            f"{source.path}, a source of the mix, does not exist", fix=f"check the path, or make it: {prepare}"
        )
    raise DataError(
        f"{source.path} is no prepared folder, and a mix has no others",
        fix=f"prepare all with one tokenizer: {prepare}",
    )


def open_mix(data: DataConfig) -> Data:
    """The data of a run whose `train_data_path` is a mix."""
    abouts = parse_mix(data.train_data_path)
    _check_alike(abouts)
    sources = []
    for each in abouts:
        has_valid = "valid" in read_manifest(Path(each.path)).splits and data.valid_data_path is None
        sources.append(
            Source(each, open_tokens(each.path), open_tokens(each.path, split="valid") if has_valid else None)
        )
    first = sources[0].train
    assert first.tokenizer_path is not None and first.vocab_size is not None
    tokenizer = Tokenizer.load(data.tokenizer or first.tokenizer_path)
    parts = {each.name: each.valid for each in sources if each.valid is not None}
    valid: TokenFile | None = _together(parts, with_documents=True) if parts else None
    if data.valid_data_path is not None:
        valid = open_tokens(data.valid_data_path, split="valid", vocab_size=first.vocab_size, dtype=data.data_dtype)
    mix = Mix(tuple(sources), parse_stages(data.stages, [each.name for each in sources]))
    lacking = [each.name for each in sources if each.valid is None] if parts else []
    note = f"; no validation data of {', '.join(lacking)}" if lacking else ""
    train = _together({each.name: each.train for each in sources})
    return MixData(train, valid, tokenizer, first.vocab_size, Unread(), note, mix)


def _together(named: Mapping[str, TokenFile], *, with_documents: bool = False) -> MixTokens:
    """with_documents: also where documents end, in memory"""
    parts = list(named.values())
    first, ends = parts[0], None
    if with_documents and all(part.document_ends is not None for part in parts):
        starts = np.cumsum([0, *map(len, parts[:-1])]).astype(np.uint64)
        ends = np.concatenate([_ends(part) + start for part, start in zip(parts, starts, strict=True)])
    sizes = [part.text_bytes for part in parts]
    return MixTokens(
        path=first.path,
        tokens=first.tokens[:0],
        vocab_size=first.vocab_size,
        end_of_text=first.end_of_text,
        text_bytes=None if None in sizes else sum(size or 0 for size in sizes),
        tokenizer_path=first.tokenizer_path,
        sha256=hashlib.sha256(" ".join(str(part.sha256) for part in parts).encode()).hexdigest(),
        document_ends=ends,
        parts=tuple(parts),
        names=tuple(named),
    )


def _ends(part: TokenFile) -> npt.NDArray[np.uint64]:
    return np.empty(0, dtype=np.uint64) if part.document_ends is None else part.document_ends
