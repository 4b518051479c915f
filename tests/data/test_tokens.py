from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.data.opening import document_names, has_tokens, open_tokens
from drumline.data.tokenizer import Tokenizer
from drumline.data.tokens import TOKENIZER, FileRecord, Manifest, TokenWriter, is_tokens, recorded
from drumline.errors import DataError

TOKENS = Tokenizer.train(["the beat of the drum"], vocab_size=257)
LLM_C = {"u2": (20240520, 1), "u4": (20240801, 7)}


def write_folder(folder: Path, documents: list[tuple[str, list[int]]], *, vocab_size: int = 300) -> Path:
    """A prepared folder with a train split of these documents."""
    folder.mkdir(parents=True)
    TOKENS.save(folder / TOKENIZER)
    writer = TokenWriter(folder, "train", vocab_size=vocab_size, end_of_text=0)
    for name, ids in documents:
        writer.add(name, ids, text_bytes=3)
    record, files = writer.close(), recorded(writer.paths)
    files[TOKENIZER] = FileRecord(bytes=(folder / TOKENIZER).stat().st_size, sha256=TOKENS.sha256)
    Manifest(
        drumline_version="1",
        source="a test",
        source_key="s",
        key="k",
        vocab_size=vocab_size,
        end_of_text=0,
        splits={"train": record},
        files=files,
    ).write(folder)
    return folder


def write_llm_c(path: Path, ids: list[int], *, dtype: str = "u2", count: int | None = None) -> Path:
    header = np.zeros(256, dtype="<i4")
    header[:3] = (*LLM_C[dtype], len(ids) if count is None else count)
    path.write_bytes(header.tobytes() + np.array(ids, dtype=f"<{dtype}").tobytes())
    return path


def write_raw(path: Path, ids: list[int]) -> Path:
    np.array(ids, dtype="<u2").tofile(path)
    return path


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=8), data=st.data())
def test_documents_are_read_back_with_their_ends_and_names(
    tmp_path: Path, lengths: list[int], data: st.DataObject
) -> None:
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    documents = [(f"d{number}", list(range(1, length + 1))) for number, length in enumerate(lengths)]
    opened = open_tokens(write_folder(folder, documents))
    owners = [name for name, ids in documents for _ in [*ids, 0]]
    assert opened.read(0, len(opened)).tolist() == [token for _, ids in documents for token in [*ids, 0]]
    assert (opened.text_bytes, opened.end_of_text, opened.vocab_size) == (3 * len(documents), 0, 300)
    start = data.draw(st.integers(0, len(opened)))
    stop = data.draw(st.integers(start, len(opened)))
    assert document_names(opened, start, stop) == list(dict.fromkeys(owners[start:stop]))
    assert opened.read(start, stop).dtype == np.int64


def test_names_with_line_ends_or_halves_of_characters_stay_one_line_each(tmp_path: Path) -> None:
    opened = open_tokens(write_folder(tmp_path / "t", [("a\nb\r", [1]), ("\udcff é\u2028", [2]), ("c", [3])]))
    assert document_names(opened, 0, 6) == ["a b ", "\\udcff é\u2028", "c"]


def test_a_read_beyond_the_end_is_an_error_and_not_a_short_answer(tmp_path: Path) -> None:
    opened = open_tokens(write_folder(tmp_path / "t", [("a", [1, 2])]))
    with pytest.raises(IndexError):
        opened.read(2, 4)


