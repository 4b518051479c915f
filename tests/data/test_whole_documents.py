"""Long documents are read and encoded in parts, but are one document in the data."""

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.cli.app import run_command
from drumline.data import corpus, cutting, preparing, sources
from drumline.data.corpus import Corpus
from drumline.data.opening import document_names, open_tokens
from drumline.data.preparing import Recipe, prepare
from drumline.data.sources import Document
from drumline.data.tokenizer import END_OF_TEXT, Tokenizer
from drumline.errors import DataError

BOOK = "".join(
    f"Chapter {number}: the beat, é 🥁\r\ngoes on\n\n   and on {END_OF_TEXT}\nfor 1,000 days\n" for number in range(60)
)
TOKENIZER = Tokenizer.train([BOOK], vocab_size=400)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cutting, sources):
        monkeypatch.setattr(module, "PART_BYTES", 500)
    monkeypatch.setattr(corpus, "LONGEST_DOCUMENT_BYTES", 500)
    monkeypatch.setattr(preparing, "BATCH_BYTES", 700)


def as_rows(folder: Path) -> str:
    (folder / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (BOOK, "short", BOOK[9:])))
    return str(folder / "x.jsonl")


def as_files(folder: Path) -> str:
    (folder / "x").mkdir()
    for name, text in (("a", BOOK), ("b", "short"), ("c", BOOK[9:])):
        (folder / "x" / f"{name}.txt").write_bytes(text.encode())
    return str(folder / "x")


@pytest.mark.parametrize("write", [as_rows, as_files])
@pytest.mark.parametrize("fast", [False, True])
def test_a_long_document_has_the_ids_of_the_whole_and_one_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], str], fast: bool
) -> None:
    monkeypatch.setattr(preparing, "FAST_BYTES", 1)
    made = prepare(Recipe(Corpus(write(tmp_path), valid_fraction=0.0), TOKENIZER, fast=fast), tmp_path / "out")
    tokens = open_tokens(tmp_path / "out")
    expected = [[*TOKENIZER.encode(text), TOKENIZER.end_of_text] for text in (BOOK, "short", BOOK[9:])]
    assert tokens.read(0, len(tokens)).tolist() == list(chain.from_iterable(expected))
    assert made.manifest.splits["train"].documents == len(document_names(tokens, 0, len(tokens))) == 3
    assert made.skipped.note == ""


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("aZ9é太 \n\t\r'_.s\x1c\u00a0🥁"), max_size=300), st.integers(4, 60))
def test_parts_joined_are_the_document_and_none_is_long(text: str, longest: int) -> None:
    parts = list(cutting.parts(Document("x", text + "."), longest_bytes=longest))
    assert "".join(part.text for part in parts) == text + "."
    assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]


def test_a_single_file_is_cut_only_where_its_end_is_held_out_which_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.txt").write_bytes(BOOK.encode())
    TOKENIZER.save(tmp_path / "tokenizer.json")
    for fraction in ("0.02", "0.3", "0.5", "0.9"):
        out = tmp_path / fraction
        words = ["prepare", str(tmp_path / "x.txt"), "--out", str(out), "--valid_fraction", fraction]
        assert run_command([*words, "--tokenizer", str(tmp_path / "tokenizer.json")]) == 0
        assert "the end of the text is held out for validation" in capsys.readouterr().out
        train, valid = (open_tokens(out, split=split) for split in ("train", "valid"))
        texts = [TOKENIZER.decode(tokens.read(0, len(tokens) - 1).tolist()) for tokens in (train, valid)]
        assert "".join(texts) == BOOK
        for tokens in (train, valid):
            assert tokens.read(0, len(tokens)).tolist().count(TOKENIZER.end_of_text) == 1
            assert tokens.document_ends is not None and tokens.document_ends.tolist() == [len(tokens)]


@pytest.mark.parametrize("place", [0, len(BOOK) // 2, len(BOOK) - 1])
def test_a_part_that_is_not_text_is_passed_over_and_the_document_still_ends(tmp_path: Path, place: int) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.txt").write_bytes(BOOK[:place].encode() + b"\xff" + BOOK[place:].encode())
    (tmp_path / "x" / "b.txt").write_text("short")
    made = prepare(Recipe(Corpus(str(tmp_path / "x"), "text", "skip", None, 0.0), TOKENIZER), tmp_path / "out")
    assert (made.skipped.count, made.manifest.splits["train"].documents) == (1, 2)
    tokens = open_tokens(tmp_path / "out")
    assert tokens.document_ends is not None
    last = tokens.read(int(tokens.document_ends[0]), len(tokens)).tolist()
    assert last == [*TOKENIZER.encode("short"), TOKENIZER.end_of_text]


def test_tokens_of_an_earlier_version_are_used_again_unless_it_has_cut_documents(tmp_path: Path) -> None:
    recipe = Recipe(Corpus(as_rows(tmp_path), valid_fraction=0.0), TOKENIZER)
    out = prepare(recipe, tmp_path / "out").path
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["documents"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert prepare(recipe, out).reused
    names = (out / "train.names.txt").read_bytes()
    (out / "train.names.txt").write_bytes(names.replace(b":1\n", b"#2\n"))
    with pytest.raises(DataError, match="cut documents of more than 1 MiB") as refused:
        prepare(recipe, out)
    assert f"rm -r {out}" in refused.value.fix
    (out / "manifest.json").write_text(json.dumps(manifest | {"documents": "whole"}))
    assert prepare(recipe, out).reused
