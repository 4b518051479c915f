import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drumline.config import DataConfig, TrainConfig
from drumline.data import preparing as prepare_module
from drumline.data.corpus import Corpus
from drumline.data.opening import document_names, open_tokens
from drumline.data.preparing import Data, Prepared, Progress, Recipe, open_data, prepare
from drumline.data.sources import documents
from drumline.data.tokenizer import END_OF_TEXT, Tokenizer
from drumline.errors import DataError


@pytest.fixture
def source(tmp_path: Path) -> str:
    """120 documents, one of which spells the end of text."""
    texts = [f"Document {number}: the beat goes on, é 🥁 {number * 7919}.\n" * 3 for number in range(120)]
    texts[5] += END_OF_TEXT
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "BATCH_BYTES", 1000)
    monkeypatch.setattr(prepare_module, "REPORT_BYTES", 1000)


def small(
    source: str,
    out: Path,
    *,
    tokenizer: Path | None = None,
    vocab_size: int = 400,
    progress: Callable[[Progress], None] | None = None,
    **text: Any,
) -> Prepared:
    corpus = Corpus(source, **({"valid_fraction": 0.1} | text))
    recipe = Recipe(corpus, Tokenizer.load(tokenizer) if tokenizer else None, vocab_size)
    return prepare(recipe, out, progress=progress)


def text_bytes(made: Prepared) -> int:
    return sum(split.text_bytes for split in made.manifest.splits.values())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_was_prepared_decodes_to_the_documents(source: str, tmp_path: Path) -> None:
    made = small(source, tmp_path / "out")
    texts = {document.name: document.text for document in documents(source)}
    tokenizer = Tokenizer.load(tmp_path / "out" / "tokenizer.json")
    seen: list[str] = []
    for split in ("train", "valid"):
        tokens = open_tokens(tmp_path / "out", split=split)
        names = document_names(tokens, 0, len(tokens))
        # As nanoGPT reads it: plain uint16.
        raw = np.memmap(tmp_path / "out" / f"{split}.bin", dtype=np.uint16, mode="r")
        assert tokenizer.decode(raw.tolist()) == "".join(texts[name] + END_OF_TEXT for name in names)
        assert int((raw == tokens.end_of_text).sum()) == len(names) == made.manifest.splits[split].documents
        assert tokens.text_bytes == sum(len(texts[name].encode()) for name in names)
        assert len(tokens) == made.manifest.splits[split].tokens
        seen += names
    assert sorted(seen) == sorted(texts)
    assert (made.reused, made.skipped.count, made.manifest.vocab_size) == (False, 0, tokenizer.vocab_size)
    assert text_bytes(made) == sum(len(text.encode()) for text in texts.values())


def test_preparing_twice_gives_the_same_bytes(source: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        small(source, tmp_path / name)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_the_vocabulary_is_learned_from_training_text_only(source: str, tmp_path: Path) -> None:
    small(source, tmp_path / "out")
    train = set(document_names(open_tokens(tmp_path / "out"), 0, 1 << 40))
    texts = [document.text for document in documents(source) if document.name in train]
    assert Tokenizer.train(texts, vocab_size=400).sha256 == Tokenizer.load(tmp_path / "out" / "tokenizer.json").sha256


def test_a_given_tokenizer_is_used_and_kept_byte_for_byte(source: str, tmp_path: Path) -> None:
    Tokenizer.train(["other text"], vocab_size=300).save(tmp_path / "mine.json")
    made = small(source, tmp_path / "out", tokenizer=tmp_path / "mine.json")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "mine.json").read_bytes()
    assert made.manifest.vocab_size == Tokenizer.load(tmp_path / "mine.json").vocab_size


def test_one_text_alone_is_parted_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("the beat goes on " * 500)
    small(str(tmp_path / "x.txt"), tmp_path / "out")
    tokenizer = Tokenizer.load(tmp_path / "out" / "tokenizer.json")
    texts = {}
    for split in ("train", "valid"):
        tokens = open_tokens(tmp_path / "out", split=split)
        texts[split] = tokenizer.decode(tokens.read(0, len(tokens) - 1).tolist())
        assert tokens.text_bytes == len(texts[split])
    assert texts["train"] + texts["valid"] == "the beat goes on " * 500
    assert 840 <= len(texts["valid"]) <= 860


