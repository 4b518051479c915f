import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.data import tokenizer as tokenizer_module
from drumline.data.tokenizer import END_OF_TEXT, Tokenizer
from drumline.errors import ConfigError, DataError
from drumline.generate.streaming import StreamDecoder

TEXTS = [
    "The drummer keeps the beat, and the line keeps the drummer. ",
    "Trommeln, tambours, барабаны, 太鼓! 🥁\r\n",
] * 20
TOKENIZER = Tokenizer.train(TEXTS, vocab_size=400)

any_text = st.lists(
    st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from([END_OF_TEXT, "🥁", " the", "�"]))
).map("".join)


def changed(**changes: object) -> bytes:
    """The trained tokenizer.json with some of its top-level entries replaced."""
    return json.dumps(json.loads(TOKENIZER.serialized) | changes).encode()


def added_token(content: str, *, id: int, special: bool = True) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": content, "special": special, **flags}


@given(any_text)
def test_every_text_comes_back_exactly(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.lists(any_text, max_size=4))
def test_a_text_that_spells_the_end_of_text_is_not_ended_by_it(texts: list[str]) -> None:
    for text, ids in zip(texts, TOKENIZER.encode_batch(texts), strict=True):
        assert TOKENIZER.end_of_text not in ids
        assert ids == TOKENIZER.encode(text)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.sampled_from("aZ9é太 \n\t\r'_.s\x1c\u00a0\u2028🥁"), max_size=60), max_size=3))
def test_long_texts_have_the_same_ids_in_a_batch_as_alone(monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> None:
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARS", 3)
    assert TOKENIZER.encode_batch(texts) == [TOKENIZER.encode(text) for text in texts]


def test_a_long_text_is_encoded_in_pieces_only_where_that_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARS", 3)
    assert TOKENIZER.pieces("the beat\ngoes  on 1 2") == ["the beat", "\ngoes  on", " 1 2"]
    spaced = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    for change in ({"pre_tokenizer": spaced}, {"normalizer": {"type": "Prepend", "prepend": "x"}}):
        other = Tokenizer(changed(**change), origin="other")
        assert other.encode_batch(["the beat goes on"]) == [other.encode("the beat goes on")]


def test_threads_that_share_a_tokenizer_get_the_same_ids() -> None:
    texts = [f"{END_OF_TEXT} {number} the beat" for number in range(200)]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(TOKENIZER.encode_batch, [texts] * 16))
    assert all(result == results[0] for result in results)


def test_training_twice_on_the_same_text_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        Tokenizer.train(iter(TEXTS), vocab_size=400).save(tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_tokenizer_that_was_saved_is_the_same_when_loaded(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert (loaded.sha256, loaded.vocab_size) == (TOKENIZER.sha256, TOKENIZER.vocab_size)
    assert loaded.encode(TEXTS[1]) == TOKENIZER.encode(TEXTS[1])


def test_transformers_reads_the_saved_tokenizer_and_gives_the_same_ids(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    TOKENIZER.save(tmp_path / "tokenizer.json")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))  # type: ignore[no-untyped-call]
    for text in (*TEXTS[:2], "  two  spaces\n\n\tand a tab\x00", "日本語"):
        assert theirs.encode(text) == TOKENIZER.encode(text)
    assert theirs.convert_tokens_to_ids(END_OF_TEXT) == TOKENIZER.end_of_text
    assert len(theirs) == TOKENIZER.vocab_size


def test_a_vocabulary_without_room_for_every_byte_is_refused() -> None:
    with pytest.raises(ConfigError, match="256 is too small") as refused:
        Tokenizer.train(TEXTS, vocab_size=256)
    assert "--vocab_size" in refused.value.fix
    assert Tokenizer.train(TEXTS, vocab_size=257).vocab_size == 257


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b'{"model": {"type": "unheard of"}}', b"\xff\xfe\x00"])
def test_what_is_not_a_tokenizer_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is not a tokenizer\.json") as refused:
        Tokenizer.load(path)
    assert str(path) in refused.value.problem


def test_a_missing_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(DataError, match=r"cannot be read"):
            Tokenizer.load(path)


@pytest.mark.parametrize("token", ["</s>", "<|end_of_text|>", "<eos>"])
def test_the_end_of_text_of_other_tokenizers_is_found(token: str) -> None:
    model = json.loads(TOKENIZER.serialized)["model"]
    model["vocab"][token] = model["vocab"].pop(END_OF_TEXT)
    other = Tokenizer(changed(model=model, added_tokens=[added_token(token, id=0)]), origin="other")
    assert other.end_of_text == 0
    assert 0 not in other.encode(f"a{token}b")
    assert other.decode(other.encode(f"a{token}b")) == f"a{token}b"


def test_a_tokenizer_without_an_end_of_text_is_refused() -> None:
    model = json.loads(TOKENIZER.serialized)["model"]
    model["vocab"]["something else"] = model["vocab"].pop(END_OF_TEXT)
    with pytest.raises(DataError, match="other has no end-of-text token"):
        Tokenizer(changed(model=model, added_tokens=[]), origin="other")


def test_a_tokenizer_that_was_saved_with_truncation_and_padding_neither_cuts_nor_pads() -> None:
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    padding = {**pad, "pad_id": 0, "pad_type_id": 0, "pad_token": END_OF_TEXT}
    other = Tokenizer(changed(truncation=truncation, padding=padding), origin="other")
    assert other.encode_batch(TEXTS[:2]) == TOKENIZER.encode_batch(TEXTS[:2])
    assert other.sha256 == TOKENIZER.sha256


def test_the_vocabulary_reaches_to_the_largest_id() -> None:
    added = [added_token(END_OF_TEXT, id=0), added_token("<|far|>", id=TOKENIZER.vocab_size)]
    assert Tokenizer(changed(added_tokens=added), origin="other").vocab_size == TOKENIZER.vocab_size + 1


@given(any_text)
def test_a_stream_never_cuts_a_character(text: str) -> None:
    stream = StreamDecoder(TOKENIZER)
    pieces = [stream.push(token) for token in TOKENIZER.encode(text)]
    assert "".join([*pieces, stream.flush()]) == text
    assert "".join(pieces).count("�") <= text.count("�")


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)))
def test_a_stream_of_any_ids_gives_what_decoding_them_at_once_gives(ids: list[int]) -> None:
    stream = StreamDecoder(TOKENIZER)
    assert "".join([stream.push(token) for token in ids] + [stream.flush()]) == TOKENIZER.decode(ids)


def test_ctrl_c_is_answered_while_a_vocabulary_is_learned() -> None:
    draw = random.Random(0)

    def texts() -> Iterator[str]:
        for _ in range(300):
            yield " ".join("".join(draw.choices("abcdefghijklmnop", k=9)) for _ in range(200))
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        Tokenizer.train(texts(), vocab_size=60_000)
    assert "background" in {thread.name for thread in threading.enumerate()}, "it was answered only afterwards"
