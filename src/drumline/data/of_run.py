"""What a run needs to know about its data: the vocabulary of files that do not say theirs, and where its tokens are.

The tokens that a run began with are what it goes on with, from another folder, on another machine, or after its text
has changed. They are looked for where they were, and by their hash in folders nearby; only if they are gone is the text
tokenized again, and then it must give the same tokens.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.config import DataConfig, TrainConfig, is_mix, preset
from drumline.data.foreign import LARGEST_HIGH_HALF, SCAN_TOKENS, scanned_places
from drumline.data.opening import has_tokens, open_token_data, open_tokens, read_manifest, targets_file
from drumline.data.other_sources import newest_file
from drumline.data.preparing import Data, Prepared, ProgressCallback, open_data
from drumline.data.sources import Skipped, source_key
from drumline.data.tokens import MANIFEST, Manifest, is_tokens
from drumline.errors import ConfigError, DataError
from drumline.files import RunFolder, origin, replace_text, stored_config
from drumline.lazy import room
from drumline.units import count

SPLITS = ("train", "valid")
GPT2_IDS, GPT2_VOCABULARY = 50257, 50304


def with_token_facts(config: TrainConfig) -> TrainConfig:
    """What the token files of a config say: their format, and unless it was given, a vocabulary for their ids."""
    train, valid = config.data.train_data_path, config.data.valid_data_path
    if "://" in f"{train} {valid}":
        return room("stores").facts_of_stored(config)  # type: ignore[no-any-return]
    if is_mix(train):
        return room("mixes").checked_mix(config)  # type: ignore[no-any-return]
    if config.data.stages:
        raise ConfigError(
            f"--stages {config.data.stages[0]!r} is for a mix, and {train} is one source",
            fix="drop --stages, or name several prepared folders: --train_data_path books:0.7,code:0.3",
        )
    is_chat = _has_chats(train)
    if config.data.format == "chat" and not is_chat:
        raise DataError(
            f"{config.data.train_data_path} has tokens of plain text, not of conversations",
            fix="tokenize conversations: drumline prepare FILE --format chat --out FOLDER; or drop --format chat",
        )
    if valid is not None and is_tokens(valid) and _has_chats(valid) != is_chat:
        kinds = [
            f"{path} has tokens of {'conversations' if _has_chats(path) else 'plain text'}" for path in (train, valid)
        ]
        raise DataError(", but ".join(kinds), fix="prepare both with --format chat, or both without")
    if is_chat:
        config = replace(config, data=replace(config.data, format="chat"))
    return with_vocabulary(config)


def _has_chats(tokens: str) -> bool:
    """Whether a prepared folder, or the one of a .bin file, has conversations."""
    folder = Path(tokens).parent if Path(tokens).is_file() else Path(tokens)
    return (folder / MANIFEST).exists() and any(map(read_manifest(folder).files.get, map(targets_file, SPLITS)))


def with_vocabulary(config: TrainConfig) -> TrainConfig:
    """Unless one was given: a vocabulary for the ids of another trainer's files, if the preset's is too small."""
    of_model = config.data.tokenizer or config.model.init_from
    given = config.data.vocab_size is not None or of_model is not None
    largest = None if given else largest_id(config.data)
    if largest is None or largest < preset(config.model.preset).vocab_size:
        return config
    return replace(config, data=replace(config.data, vocab_size=vocabulary_for(largest)))


def vocabulary_for(largest: int) -> int:
    """GPT-2's, rounded up, or a multiple of 128 above the largest id."""
    return GPT2_VOCABULARY if largest < GPT2_IDS else (largest // 128 + 1) * 128


def largest_id(data: DataConfig) -> int | None:
    """The largest id in another trainer's files, as far as large ones are looked at; None for other data, and for ids
    that no vocabulary has."""
    path = data.train_data_path
    train = None if is_mix(path) or "://" in path else open_tokens(path, dtype=data.data_dtype)
    if train is None or train.vocab_size is not None:
        return None
    files, path = [train.tokens], data.valid_data_path or data.train_data_path
    if has_tokens(path, "valid") or (path != data.train_data_path and is_tokens(path)):
        files.append(open_tokens(path, split="valid", dtype=data.data_dtype).tokens)
    parts = [tokens[at : at + SCAN_TOKENS] for tokens in files for at in scanned_places(len(tokens))]
    smallest, largest = min(int(part.min()) for part in parts), max(int(part.max()) for part in parts)
    return largest if smallest >= 0 and largest >> 16 <= LARGEST_HIGH_HALF else None


def reopened(config: TrainConfig, folder: RunFolder, *, progress: ProgressCallback | None) -> Data:
    """The data of a run that has a data.json."""
    began, data = origin(folder), config.data
    stored = stored_config(folder)
    if stored and data.tokenizer and data.tokenizer == stored.data.tokenizer and folder.tokenizer.exists():
        # The run's own copy: the file may be gone, as in the folder of a model that the run began from.
        data = replace(data, tokenizer=str(folder.tokenizer))
        stored = replace(stored, data=replace(stored.data, tokenizer=data.tokenizer))
        config = replace(config, data=data)
    changed = stored is None or replace(stored.data, data_dir="") != replace(data, data_dir="")
    if changed or is_tokens(data.train_data_path) or not began.get("sha256"):
        return open_data(config, progress=progress)
    for path, manifest in _candidates(began, data, folder):
        opened = open_token_data(data, Prepared(path, manifest, 0.0, Skipped(), reused=True))
        return replace(opened, note=_note(path, manifest, data, began))
    return _again(config, folder, began, progress=progress)


def _candidates(began: dict[str, Any], data: DataConfig, folder: RunFolder) -> Iterator[tuple[Path, Manifest]]:
    """Prepared folders with the tokens that the run began with."""
    was = Path(str(began.get("train"))).parent
    parents = [was.parent, Path(data.data_dir), *(up / "data" for up in folder.path.absolute().parents[:2])]
    nearby = (path.parent for parent in parents for path in sorted(parent.glob(f"*/{MANIFEST}")))
    for path in (was, *nearby):
        with suppress(DataError, OSError):
            manifest = read_manifest(path)
            if manifest.files["train.bin"].sha256 == began["sha256"]:
                yield path, manifest


def _note(path: Path, manifest: Manifest, data: DataConfig, began: dict[str, Any]) -> str:
    """Whether the tokens were found elsewhere, or the text is not any more what they were made from."""
    moved = "" if path == Path(str(began.get("train"))).parent else f"; tokens found in {path}"
    if data.train_data_path == "builtin":
        return moved
    with suppress(DataError, OSError):  # without its text, a run can go on as well
        if change := what_changed(data.train_data_path, manifest.source_key):
            return f"{moved}; {change}: the run goes on with its tokens in {path}"
    return moved


def what_changed(source: str, before: str) -> str:
    """How a text differs from what it was, by its key; "" if it does not."""
    now = source_key(source)
    if now == before:
        return ""
    (was, were), (here, are) = _files_and_bytes(before), _files_and_bytes(now)
    if None in (was, here) or (before.partition(":")[0] != now.partition(":")[0]):
        return ""  # not files, or files elsewhere, which have other times
    sizes = f"{was} files of {were:,} bytes then, {here} files of {are:,} bytes now"
    path, modified = newest_file(source)
    newest = f"{path} is of {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(modified))}"
    same = (was, were) == (here, are)
    return f"{source} has changed since the run began ({'the same size, but ' if same else sizes + '; '}{newest})"


def _files_and_bytes(key: str) -> tuple[int | None, int]:
    match = re.search(r": (\d+) files, (\d+) bytes", key)
    return (int(match[1]), int(match[2])) if match else (None, 0)


def _again(config: TrainConfig, folder: RunFolder, began: dict[str, Any], *, progress: ProgressCallback | None) -> Data:
    """Tokenize the text again, which must give the same tokens."""
    was, data = Path(str(began.get("train"))).parent, config.data
    try:
        source_key(data.train_data_path)
    except DataError:
        raise DataError(
            f"neither the tokens of {folder.path} ({was}) nor its text ({data.train_data_path}) are here",
            fix=f"copy the folder of tokens into a folder and add --data_dir to it, or copy the text and say "
            f"where: --train_data_path; the tokens have sha256 {str(began['sha256'])[:12]}",
        ) from None
    made = open_data(config, progress=progress)
    if made.train.sha256 != began["sha256"]:
        sizes = " -> ".join(f"{count(size or 0)}B" for size in (began.get("text_bytes"), made.train.text_bytes))
        raise DataError(
            f"the text of {folder.path}, {data.train_data_path}, has changed since the run began: {sizes} of training "
            f"text, {began.get('tokens'):,} -> {len(made.train):,} tokens; the old tokens ({was}) are gone",
            fix="bring back the old text or the tokens, or start a new run with another --run_dir",
        )
    return replace(made, note=f"; tokenized again, since the tokens are not in {was} any more")


def check_samples(data: Data, folder: RunFolder, allow_change: Sequence[str]) -> None:
    """Refuse files without hashes whose content is not what a run began with; what is not known yet is kept.

    Another file may take the place of that for validation, and training data may be in another place.
    """
    began = origin(folder) or json.loads(data.origin())
    known = began.get("samples")
    known = known if isinstance(known, dict) else {}
    for split, now in data.samples.items():
        was = known.get(split)
        same_file = split == "train" or (isinstance(was, dict) and was.get("path") == now["path"])
        if isinstance(was, dict) and same_file and f"{split}_data_path" not in allow_change:
            _refuse_other(split, was, now, folder)
    if known != data.samples:
        with suppress(OSError):  # a disk that is full or read-only ends no run
            replace_text(folder.data, json.dumps(began | {"samples": known | data.samples}, indent=2) + "\n")


def _refuse_other(split: str, was: dict[str, Any], now: dict[str, Any], folder: RunFolder) -> None:
    if was.get("bytes") != now["bytes"]:
        change = f"{was.get('bytes')} bytes then, {now['bytes']} bytes now"
    elif was.get("crc32") != now["crc32"]:
        change = f"still {now['bytes']} bytes, but other tokens: crc32 {was.get('crc32')} then, {now['crc32']} now"
    else:
        return
    train = split == "train"
    what, others = ("training", "") if train else ("validation", ", or accept it: --allow_change valid_data_path")
    raise DataError(
        f"the {what} data of {folder.path}, {now['path']}, are not those that it began with: {change}",
        fix=f"bring back the file as it was{others}, or start a new run with another --run_dir",
    )
