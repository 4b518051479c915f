"""The tokenizer of much text: trained on a sample of all of it, with the merges that the tokenizers library gives."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from drumline.data import Corpus, Meter, Recipe, Tokenizer, preparing
from drumline.data.tokenizer import END_OF_TEXT
from drumline.encoding import learning, parts, sampling, stretches
from drumline.encoding.fast import HARD_TEXT
from drumline.encoding.stretches import Stretches, in_stretches

words = st.sampled_from(
    [*HARD_TEXT.split(" "), "drum", " the ", "  ", "\r\n", "'ll", "aaaa", "é", "太鼓", "🥁", END_OF_TEXT]
)
nasty_texts = st.lists(st.lists(words, min_size=1, max_size=40).map("".join), min_size=1, max_size=8)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=nasty_texts, vocab_size=st.integers(258, 420))
@example(texts=["1,000,000"], vocab_size=260)  # too few pairs: one would be merged a second time
def test_merges_are_those_of_tokenizers_on_nasty_text(tmp_path: Path, texts: list[str], vocab_size: int) -> None:
    fast = learning.fast_trained(texts, vocab_size=vocab_size, folder=tmp_path)
    if fast is not None:
        assert fast.serialized == Tokenizer.train(texts, vocab_size=vocab_size).serialized
    assert list(tmp_path.iterdir()) == []


def test_a_real_text_is_trained_fast_and_gives_the_same_file_byte_for_byte(tmp_path: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(random.__file__).parent.glob("[a-f]*.py"))]
    texts.append(HARD_TEXT * 2)
    fast = learning.fast_trained(texts, vocab_size=4000, folder=tmp_path)
    assert fast is not None
    assert fast.serialized == Tokenizer.train(texts, vocab_size=4000).serialized


@pytest.mark.parametrize("vocab_size", [257, 100_000])
def test_a_vocabulary_that_the_text_does_not_fill_is_trained_by_tokenizers(tmp_path: Path, vocab_size: int) -> None:
    assert learning.fast_trained(["the beat of the drum"] * 3, vocab_size=vocab_size, folder=tmp_path) is None
    tokenizer, note = learning.train(
        ["the beat of the drum"] * 3, vocab_size=vocab_size, folder=tmp_path, progress=lambda _: None
    )
    expected = Tokenizer.train(["the beat of the drum"] * 3, vocab_size=vocab_size)
    assert tokenizer.serialized == expected.serialized
    assert "; tokenizer trained on a sample of 0.0 MB in 0." in note


def test_gigatoken_trains_where_the_text_has_enough_for_each_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(learning, "fast_trained", lambda _, vocab_size, folder: asked.append(vocab_size))
    for vocab_size in (258, 1000):
        learning.train([HARD_TEXT * 100], vocab_size=vocab_size, folder=tmp_path, progress=lambda _: None)
    assert asked == [258]


def files(folder: Path) -> str:
    """Three files: two with half and a quarter of the text, the last a quarter; each has words of its own."""
    folder.mkdir()
    for name, rows in (("a", 400), ("b", 200), ("c", 200)):
        lines = [json.dumps({"text": f"{name}{number} {name * 90}"}) for number in range(rows)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return str(folder)


def sample(corpus: Corpus, folder: Path, *, sample_bytes: int) -> list[str]:
    text = Stretches(corpus, in_stretches(corpus, cut_bytes=None), cut_bytes=None, notes=folder)
    return sampling.sampled(text, Meter("reading", lambda _: None), sample_bytes=sample_bytes)[0]


@pytest.mark.parametrize("read_bytes", [1 << 30, 40_000])
def test_the_sample_is_of_all_files_by_their_size_and_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(stretches, "STRETCH_BYTES", 8000)
    monkeypatch.setattr(sampling, "READ_BYTES", read_bytes)
    monkeypatch.setattr(sampling, "PLACES", 16)
    corpus = Corpus(files(tmp_path / "text"))
    texts = sample(corpus, tmp_path, sample_bytes=20_000)
    assert texts == sample(corpus, tmp_path, sample_bytes=20_000)
    assert 20_000 <= sum(map(len, texts)) < 20_200
    shares = {name: sum(text.startswith(name) for text in texts) / len(texts) for name in "abc"}
    assert 0.4 < shares["a"] < 0.6 and 0.15 < shares["b"] < 0.35 and 0.15 < shares["c"] < 0.35
    other = sample(Corpus(corpus.source, seed=1), tmp_path, sample_bytes=20_000)
    assert texts != other and len(set(texts)) == len(texts)
    numbers = [int(text[1:].split()[0]) for text in texts if text.startswith("a")]
    assert min(numbers) < 60 and max(numbers) > 340


def test_what_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    corpus = Corpus(files(tmp_path / "text"), valid_fraction=0.3)
    held_out = {
        document.text for label, document in corpus.labelled(corpus.reading(int), cut_bytes=None) if label != "train"
    }
    texts = sample(corpus, tmp_path, sample_bytes=1 << 30)
    assert len(held_out) > 100 and not held_out & set(texts) and len(held_out) + len(texts) == 800


def test_the_tokenizer_has_words_from_the_end_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "FAST_BYTES", 1)
    monkeypatch.setattr(parts, "SAMPLE_BYTES", 10_000)
    lines = [json.dumps({"text": "the beat goes on " * 30})] * 200 + [json.dumps({"text": "zyxwv " * 80})] * 200
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    made = preparing.prepare(Recipe(Corpus(str(tmp_path / "x.jsonl")), vocab_size=300), tmp_path / "out")
    tokenizer = Tokenizer.load(tmp_path / "out" / "tokenizer.json")
    assert len(tokenizer.encode(" zyxwv")) == 1
    assert "; tokenizer trained on a sample of 0.0 MB in" in made.skipped.note
