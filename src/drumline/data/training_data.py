"""What a run trains on and is judged by: token files as they are, text prepared first, on every host that needs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drumline.config import DataConfig, TrainConfig
from drumline.data.preparing import Prepared, ProgressCallback, cached
from drumline.data.text_files import Skipped
from drumline.data.tokenizer import Tokenizer
from drumline.data.tokens import TokenFile, has_tokens, is_tokens, open_tokens
from drumline.errors import ConfigError


@dataclass(frozen=True)
class Data:
    """What a run trains on and is judged by."""

    train: TokenFile
    valid: TokenFile | None
    tokenizer: Tokenizer | None
    vocab_size: int
    skipped: Skipped
    """What could not be read, where the user chose to go on."""


def open_data(config: TrainConfig, *, progress: ProgressCallback | None = None) -> Data:
    """Token files as they are; text prepared first, or reused if it was prepared before."""
    data, skipped = config.data, Skipped()
    path: str | Path = data.train_data_path
    valid_path: str | Path | None = data.valid_data_path
    if not is_tokens(path):
        if valid_path is not None and is_tokens(valid_path):
            raise ConfigError(
                f"train_data_path {path} is text, and valid_data_path {valid_path} is tokens of another tokenizer",
                fix="give both as text, or both as tokens made by one `drumline prepare`",
            )
        prepared = _prepared(data, progress)
        path, valid_path, skipped = prepared.path, None, prepared.skipped
    tokenizer = Tokenizer.load(data.tokenizer) if data.tokenizer else None
    train = open_tokens(path, split="train")
    if train.vocab_size is None:  # a peer's file does not say; it is checked against the tokenizer or the setting
        train = open_tokens(path, split="train", vocab_size=tokenizer.vocab_size if tokenizer else data.vocab_size)
    if tokenizer is None and train.tokenizer_path is not None:
        tokenizer = Tokenizer.load(train.tokenizer_path)
    vocab_size = train.vocab_size or (tokenizer.vocab_size if tokenizer else data.vocab_size)
    assert vocab_size is not None
    if valid_path is None and has_tokens(path, "valid"):
        valid_path = path
    valid = open_tokens(valid_path, split="valid", vocab_size=vocab_size) if valid_path is not None else None
    return Data(train, valid, tokenizer, vocab_size, skipped)


def _prepared(data: DataConfig, progress: ProgressCallback | None) -> Prepared:
    return cached(
        data.train_data_path,
        data.data_dir,
        tokenizer=data.tokenizer,
        vocab_size=data.vocab_size or 0,
        field=data.field,
        on_error=data.on_error,
        valid_source=data.valid_data_path,
        valid_fraction=data.valid_fraction,
        progress=progress,
    )
