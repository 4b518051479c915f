"""One file becomes documents: exactly, in little memory, and damage is named."""

import codecs
import gzip
import json
import lzma
import tracemalloc
from pathlib import Path
from unittest import mock

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from helpers.reading import documents, refused, texts
from hypothesis import given
from hypothesis import strategies as st

from drumline.data import cutting, sources, structured_files
from drumline.data.sources import Document, Skipped

PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}


def write(path: Path, data: bytes | str) -> str:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def passed_over(source: str) -> tuple[list[str], list[str]]:
    """What is read, and the reasons for what is not, when errors are passed over."""
    skipped = Skipped()
    return texts(source, on_error="skip", skipped=skipped), skipped.first


@pytest.mark.parametrize("packing", PACK)
def test_a_plain_file_is_one_document_with_its_exact_text(tmp_path, packing):
    text = "\ufeffa\r\nb\x85c\u2028d\re\x00\n\n"
    source = write(tmp_path / f"a.txt{packing}", PACK[packing](text.encode()))
    assert list(documents(source)) == [Document(source, text)]


@pytest.mark.parametrize("packing", PACK)
def test_a_long_file_is_one_document_read_in_parts_of_a_mebibyte(tmp_path, packing):
    text = "".join(f"line {number} Ω\r\n" for number in range(200_000))
    source = write(tmp_path / f"a.log{packing}", PACK[packing](text.encode()))
    parts = list(documents(source))
    assert "".join(part.text for part in parts) == text
    assert {part.name for part in parts} == {source}
    assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]
    assert all(part.text.startswith(" ") for part in parts[1:]), "between words"
    assert all(0.99 * 2**20 < len(part.text.encode()) <= 2**20 for part in parts[:-1])


@given(
    st.text(st.sampled_from("a\n\r\x85\u2028é€😀") | st.characters(codec="utf-8"), max_size=120),
    st.sampled_from(sorted(PACK)),
)
def test_the_parts_of_a_file_joined_are_the_file(tmp_path_factory, text, packing):
    source = write(tmp_path_factory.getbasetemp() / f"parts.txt{packing}", PACK[packing](text.encode() + b"."))
    with (
        mock.patch.object(sources, "PART_BYTES", 8),
        mock.patch.multiple(cutting, PART_BYTES=8, LONGEST_LINE_BYTES=20),
    ):
        parts = texts(source)
    assert "".join(parts) == text + "."
    assert all(len(part.encode()) <= 20 for part in parts)


def test_a_line_without_end_is_cut_between_characters(tmp_path):
    text = "x" + "€" * (3 << 20)
    parts = texts(write(tmp_path / "a.txt", text))
    assert "".join(parts) == text
    assert [len(part.encode()) for part in parts[:-1]] == [4 << 20, (4 << 20) - 1]


@pytest.mark.parametrize("packing", [".gz", ".xz", ".zst"])
def test_memory_stays_small_while_a_small_file_unpacks_to_a_large_one(tmp_path, packing):
    source = write(tmp_path / f"a.txt{packing}", PACK[packing](b"over and over\n" * (5 << 20)))
    tracemalloc.start()
    total_bytes = sum(len(document.text) for document in documents(source))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total_bytes == 14 * (5 << 20)
    assert peak_bytes < 16 << 20


def test_frames_of_zstd_one_behind_the_other_are_one_text(tmp_path):
    frames = b"".join(PACK[".zst"](text) for text in (b"one ", b"", b"two"))
    assert texts(write(tmp_path / "a.txt.zst", frames)) == ["one two"]


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json", ".jsonl.gz", ".json.zst"])
def test_each_json_line_is_a_document_named_by_its_line(tmp_path, suffix):
    lines = [json.dumps({"text": text, "body": f"b{text}"}) for text in ("one\u2028", "", "three")]
    data = codecs.BOM_UTF8 + ("\r\n".join([*lines[:2], "", lines[2]])).encode()
    source = write(tmp_path / f"a{suffix}", PACK["." + suffix.split(".")[-1] if suffix.count(".") > 1 else ""](data))
    assert list(documents(source)) == [Document(f"{source}:1", "one\u2028"), Document(f"{source}:4", "three")]
    assert texts(source, field="body") == ["bone\u2028", "b", "bthree"]


def test_a_json_file_may_be_one_array_if_it_is_small(tmp_path, monkeypatch):
    source = write(tmp_path / "a.json", json.dumps([{"text": "one"}, {"text": "two"}], indent=2))
    assert list(documents(source)) == [Document(f"{source}:item 1", "one"), Document(f"{source}:item 2", "two")]
    monkeypatch.setattr(structured_files, "LARGEST_ARRAY_BYTES", 10)
    assert "jq -c" in refused(source).fix


@pytest.mark.parametrize("packing", PACK)
def test_each_parquet_row_is_a_document_named_by_its_row(tmp_path, packing):
    rows = [f"row {number}" if number % 3 else "" for number in range(200)]
    plain = tmp_path / "plain"
    pq.write_table(pa.table({"id": list(range(200)), "body": rows}), plain, row_group_size=70)
    source = write(tmp_path / f"a.parquet{packing}", PACK[packing](plain.read_bytes()))
    wanted = [Document(f"{source}:row {number + 1}", text) for number, text in enumerate(rows) if text]
    assert list(documents(source, field="body")) == wanted


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl.xz", "a.parquet", "b.parquet.zst", "bad.jsonl"])
def test_the_bytes_told_add_up_to_the_size_on_disk(tmp_path, name):
    path = tmp_path / name
    data = b"".join(b'{"text": "%d"}\n' % number for number in range(9999))
    if "parquet" in name:
        pq.write_table(pa.table({"text": ["abc"] * 999}), path)
        data = path.read_bytes()
    if name == "bad.jsonl":
        data += b"\xff"
    write(path, PACK[path.suffix if path.suffix in PACK else ""](data))
    byte_counts: list[int] = []
    list(documents(str(path), on_bytes=byte_counts.append, on_error="skip"))
    assert sum(byte_counts) == path.stat().st_size


