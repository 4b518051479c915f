"""Compressed files that threads unpack ahead."""

import gzip
import json
import lzma
import random
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from drumline.data import Reading, documents
from drumline.data.sources import Document
from drumline.encoding import unpacking
from drumline.errors import DataError


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "LEAST_BYTES", 1000)
    monkeypatch.setattr(unpacking, "PIECE_BYTES", 3000)


@pytest.fixture
def rows() -> bytes:
    draw = random.Random(0)
    return b"".join(json.dumps({"text": f"{draw.random()} é" * 9}).encode() + b"\n" for _ in range(2000))


def packed(folder: Path, rows: bytes, kind: str) -> Path:
    """The rows in one file: of one block, of blocks as `xz -T` writes them, of several streams, members or frames."""
    (folder / "x.jsonl").write_bytes(rows)
    path = folder / f"x.jsonl.{kind.split(maxsplit=1)[0]}"
    half = rows.index(b"\n", len(rows) // 2) + 1
    if kind == "xz blocks":
        if shutil.which("xz") is None:
            pytest.skip("no xz command")
        subprocess.run(["xz", "-k", "-1", "--block-size=20000", folder / "x.jsonl"], check=True)
    elif kind.startswith("xz"):
        parts = [rows] if kind == "xz" else [rows[:half], rows[half:]]
        path.write_bytes(b"".join(map(lzma.compress, parts)))
    elif kind == "gz":
        path.write_bytes(gzip.compress(rows[:half]) + gzip.compress(rows[half:]))
    else:
        compress = pytest.importorskip("zstandard").ZstdCompressor().compress
        path.write_bytes(compress(rows[:half]) + compress(rows[half:]))
    return path


def read(path: Path, **options: str) -> list[Document]:
    return list(documents(str(path), Reading(**options)))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["xz", "xz blocks", "xz streams", "gz", "zst"])
def test_a_file_unpacked_ahead_has_the_documents_of_the_plain_one_and_counts_all_its_bytes(
    tmp_path: Path, rows: bytes, kind: str
) -> None:
    path = packed(tmp_path, rows, kind)
    counted: list[int] = []
    found = list(documents(str(path), Reading(on_bytes=counted.append)))
    assert [(each.name.rpartition(":")[2], each.text) for each in found] == [
        (each.name.rpartition(":")[2], each.text) for each in read(tmp_path / "x.jsonl")
    ]
    assert sum(counted) == path.stat().st_size and min(counted) >= 0


@pytest.mark.parametrize("kind", ["xz", "xz blocks"])
@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_what_was_read_before_damage_is_kept_and_the_file_is_named(
    tmp_path: Path, rows: bytes, kind: str, damage: str
) -> None:
    path = packed(tmp_path, rows, kind)
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        del content[len(content) * 3 // 4 :]
    else:
        content[len(content) * 3 // 4] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.jsonl\.xz is damaged or truncated"):
        read(path)
    whole, kept = read(tmp_path / "x.jsonl"), read(path, on_error="skip")
    assert [each.text for each in kept] == [each.text for each in whole[: len(kept)]]
    assert len(whole) // 2 < len(kept) < len(whole)


@pytest.mark.parametrize("kind", ["xz", "xz blocks", "gz"])
def test_a_reader_that_is_left_leaves_no_thread_behind(tmp_path: Path, rows: bytes, kind: str) -> None:
    reader = documents(str(packed(tmp_path, rows, kind)))
    next(reader)
    reader.close()  # type: ignore[attr-defined]
    assert not [each for each in threading.enumerate() if each.name.startswith("unpacker")]
