"""`drumline prepare`: text to token files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from drumline.config import OnError
from drumline.units import counted

if TYPE_CHECKING:
    from drumline.data import Prepared


def prepare(
    source: str,
    /,
    *,
    out: Path,
    format: Literal["text", "chat"] = "text",
    field: str = "text",
    on_error: OnError = "stop",
    tokenizer: Path | None = None,
    vocab_size: int = 32768,
    valid: str | None = None,
    valid_fraction: float = 0.02,
) -> int:
    """Tokenize text into .bin files, in the format of nanoGPT.

    Parameters
    ----------
    source
        File, folder, glob, Hugging Face name, package.module:name, or builtin.
    out
        Output folder for train.bin, valid.bin, tokenizer.json and manifest.json.
    format
        text, or chat: rows of messages (role and content) to train on the assistant's tokens only.
    field
        Field of .jsonl, .json and .parquet rows that contains the text. Default with --format chat: messages.
    on_error
        Unreadable text: stop at the first error, or skip it and report how much was skipped.
    tokenizer
        Path of a tokenizer.json. Default: train one on the text.
    vocab_size
        Vocabulary size of a newly trained tokenizer.
    valid
        Validation text. Default: the source's validation split, or valid_fraction of the documents.
    valid_fraction
        Fraction of the documents to hold out if there is no validation data.
    """
    from drumline.config import DataConfig
    from drumline.data import MANIFEST, Corpus, Recipe, Tokenizer, data_note, is_tokens
    from drumline.data import prepare as prepare_tokens
    from drumline.errors import ConfigError
    from drumline.report import command, preparing

    if (Path(source) / MANIFEST).is_file() and is_tokens(source):
        raise ConfigError(f"{source} is tokenized already", fix=command("train", "--train_data_path", source))
    corpus = Corpus(source, field, on_error, valid, valid_fraction)
    recipe = Recipe(corpus, Tokenizer.load(tokenizer) if tokenizer else None, vocab_size)
    if format == "chat":
        from drumline.chats import chat_recipe

        recipe = chat_recipe(recipe, tokenizer)
    with preparing() as progress:
        made = prepare_tokens(recipe, out, progress=progress)
    for line in prepared_lines(made):
        print(line)
    if tokenizer is None and made.manifest.vocab_size < vocab_size:
        print(f"the text is too small for a vocabulary of {vocab_size:,}")
    if note := data_note(DataConfig(train_data_path=source, valid_data_path=valid)):
        print(note.removeprefix("; "))
    print(f"next:\n  {command('train', '--train_data_path', out)}")
    return 0


def prepared_lines(made: Prepared) -> list[str]:
    """The result as text."""
    from drumline.data import targets_file

    text_mb = sum(split.text_bytes for split in made.manifest.splits.values()) / 1e6
    how = f"{text_mb:.1f} MB of text in {made.seconds:.1f} s ({text_mb / made.seconds:.1f} MB/s)"
    how = "already exists" if made.reused else how
    lines = [f"{made.path}: {how}, vocabulary {made.manifest.vocab_size:,}"]
    for name, split in made.manifest.splits.items():
        kind = "conversation" if targets_file(name) in made.manifest.files else "document"
        lines.append(f"  {name}.bin   {split.tokens:,} tokens in {counted(split.documents, kind)}")
    if made.skipped.count:
        lines.append(f"skipped {made.skipped.count} unreadable; the first: {'; '.join(made.skipped.first)}")
    if made.skipped.note:
        lines.append(made.skipped.note.removeprefix("; "))
    return lines
