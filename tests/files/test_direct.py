"""Large files past the page cache: the same bytes on any file system, and their hash."""

import errno
import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.files import direct
from drumline.files.direct import sha256_on_disk, write_direct
from drumline.files.disk import file_sha256

PIECE = 3 * 4096


@pytest.fixture(autouse=True, scope="module")
def _small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "_PIECE_BYTES", PIECE)
        patch.setattr(direct, "_buffers", threading.local())
        yield


@given(sizes=st.lists(st.sampled_from([0, 1, 4095, 4096, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 30_000]), max_size=5))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_has_the_bytes_of_its_chunks_whatever_their_sizes(sizes: list[int], tmp_path: Path) -> None:
    chunks = [memoryview(os.urandom(size)) for size in sizes]
    path, written = tmp_path / "file", list[int]()
    path.unlink(missing_ok=True)
    size, sha256 = write_direct(path, chunks, before=written.append)
    assert path.read_bytes() == b"".join(chunks)
    assert size == sum(sizes) and sha256 == file_sha256(path) == sha256_on_disk(path)
    assert written[-1] == size and all(0 <= after - before <= PIECE for before, after in pairwise(written))


def test_a_file_system_without_it_is_written_as_usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.open

    def without(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            really(path, flags & ~os.O_DIRECT, mode) if flags & os.O_CREAT else None
            raise OSError(errno.EINVAL, "Invalid argument")
        return really(path, flags, mode)

    monkeypatch.setattr(os, "open", without)
    data = os.urandom(2 * PIECE + 5)
    assert write_direct(tmp_path / "a", [memoryview(data)])[1] == sha256_on_disk(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == data


def test_a_file_system_that_refuses_only_the_writes_is_written_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, refused = os.write, []

    def refuse_once(descriptor: int, data: memoryview) -> int:
        if not refused:
            refused.append(1)
            raise OSError(errno.EINVAL, "Invalid argument")
        return really(descriptor, data[:5000])  # and writes only some of it at a time

    monkeypatch.setattr(os, "write", refuse_once)
    data = os.urandom(2 * PIECE + 5)
    write_direct(tmp_path / "a", [memoryview(data)])
    assert refused and (tmp_path / "a").read_bytes() == data


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError):
        write_direct(tmp_path / "a", [memoryview(b"yours")])
    assert (tmp_path / "a").read_text() == "mine"


def test_a_disk_that_is_full_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_direct(tmp_path / "a", [memoryview(b"0" * 5000)])


def test_the_hash_is_of_what_the_disk_has(tmp_path: Path) -> None:
    _, sha256 = write_direct(tmp_path / "a", [memoryview(bytes(2 * PIECE))])
    with (tmp_path / "a").open("r+b") as file:
        file.seek(PIECE + 7)
        file.write(b"\1")
    assert sha256_on_disk(tmp_path / "a") == file_sha256(tmp_path / "a") != sha256
