"""`drumline prepare`: text to token files; `drumline data`: what they have, and what a run has seen of them."""

from __future__ import annotations

import json as json_format
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

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
    packing: Literal["stream", "best_fit"] = "stream",
    context: int | None = None,
    workers: int = 1,
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
    packing
        best_fit: also compute which documents share a sequence; stream: nothing to compute.
    context
        Tokens per sequence, with --packing best_fit.
    workers
        Processes that encode much text. Ranks of torchrun or srun, on any hosts, share the work without it.
    """
    from drumline.config import DataConfig
    from drumline.data import MANIFEST, Corpus, Recipe, Tokenizer, data_note, is_tokens
    from drumline.data import prepare as prepare_tokens
    from drumline.errors import ConfigError
    from drumline.report import command, preparing

    if (Path(source) / MANIFEST).is_file() and is_tokens(source):
        raise ConfigError(f"{source} is tokenized already", fix=command("train", "--train_data_path", source))
    _check_packing(packing, format, context)
    if workers < 1:
        raise ConfigError(f"workers is {workers}", fix="give --workers a value of 1 or more")
    corpus = Corpus(source, field, on_error, valid, valid_fraction)
    recipe = Recipe(corpus, Tokenizer.load(tokenizer) if tokenizer else None, vocab_size)
    if format == "chat":
        from drumline.chats import chat_recipe

        recipe = chat_recipe(recipe, tokenizer)
    is_first = _rank() == 0  # the others say nothing
    with preparing() if is_first else nullcontext() as progress:
        made = prepare_tokens(recipe, out, progress=progress, workers=workers)
        if not is_first:
            return 0
        lines = prepared_lines(made)
        if context is not None:
            from drumline.data import open_tokens
            from drumline.packing import open_index

            lines.append(open_index(open_tokens(made.path), context=context, progress=progress).about.line())
    for line in lines:
        print(line)
    if tokenizer is None and made.manifest.vocab_size < vocab_size:
        print(f"the text is too small for a vocabulary of {vocab_size:,}")
    if note := data_note(DataConfig(train_data_path=source, valid_data_path=valid)):
        print(note.removeprefix("; "))
    flags = [] if context is None else ["--packing", packing, "--context", str(context)]
    print(f"next:\n  {command('train', '--train_data_path', out, *flags)}")
    return 0


def _rank() -> int:
    if not {"RANK", "SLURM_PROCID"} & os.environ.keys():  # to import torch takes longer than to encode 100 MB
        return 0
    from drumline.parallel import find_place

    return find_place(os.environ).rank


def _check_packing(packing: str, format: str, context: int | None) -> None:
    from drumline.errors import ConfigError

    if (packing == "best_fit") != (context is not None):
        given = "--packing best_fit" if context is None else f"--context {context}"
        other = "--context" if context is None else "--packing best_fit"
        raise ConfigError(f"{given} is given without {other}", fix=f"give both, or drop {given}")
    if context is not None and context < 1:
        raise ConfigError(f"context is {context}", fix="give --context a value of 1 or more")
    if packing == "best_fit" and format == "chat":
        raise ConfigError(
            "--packing best_fit is for text; conversations are packed whole without it", fix="drop --packing"
        )


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
    if made.before_bytes and not made.reused:
        lines.append(f"went on where it was: {made.before_bytes / 1e6:.1f} MB of the text were encoded before")
    if made.skipped.count:
        lines.append(f"skipped {made.skipped.count} unreadable; the first: {'; '.join(made.skipped.first)}")
    if made.skipped.note:
        lines.append(made.skipped.note.removeprefix("; "))
    return lines


data = App(name="data", help="Show what a run has seen of its data, or what a prepared folder has.")


@data.command
def show(where: Path, /, *, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Tokens seen and left of each source of a run, or the splits of a prepared folder.

    Parameters
    ----------
    where
        Run folder, or folder made by drumline prepare.
    json
        Print JSON.
    """
    from drumline.data import MANIFEST
    from drumline.mixes import folder_rows, run_rows

    if (where / MANIFEST).exists():
        about, rows = folder_rows(where)
    else:
        about, rows = run_rows(where)
    if json:
        print(json_format.dumps({**about, "sources" if "step" in about else "splits": rows}, indent=2))
    else:
        _print(where, about, rows)
    return 0


def _print(where: Path, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    from drumline.report import print_line, print_table

    if "step" in about:
        print_line(f"{about['run']} at step {about['step']:,} of {about['total_steps']:,}:")
    else:
        print_line(f"{where}: {about['source']}, by {about['made_by']}")
        print_line(f"tokenizer sha256 {about['tokenizer_sha256']}, vocabulary {about['vocabulary']:,}")
    print_table([name.replace("_", " ") for name in rows[0]], [[_cell(*each) for each in row.items()] for row in rows])


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "weight":
        return f"{value:.1%}"
    if name == "epochs":
        return f"{value:.2f}"
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
