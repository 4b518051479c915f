import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.data import corpus as corpus_module
from drumline.data import cutting, sources
from drumline.data.corpus import Corpus, Label
from drumline.data.sources import Document, Reading
from drumline.errors import ConfigError


def write_rows(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def survey(corpus: Corpus, *, sample_bytes: int) -> tuple[list[str], int | None]:
    return corpus.survey(Reading(), sample_bytes=sample_bytes, on_text=lambda _: None)


def parts(corpus: Corpus) -> dict[Label, list[Document]]:
    _, cut_bytes = survey(corpus, sample_bytes=0)
    splits: dict[Label, list[Document]] = {"train": [], "valid": []}
    for label, document in corpus.labelled(Reading(), cut_bytes=cut_bytes):
        splits[label].append(document)
    return splits


def sample(corpus: Corpus, sample_bytes: int) -> list[str]:
    return survey(corpus, sample_bytes=sample_bytes)[0]


def test_documents_are_held_out_by_seed_and_name_about_as_many_as_asked_for(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "x.jsonl", [f"text {number}" for number in range(2000)])
    splits = parts(Corpus(source, valid_fraction=0.1))
    assert 140 < len(splits["valid"]) < 260
    assert splits == parts(Corpus(source, valid_fraction=0.1))
    assert splits != parts(Corpus(source, valid_fraction=0.1, seed=1))
    longer = write_rows(tmp_path / "x.jsonl", [f"text {number}" for number in range(3000)])
    assert parts(Corpus(longer, valid_fraction=0.1))["valid"][: len(splits["valid"])] == splits["valid"]


def test_the_first_document_is_always_trained_on(tmp_path: Path) -> None:
    splits = parts(Corpus(write_rows(tmp_path / "x.jsonl", ["a", "b", "c"]), valid_fraction=0.999999))
    assert [[part.text for part in splits[label]] for label in ("train", "valid")] == [["a"], ["b", "c"]]


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(st.sampled_from("ab é🥁\n"), min_size=1), min_size=1, max_size=5),
    fraction=st.floats(0.001, 0.6),
)
def test_where_no_document_is_held_out_the_end_of_the_text_is(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], fraction: float
) -> None:
    source = write_rows(tmp_path_factory.mktemp("text") / "x.jsonl", texts)
    corpus = Corpus(source, valid_fraction=fraction)
    cut_bytes = survey(corpus, sample_bytes=0)[1]
    splits = parts(corpus)
    assert splits["valid"]
    if cut_bytes is not None:
        train, valid = ("".join(part.text for part in splits[label]) for label in ("train", "valid"))
        assert train + valid == "".join(texts)
        assert len(train.encode()) <= cut_bytes


def test_a_cut_spares_the_word_it_falls_into(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("one two three four")
    splits = parts(Corpus(str(tmp_path / "x.txt"), valid_fraction=0.1))
    assert [part.text for part in splits["train"] + splits["valid"]] == ["one two three", " four"]


@pytest.mark.parametrize("fraction", [0.05, 0.5])
def test_the_sample_holds_the_first_training_text_and_nothing_held_out(tmp_path: Path, fraction: float) -> None:
    source = write_rows(tmp_path / "x.jsonl", [f"text {number}" for number in range(40)])
    corpus = Corpus(source, valid_fraction=fraction)
    train = "".join(part.text for part in parts(corpus)["train"])
    assert "".join(sample(corpus, 10_000)) == train
    assert train.startswith("".join(sample(corpus, 30)))
    assert 30 <= len("".join(sample(corpus, 30))) < 40


def test_the_sample_ends_where_the_held_out_end_of_a_single_text_begins(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("beat " * 1000)
    corpus = Corpus(str(tmp_path / "x.txt"), valid_fraction=0.1)
    assert sample(corpus, 10_000) == [part.text for part in parts(corpus)["train"]] == ["beat " * 899 + "beat"]


def test_the_survey_reads_no_more_than_it_must(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "x.jsonl", [f"text {number}" for number in range(20_000)])
    read: list[int] = []
    corpus = Corpus(source, valid_fraction=0.1)
    corpus.survey(Reading(), sample_bytes=100, on_text=read.append)
    assert 10 < len(read) < 200
    read.clear()
    Corpus(source, valid_fraction=0.0).survey(Reading(), sample_bytes=0, on_text=read.append)
    assert read == []


def test_a_named_validation_source_is_held_out_whole_and_nothing_else(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "x.jsonl", [f"text {number}" for number in range(300)])
    other = write_rows(tmp_path / "y.jsonl", ["held", "out"])
    corpus = Corpus(source, valid_source=other, valid_fraction=0.5)
    splits = parts(corpus)
    assert [part.text for part in splits["valid"]] == ["held", "out"]
    assert len(splits["train"]) == 300
    assert corpus.size_bytes() == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_a_source_with_its_own_validation_split_is_judged_by_it(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for split in ("train", "validation"):
        table = pa.table({"text": [f"{split} {number}" for number in range(50)]})
        pq.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet")
    splits = parts(Corpus(str(tmp_path)))
    assert [len(splits["train"]), len(splits["valid"])] == [50, 50]
    assert all(part.text.startswith("validation") for part in splits["valid"])


def test_without_a_fraction_nothing_is_held_out(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "x.jsonl", ["a", "b"])
    corpus = Corpus(source, valid_fraction=0.0)
    assert corpus.labels == ("train",)
    assert len(parts(corpus)["train"]) == 2


@pytest.mark.parametrize("fraction", [-0.1, 1.0])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match="valid_fraction"):
        Corpus("builtin", valid_fraction=fraction)


def test_a_long_document_comes_in_parts_that_end_between_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "LONGEST_DOCUMENT_BYTES", 50)
    text = "é line\n" * 20 + "end.\n" * 20 + "x" * 120
    splits = parts(Corpus(write_rows(tmp_path / "x.jsonl", [text, "short"]), valid_fraction=0.0))["train"]
    assert "".join(part.text for part in splits) == text + "short"
    assert {part.name for part in splits[:-1]} == {f"{tmp_path / 'x.jsonl'}:1"}
    assert [part.more for part in splits] == [True] * (len(splits) - 2) + [False] * 2
    assert all(len(part.text.encode()) <= 60 for part in splits)
    assert splits[0].text.endswith("line") and splits[1].text.startswith("\né") and splits[-1].text == "short"


def test_all_parts_of_the_first_document_are_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "PART_BYTES", 64)
    monkeypatch.setattr(sources, "PART_BYTES", 64)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} line of text\n" * 50)
    splits = parts(Corpus(str(tmp_path), valid_fraction=0.999999))
    for label, name in (("train", "a"), ("valid", "b")):
        assert len(splits[label]) > 5  # type: ignore[index]
        assert "".join(part.text for part in splits[label]) == f"{name} line of text\n" * 50  # type: ignore[index]