def test_a_text_too_short_to_hold_anything_out_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("a")
    with pytest.raises(DataError, match=r"x\.txt is too short for train data"):
        small(str(tmp_path / "x.txt"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]


def test_nothing_is_held_out_when_the_fraction_is_zero(source: str, tmp_path: Path) -> None:
    made = small(source, tmp_path / "out", valid_fraction=0.0)
    assert list(made.manifest.splits) == ["train"]
    assert not (tmp_path / "out" / "valid.bin").exists()


def test_damaged_rows_are_counted_once_when_passed_over(source: str, tmp_path: Path) -> None:
    with open(source, "a") as file:
        file.write("not json\n")
    with pytest.raises(DataError, match=r"texts\.jsonl:121"):
        small(source, tmp_path / "out", valid_fraction=0.0)
    assert not any("out" in path.name for path in tmp_path.iterdir())
    assert small(source, tmp_path / "out", on_error="skip").skipped.count == 1


def test_tokens_made_before_are_reused_only_with_the_same_text_and_settings(source: str, tmp_path: Path) -> None:
    small(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    assert small(source, tmp_path / "out").reused
    assert contents(tmp_path / "out") == before
    changes: list[dict[str, object]] = [{"vocab_size": 401}, {"seed": 1}, {"valid_fraction": 0.2}, {"on_error": "skip"}]
    for change in changes:
        with pytest.raises(DataError, match="has other tokens") as refused:
            small(source, tmp_path / "out", **change)
        assert f"rm -r {tmp_path / 'out'}" in refused.value.fix
    with open(source, "a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(DataError, match="has other tokens"):
        small(source, tmp_path / "out")


def test_a_folder_with_something_else_in_it_is_left_alone(source: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "letter.txt").write_text("dear")
    with pytest.raises(DataError, match="is not a prepared folder"):
        small(source, out)
    assert contents(out) == {"letter.txt": b"dear"}
    (out / "letter.txt").unlink()
    assert not small(source, out).reused


def test_tokens_may_not_be_written_into_the_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("the beat")
    with pytest.raises(DataError, match="is inside the text folder"):
        small(str(tmp_path), tmp_path / "tokens")


def test_a_place_that_cannot_be_written_is_named(source: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/out is not writable: Not a directory"):
        small(source, tmp_path / "file" / "out")


def test_the_cache_keeps_one_folder_for_each_text_and_setting(source: str, tmp_path: Path) -> None:
    def cached(vocab_size: int) -> Data:
        data = DataConfig(train_data_path=source, data_dir=str(tmp_path / "data"), vocab_size=vocab_size)
        return open_data(TrainConfig(data=data))

    first, again, other = cached(400), cached(400), cached(300)
    assert first.train.path.parent.parent == tmp_path / "data"
    assert first.train.path.parent.name.startswith("texts.jsonl-")
    assert again.train.path == first.train.path != other.train.path
    assert first.train.read(0, len(first.train)).tolist() == again.train.read(0, len(again.train)).tolist()
    assert (first.vocab_size, first.valid is None) == (again.vocab_size, again.valid is None) == (400, False)
    assert len(list((tmp_path / "data").iterdir())) == 2


def test_progress_ends_with_all_of_the_source_and_all_of_the_text(source: str, tmp_path: Path) -> None:
    reports: list[Progress] = []
    made = small(source, tmp_path / "out", progress=reports.append)
    size = Path(source).stat().st_size
    assert [reports[0].stage, reports[-1].stage] == ["reading", "encoding"]
    assert (reports[-1].bytes_done, reports[-1].bytes_total, reports[-1].text_bytes) == (
        size,
        size,
        text_bytes(made),
    )
    assert len(reports) > 5


def test_ctrl_c_leaves_nothing_behind(source: str, tmp_path: Path) -> None:
    def press(progress: Progress) -> None:
        if progress.stage == "encoding":
            assert any(path.name.startswith("out.partial-") for path in tmp_path.iterdir())
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        small(source, tmp_path / "out", progress=press)
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]


KILLED = """
import os, signal, sys
from drumline.data import preparing, tokens
from drumline.data.corpus import Corpus
preparing.BATCH_BYTES = preparing.REPORT_BYTES = 1000
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
moment, source, out = sys.argv[1:]
if moment == "before the manifest": tokens.Manifest.write = die
if moment == "before the rename": preparing.flush = lambda path: die() if path.is_dir() else None
def progress(now):
    if moment == "while encoding" and now.stage == "encoding" and now.text_bytes > 5000: die()
recipe = preparing.Recipe(Corpus(source, valid_fraction=0.1), vocab_size=400)
preparing.prepare(recipe, out, progress=progress)
"""


@pytest.mark.parametrize("moment", ["while encoding", "before the manifest", "before the rename"])
def test_a_killed_preparation_leaves_nothing_that_is_taken_for_data(source: str, tmp_path: Path, moment: str) -> None:
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", KILLED, moment, source, str(out)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (partial,) = tmp_path.glob("out.partial-*")
    assert not out.exists()
    for path in (partial, partial / "train.bin"):
        with pytest.raises(DataError, match="is incomplete"):
            open_tokens(path)
    small(source, out)
    assert len(open_tokens(out)) > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts.jsonl"]


def test_what_a_living_process_or_another_host_is_making_is_not_removed(source: str, tmp_path: Path) -> None:
    host = re.sub(r"\W", "_", socket.gethostname())
    kept = [tmp_path / f"out.partial-{host}-{os.getppid()}", tmp_path / "out.partial-elsewhere-1"]
    for path in kept:
        path.mkdir()
    small(source, tmp_path / "out")
    assert all(path.is_dir() for path in kept)


def test_two_that_make_the_same_at_the_same_time_end_with_one_folder(source: str, tmp_path: Path) -> None:
    def be_overtaken(progress: Progress) -> None:
        if progress.stage == "encoding" and not (tmp_path / "out").exists():
            small(source, tmp_path / "aside")
            (tmp_path / "aside").rename(tmp_path / "out")

    small(source, tmp_path / "out", progress=be_overtaken)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts.jsonl"]
