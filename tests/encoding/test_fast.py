"""A faster encoder gives the same bytes as the tokenizers library, or is not used."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.cli.app import run_command
from drumline.data import Corpus, EncoderError, Prepared, Recipe, Skipped, Tokenizer, preparing
from drumline.data.tokenizer import END_OF_TEXT
from drumline.encoding import fast
from drumline.encoding.fast import HARD_TEXT, FastTokenizer

TEXTS = ["The drummer's beat, 1,000 times. ", "Trommeln, tambours, барабаны, 太鼓! 🥁\r\n", HARD_TEXT] * 10
TOKENIZER = Tokenizer.train(TEXTS, vocab_size=600)
FAST = FastTokenizer(TOKENIZER).encode_batch

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

nasty = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.text(st.sampled_from("aZ9é太 \n\t\r'_.s\x1c\u00a0\u2028🥁\u0301\u200d"), max_size=80),
    st.sampled_from([END_OF_TEXT, "", "'ll", " " * 50, "a" * 500, "ab" * 300, "\ufffd", "\ufeff", "\r\n" * 9, "\x00"]),
    st.binary(max_size=40).map(lambda data: data.decode(errors="replace")),
)
nasty_texts = st.lists(st.lists(nasty, max_size=6).map("".join), max_size=4)


def changed(**changes: object) -> Tokenizer:
    return Tokenizer(json.dumps(json.loads(TOKENIZER.serialized) | changes).encode(), origin="other")


def split(pattern: str) -> dict[str, Any]:
    first = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [first, level]}


def same(texts: list[str], tokenizer: Tokenizer = TOKENIZER, encode: Any = FAST) -> bool:
    return [ids.tolist() for ids in encode(texts)] == [tokenizer.encode(text) for text in texts]


@settings(max_examples=300, deadline=None)
@given(nasty_texts)
def test_nasty_text_has_the_ids_that_tokenizers_gives(texts: list[str]) -> None:
    assert same(texts)


def test_a_pattern_of_llama_3_has_the_ids_that_tokenizers_gives() -> None:
    other = changed(pre_tokenizer=split(LLAMA))
    encode = FastTokenizer(other).encode_batch

    @settings(max_examples=100, deadline=None)
    @given(nasty_texts)
    def compare(texts: list[str]) -> None:
        assert same(texts, other, encode)

    compare()


def test_no_texts_and_empty_texts_have_no_ids() -> None:
    assert FAST([]) == []
    assert [len(ids) for ids in FAST(["", "a", ""])] == [0, 1, 0]


def test_threads_that_share_an_encoder_get_the_same_ids() -> None:
    texts = [f"{END_OF_TEXT} {number} {TEXTS[number % 3]}" for number in range(200)]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(FAST, [texts] * 16))
    assert all(same(texts, encode=lambda _, result=result: result) for result in results[:2])
    assert all(np.array_equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_a_special_token_that_is_a_common_word_is_plain_text() -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        *json.loads(TOKENIZER.serialized)["added_tokens"],
        {"id": 600, "content": "beat", "special": True, **flags},
    ]
    other = changed(added_tokens=added)
    assert same(["the beat beat", "beat"], other, FastTokenizer(other).encode_batch)


def model(**changes: object) -> dict[str, Any]:
    return {"model": json.loads(TOKENIZER.serialized)["model"] | changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "no byte-level pre-tokenizer"),
        ({"normalizer": {"type": "Lowercase"}}, "cannot use this tokenizer: Unsupported normalizer type: Lowercase"),
        ({"pre_tokenizer": split("x+|y")}, "gigatoken"),
        (model(dropout=0.5), "dropout"),
        (model(byte_fallback=True), "byte fallback"),
    ],
)
def test_a_tokenizer_that_does_not_suit_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(EncoderError, match=reason):
        FastTokenizer(changed(**changes))


def test_added_tokens_that_are_looked_for_in_text_are_refused() -> None:
    added = json.loads(TOKENIZER.serialized)["added_tokens"]
    with pytest.raises(EncoderError, match="added tokens that are not special"):
        FastTokenizer(changed(added_tokens=[*added, added[0] | {"id": 600, "content": "beat", "special": False}]))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Enough text, of nasty documents, for the faster encoder."""
    monkeypatch.setattr(preparing, "FAST_BYTES", 1000)
    monkeypatch.setattr(preparing, "BATCH_BYTES", 3000)
    monkeypatch.setattr(fast, "FIRST_CHARS", 5000)
    texts = [f"{number} {TEXTS[number % 3]}{END_OF_TEXT}" * (1 + number % 5) for number in range(80)]
    texts[7] = "a word and " * 9000
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, *texts[:9], " "]) + "not json\n")
    return str(path)


