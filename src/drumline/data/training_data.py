"""Training and validation data of a run: token files as they are, or text that is tokenized first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drumline.config import DataConfig, TrainConfig
from drumline.data.corpus import Corpus
from drumline.data.preparing import Prepared, ProgressCallback, Recipe, prepare
from drumline.data.text_files import Skipped
from drumline.data.tokenizer import Tokenizer
from drumline.data.tokens import TOKENIZER, TokenFile, is_tokens, map_split
from drumline.errors import ConfigError


@dataclass(frozen=True)
class Data:
    """Training and validation data of a run."""

    train: TokenFile
    valid: TokenFile | None
    tokenizer: Tokenizer | None
    vocab_size: int
    skipped: Skipped
    """What could not be read, with --on_error skip."""


def open_data(config: TrainConfig, *, progress: ProgressCallback | None = None) -> Data:
    """Token files as they are; text is tokenized first, unless it was already."""
    prepared = None if is_tokens(config.data.train_data_path) else _prepared(config.data, progress)
    if prepared is None or prepared.reused:
        from drumline.data.opening import open_token_data

        return open_token_data(config.data, prepared)
    # Written and hashed by this process: there is nothing to check.
    splits = {name: map_split(prepared.path, prepared.manifest, name) for name in prepared.manifest.splits}
    tokenizer = Tokenizer.load(prepared.path / TOKENIZER)
    return Data(splits["train"], splits.get("valid"), tokenizer, tokenizer.vocab_size, prepared.skipped)


def _prepared(data: DataConfig, progress: ProgressCallback | None) -> Prepared:
    """The tokens of the text, in a folder of `data_dir` named after everything that determines them."""
    if data.valid_data_path is not None and is_tokens(data.valid_data_path):
        raise ConfigError(
            f"train_data_path {data.train_data_path} is text, but valid_data_path {data.valid_data_path} is tokens",
            fix="use text for both, or tokens made by one `drumline prepare` for both",
        )
    corpus = Corpus(data.train_data_path, data.field, data.on_error, data.valid_data_path, data.valid_fraction)
    recipe = Recipe(corpus, Tokenizer.load(data.tokenizer) if data.tokenizer else None, data.vocab_size or 0)
    return prepare(recipe, Path(data.data_dir, recipe.folder_name), progress=progress)