def test_bad_utf8_is_named_by_line_and_byte(tmp_path):
    source = write(tmp_path / "a.txt", b"good\n" * 300_000 + b"caf\xe9\n" + b"good\n" * 300_000)
    error = refused(source)
    assert error.problem == f"{source}:300001: byte 1500003 of the file (0xe9) is not UTF-8"
    assert "--on_error skip" in error.fix
    read, reasons = passed_over(source)
    assert reasons == [error.problem]
    assert len(read) == 2  # of three parts


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "caf\xe9"}', ":2: byte 29 of the file (0xe9) is not UTF-8"),
        (b'{"text": "cut sh', ":2 is not valid JSON: Unterminated string"),
        (b"[" * 100_000, ":2 is not valid JSON"),
        (b'"text"', ':2 is "text", not an object'),
        (b'{"body": "b", "id": 1}', ":2 has no field 'text'; it has: body, id"),
        (b'{"text": 7}', ":2: field 'text' is of type int, not a string"),
        (b'{"text": null}', ":2: field 'text' is null, not a string"),
        (b'{"text": "a\\ud800"}', ":2: character 1 is half of a surrogate pair (U+D800)"),
    ],
)
def test_a_bad_json_line_is_named_and_can_be_passed_over(tmp_path, line, reason):
    source = write(tmp_path / "a.jsonl", b'{"text": "one"}\n' + line + b'\n{"text": "three"}\n')
    error = refused(source)
    assert error.problem.startswith(source + reason)
    assert "--on_error skip" in error.fix
    assert ("--field NAME" in error.fix) == ("field" in reason)
    assert passed_over(source) == (["one", "three"], [error.problem])


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.md.zst", "a.jsonl"])
@pytest.mark.parametrize("content", [b"", b" \r\n\t\n"])
def test_an_empty_file_is_named(tmp_path, name, content):
    source = write(tmp_path / name, PACK[Path(name).suffix if Path(name).suffix in PACK else ""](content))
    write(tmp_path / "b.txt", "full")
    error = refused(source)
    assert error.problem.startswith(f"{source} is empty")
    assert passed_over(str(tmp_path)) == (["full"], [error.problem])


@pytest.mark.parametrize("packing", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_a_truncated_packed_file_is_named_and_its_whole_documents_can_be_kept(tmp_path, packing, kept):
    lines = b"".join(json.dumps({"text": str(number**9)}).encode() + b"\n" for number in range(20_000))
    packed = PACK[packing](lines)
    source = write(tmp_path / f"a.jsonl{packing}", packed[: int(len(packed) * kept)])
    error = refused(source)
    assert error.problem.startswith(f"{source} is damaged or truncated")
    read, reasons = passed_over(source)
    assert reasons == [error.problem]
    assert read == [str(number**9) for number in range(len(read))]
    assert 0 < len(read) < 20_000


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.xz", "a.txt.zst", "a.parquet", "b.parquet.gz"])
def test_a_file_that_is_not_what_its_name_says_is_refused_by_name(tmp_path, name):
    data = b"this is plain text" * 9
    assert name in refused(write(tmp_path / name, gzip.compress(data) if name == "b.parquet.gz" else data)).problem


def test_a_corrupt_parquet_file_is_named_and_can_be_passed_over(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [str(number**9) for number in range(5000)]}), path, row_group_size=1000)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 500] = b"\xff" * 500
    source = write(path, bytes(data))
    error = refused(source)
    assert source in error.problem
    write(tmp_path / "b.txt", "full")
    read, reasons = passed_over(str(tmp_path))
    assert read[0] == "0" and read[-1] == "full"
    assert reasons == [error.problem]


def test_a_parquet_column_that_is_missing_or_not_text_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    bad_utf8 = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    pq.write_table(pa.table({"id": [1], "note": [None], "bad": bad_utf8}), path)
    assert refused(str(path)).problem == f"{path} has no field 'text'; it has: id, note, bad"
    assert "row 1: field 'id' is of type int" in refused(str(path), field="id").problem
    assert "row 1: field 'note' is null" in refused(str(path), field="note").problem
    assert "row 1 is not UTF-8" in refused(str(path), field="bad").problem


def test_an_unreadable_file_is_named_and_can_be_passed_over(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone")
    write(tmp_path / "b.txt", "full")
    error = refused(str(tmp_path))
    assert error.problem == f"{tmp_path}/a.txt cannot be read: No such file or directory"
    assert passed_over(str(tmp_path)) == (["full"], [error.problem])


def test_only_the_first_reasons_are_kept_but_all_are_counted(tmp_path):
    skipped = Skipped()
    source = write(tmp_path / "a.jsonl", "bad\n" * 9 + '{"text": "good"}')
    assert texts(source, on_error="skip", skipped=skipped) == ["good"]
    assert skipped.count == 9
    assert len(skipped.first) == 5


@pytest.mark.parametrize("packing", PACK)
def test_a_file_is_closed_when_its_reader_stops_early(tmp_path, packing):
    source = write(tmp_path / f"a.txt{packing}", PACK[packing](b"a\n" * (2 << 20)))
    reader = documents(source)
    next(reader)
    assert source in [file.path for file in psutil.Process().open_files()]
    reader.close()
    assert source not in [file.path for file in psutil.Process().open_files()]