def prepared(source: str, out: Path, **how: Any) -> tuple[Prepared, dict[str, bytes]]:
    made = preparing.prepare(Recipe(Corpus(source, on_error="skip", valid_fraction=0.1), TOKENIZER, **how), out)
    return made, {path.name: path.read_bytes() for path in out.iterdir()}


def test_what_is_prepared_fast_is_the_same_byte_for_byte(source: str, tmp_path: Path) -> None:
    made, quick = prepared(source, tmp_path / "quick")
    assert made.skipped == Skipped(1, made.skipped.first)
    assert quick == prepared(source, tmp_path / "slow", fast=False)[1]


@pytest.mark.parametrize("wrong_after", [0, 1, 20])
def test_other_ids_are_noticed_and_all_is_encoded_anew_and_said(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_after: int
) -> None:
    encode, calls = FastTokenizer._encode, 0

    def wrong(self: FastTokenizer, texts: list[str]) -> list[Any]:
        nonlocal calls
        calls += 1
        return [ids if calls <= wrong_after else ids[::-1] for ids in encode(self, texts)]

    monkeypatch.setattr(FastTokenizer, "_encode", wrong)
    made, again = prepared(source, tmp_path / "again")
    assert "; encoded slowly, by tokenizers: gigatoken gives other ids than tokenizers for" in made.skipped.note
    assert (calls > wrong_after, made.skipped.count) == (True, 1)
    assert again == prepared(source, tmp_path / "slow", fast=False)[1]


def test_a_tokenizer_that_does_not_suit_is_said_by_the_command(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(normalizer={"type": "Lowercase"}).save(tmp_path / "lower.json")
    words = ["prepare", source, "--out", str(tmp_path / "out"), "--on_error", "skip"]
    assert run_command([*words, "--tokenizer", str(tmp_path / "lower.json")]) == 0
    assert "encoded slowly, by tokenizers: gigatoken cannot use this tokenizer: Unsup" in capsys.readouterr().out


def test_without_gigatoken_text_is_encoded_by_tokenizers_which_is_said(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken.gigatoken_rs", None)
    made, slow = prepared(source, tmp_path / "slow")
    assert "pip install gigatoken" in made.skipped.note
    monkeypatch.undo()
    assert slow == prepared(source, tmp_path / "again", fast=False)[1]


def test_little_text_does_not_load_it(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("the beat goes on " * 500)
    code = "import sys; from drumline.cli.app import run_command; run_command(sys.argv[1:]); print(*sys.modules)"
    words = ["prepare", str(tmp_path / "x.txt"), "--out", str(tmp_path / "out")]
    loaded = subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True, text=True).stdout
    assert "drumline.data.preparing" in loaded.split() and "drumline.encoding" not in loaded.split()


def test_it_is_loaded_anew_when_memory_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = FastTokenizer(TOKENIZER)
    first = encoder._inner
    encoder.encode_batch(TEXTS)
    assert encoder._inner is first
    monkeypatch.setattr(fast, "GROWTH_BYTES", -(1 << 40))
    assert same(TEXTS, encode=encoder.encode_batch)
    assert encoder._inner is not first