@pytest.mark.parametrize(("vocab_size", "bytes_per_token"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_tokens_are_as_wide_as_the_vocabulary_needs(tmp_path: Path, vocab_size: int, bytes_per_token: int) -> None:
    folder = write_folder(tmp_path / "t", [("a", [vocab_size - 1])], vocab_size=vocab_size)
    assert (folder / "train.bin").stat().st_size == 2 * bytes_per_token
    assert open_tokens(folder).read(0, 2).tolist() == [vocab_size - 1, 0]


def test_the_writer_refuses_a_token_outside_the_vocabulary(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path, "train", vocab_size=300, end_of_text=0)
    with pytest.raises(DataError, match=r"a\.txt has token 300, outside the vocabulary of 300"):
        writer.add("a.txt", [1, 300], text_bytes=2)
    writer.abandon()


def test_a_bin_file_of_a_prepared_folder_is_the_same_as_the_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "t", [("a", [1, 2])])
    by_file, by_folder = open_tokens(folder / "train.bin"), open_tokens(folder)
    assert (by_file.path, by_file.sha256, by_file.end_of_text) == (by_folder.path, by_folder.sha256, 0)
    assert by_file.tokenizer_path == folder / "tokenizer.json"
    with pytest.raises(DataError, match=r"has no train\.documents tokens"):
        open_tokens(folder / "train.documents.bin")


def test_a_split_that_was_not_prepared_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "t", [("a", [1])])
    assert has_tokens(folder, "train") and not has_tokens(folder, "valid")
    with pytest.raises(DataError, match="has no valid tokens, only train"):
        open_tokens(folder, split="valid")


def test_a_folder_of_a_larger_vocabulary_than_asked_for_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "t", [("a", [1])])
    with pytest.raises(DataError, match="vocabulary of 300, larger than the requested 299"):
        open_tokens(folder, vocab_size=299)
    assert open_tokens(folder, vocab_size=301).vocab_size == 300


def test_a_folder_of_nanogpt_is_read_as_it_is(tmp_path: Path) -> None:
    write_raw(tmp_path / "train.bin", [5, 65535])
    write_raw(tmp_path / "val.bin", [7])
    assert open_tokens(tmp_path).read(0, 2).tolist() == [5, 65535]
    valid = open_tokens(tmp_path, split="valid")
    assert valid.read(0, 1).tolist() == [7]
    assert (valid.vocab_size, valid.end_of_text, valid.sha256, document_names(valid, 0, 1)) == (None, None, None, [])
    assert has_tokens(tmp_path, "valid") and not has_tokens(tmp_path / "train.bin", "valid")


@pytest.mark.parametrize("dtype", ["u2", "u4"])
def test_files_of_llm_c_are_read_behind_their_header(tmp_path: Path, dtype: str) -> None:
    ids = [1, 2, 50256] if dtype == "u2" else [1, 2, 128255]
    assert open_tokens(write_llm_c(tmp_path / "x.bin", ids, dtype=dtype)).read(0, 3).tolist() == ids


@pytest.mark.parametrize(("count", "state"), [(4, "truncated"), (2, "inconsistent with its header")])
def test_a_file_whose_header_counts_otherwise_is_refused_by_name(tmp_path: Path, count: int, state: str) -> None:
    path = write_llm_c(tmp_path / "x.bin", [1, 2, 3], count=count)
    with pytest.raises(DataError, match=rf"x\.bin is {state}: 1030 bytes, but its header says {count} tokens"):
        open_tokens(path)


def test_an_unknown_version_of_the_header_is_refused(tmp_path: Path) -> None:
    path = write_llm_c(tmp_path / "x.bin", [1])
    data = bytearray(path.read_bytes())
    data[4] = 9
    path.write_bytes(data)
    with pytest.raises(DataError, match="header with magic 20240520, version 9"):
        open_tokens(path)


def test_a_foreign_token_outside_the_vocabulary_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drumline.data.foreign.SCAN_TOKENS", 4)
    path = write_raw(tmp_path / "x.bin", [0, 1, 2, 3, 4, 5, 300, 301])
    with pytest.raises(DataError, match=r"token 300 at position 6 of .*x\.bin is outside the vocabulary of 300"):
        open_tokens(path, vocab_size=300)
    assert open_tokens(path, vocab_size=302).vocab_size == 302


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("x.bin", b"", r"x\.bin is empty"),
        ("x.bin", b"abc", r"x\.bin is truncated or not a token file: 3 bytes"),
        ("y.bin", b"ab", r"token file .*x\.bin does not exist"),
    ],
)
def test_a_foreign_file_that_cannot_be_tokens_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=problem):
        open_tokens(tmp_path / "x.bin")


