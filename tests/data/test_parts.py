"""Tokens that have changed on disk behind an unchanged size and time are not trained on."""

import json
import os
from pathlib import Path

import pytest
from helpers.small import small

from drumline.cli.app import run_command
from drumline.data.opening import open_tokens
from drumline.errors import DataError
from drumline.files import verified

PART_BYTES = 1 << 10


@pytest.fixture
def folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prepared folder of several parts, that was opened and found right."""
    monkeypatch.setattr(verified, "PART_BYTES", PART_BYTES)
    assert run_command(["prepare", "text", "--out", "tokens", "--vocab_size", "300"]) == 0
    open_tokens(here / "tokens")
    assert (here / "tokens/train.bin").stat().st_size > 3 * PART_BYTES
    return here / "tokens"


def change(path: Path, place: int) -> None:
    """Another byte, but the same size and time."""
    before, content = path.stat(), bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_changed_file_is_refused_at_the_start_with_the_place(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder / "train.bin", 2 * PART_BYTES + 5)
    capsys.readouterr()
    assert run_command(["train", *small("--train_data_path", "tokens")]) == 1
    error, fix = capsys.readouterr().err.splitlines()
    assert "tokens/train.bin is damaged or modified: its bytes 2,048 to 3,072 (part 3 of " in error
    assert "copy it again, or remove tokens and run drumline prepare again" in fix
    assert not Path("runs").exists()


def test_what_there_was_no_time_for_is_checked_when_it_is_first_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verified, "_START_S", -1.0)
    change(folder / "train.bin", PART_BYTES)
    half = PART_BYTES // 2  # in tokens
    file = open_tokens(folder)
    file.read(0, half)
    for start, stop in ((half, half + 1), (half - 1, half + 1), (0, 3 * half), (2 * half - 1, 2 * half)):
        with pytest.raises(DataError, match=r"part 2 of"):
            file.read(start, stop)
    file.read(2 * half, len(file))
    capsys.readouterr()
    assert run_command(["train", *small("--train_data_path", "tokens", "--total_steps", "99")]) == 1
    error, _ = capsys.readouterr().err.splitlines()
    assert "train.bin is damaged or modified: its bytes 1,024 to 2,048" in error


def test_each_part_is_hashed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    crc32 = verified.crc32

    def counting(content: bytes) -> int:
        hashed.append(len(content))
        return crc32(content)

    monkeypatch.setattr(verified, "crc32", counting)
    file = open_tokens(folder)
    file.read(0, len(file))
    assert sum(hashed) == (folder / "train.bin").stat().st_size


@pytest.mark.parametrize("damaged", [None, "00", "x" * 8, 5])
def test_hashes_of_parts_that_are_missing_or_damaged_cost_another_hash_of_the_whole(
    folder: Path, damaged: object
) -> None:
    path = folder / verified.STAMPS
    stamps = json.loads(path.read_text())
    whole = dict(stamps["train.bin"])
    if damaged is None:  # as an earlier version has written it
        del stamps["train.bin"]["crc32"]
    else:
        stamps["train.bin"]["crc32"] = damaged
    path.write_text(json.dumps(stamps))
    open_tokens(folder)
    assert json.loads(path.read_text())["train.bin"] == whole
    path.write_text(json.dumps(stamps))
    change(folder / "train.bin", 5)
    with pytest.raises(DataError, match=r"train\.bin is damaged or modified: sha256"):
        open_tokens(folder)