@pytest.mark.parametrize(("code", "dtype"), [(4, "int32"), (5, "int64"), (8, "uint16")])
def test_a_file_of_megatron_is_read_once_its_dtype_is_said(tmp_path: Path, code: int, dtype: Any) -> None:
    ids = np.arange(90, dtype=dtype)
    ids.tofile(tmp_path / "x.bin")
    (tmp_path / "x.idx").write_bytes(b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([code]) + bytes(16))
    wrong: Any = "uint32"
    for said in ("auto", wrong):
        with pytest.raises(DataError, match=rf"Megatron.* {dtype} according to x\.idx") as refused:
            open_tokens(tmp_path / "x.bin", dtype=said)
        assert f"--data_dtype {dtype}" in refused.value.fix
    assert open_tokens(tmp_path / "x.bin", dtype=dtype).read(0, 90).tolist() == ids.tolist()


@pytest.mark.parametrize("largest", [60, 50_000, 128_255])
@pytest.mark.parametrize(("stored", "dtype"), [("uint32", "uint32"), ("int32", "uint32"), ("int64", "int64")])
def test_wider_tokens_are_not_read_as_uint16(tmp_path: Path, stored: str, dtype: Any, largest: int) -> None:
    ids = np.random.default_rng(0).integers(0, largest + 1, 2000, dtype=stored)
    ids[:3] = largest, 0, 1
    ids.tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match=f"does not look like uint16 tokens but like {dtype}") as refused:
        open_tokens(tmp_path / "x.bin")
    assert refused.value.fix == f"add --data_dtype {dtype}, or --data_dtype uint16 if that is what they are"
    assert open_tokens(tmp_path / "x.bin", dtype=dtype).read(0, 2000).tolist() == ids.tolist()
    assert len(open_tokens(tmp_path / "x.bin", dtype="uint16")) == 2000 * ids.itemsize // 2


@pytest.mark.parametrize("largest", [1, 31, 65, 50_000, 65_535])
def test_uint16_tokens_are_not_taken_for_wider_ones(tmp_path: Path, largest: int) -> None:
    ids = np.random.default_rng(0).integers(0, largest + 1, 2000).tolist()
    assert open_tokens(write_raw(tmp_path / "x.bin", ids)).read(0, 2000).tolist() == ids


@pytest.mark.parametrize(
    ("content", "dtype", "problem"),
    [
        (np.arange(1, 99, dtype=">u4").tobytes(), "auto", "looks like big-endian tokens"),
        (b"\x93NUMPY" + bytes(90), "auto", r"x\.bin is a \.npy file"),
        (bytes(90), "uint32", "90 bytes is not a whole number of uint32 tokens"),
        (np.array([5, -1, 7], "<i4").tobytes(), "int32", "token -1 at position 1 .* is outside the vocabulary of 300"),
    ],
)
def test_what_no_dtype_fits_is_refused(tmp_path: Path, content: bytes, dtype: Any, problem: str) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(DataError, match=problem):
        open_tokens(tmp_path / "x.bin", vocab_size=300, dtype=dtype)


def test_a_header_that_says_another_dtype_is_believed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is uint16 according to its header, not uint32"):
        open_tokens(write_llm_c(tmp_path / "x.bin", [1, 2]), dtype="uint32")


def test_a_folder_that_was_never_finished_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "t", [("a", [1])])
    (folder / "manifest.json").unlink()
    for path in (folder, folder / "train.bin"):
        with pytest.raises(DataError, match="is incomplete"):
            open_tokens(path)
    with pytest.raises(DataError, match=r"has no valid\.bin or val\.bin or validation\.bin"):
        open_tokens(folder, split="valid")


def test_tokens_are_told_from_text(tmp_path: Path) -> None:
    prepared = write_folder(tmp_path / "prepared", [("a", [1])])
    text = tmp_path / "text"
    text.mkdir()
    (text / "manifest.json").write_text('{"name": "a web page"}')
    raw = tmp_path / "raw"
    raw.mkdir()
    write_raw(raw / "train.bin", [1])
    assert [is_tokens(path) for path in (prepared, prepared / "train.bin", raw, "not/there.bin")] == [True] * 4
    assert [is_tokens(path) for path in (text, "builtin", tmp_path / "a.txt", "roneneldan/TinyStories")] == [False] * 4
