"""Data of any size is opened at once and read in bounded memory; its parts are compared when they are read."""

import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.small import small
from helpers.sparse import sparse_folder
from hypothesis import given
from hypothesis import strategies as st

from drumline.cli.app import run_command
from drumline.data import tokens
from drumline.data.batches import BatchPlan, TokenBatches, visit_order, visits
from drumline.data.foreign import MOST_SCANNED, SCAN_TOKENS, scanned_places
from drumline.data.opening import open_tokens
from drumline.errors import DataError
from drumline.files import verified

TERABYTE_TOKENS = 500_000_000_000
PART_BYTES = 1 << 9


@pytest.fixture
def folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prepared folder whose files count as large, and which nobody has opened."""
    monkeypatch.setattr(tokens, "LARGE_BYTES", 4 * PART_BYTES)
    monkeypatch.setattr(verified, "LARGE_PART_BYTES", PART_BYTES)
    assert run_command(["prepare", "text", "--out", "tokens", "--vocab_size", "300"]) == 0
    assert {"train.bin.crc32"} <= {path.name for path in (here / "tokens").iterdir()}
    return here / "tokens"


def change(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_large_file_is_never_hashed_as_a_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    once = verified._hashed

    def noting(path: Path, *words: str, **more: str) -> str:
        hashed.append(path.name)
        return once(path, *words, **more)

    monkeypatch.setattr(verified, "_hashed", noting)
    opened = open_tokens(folder)
    opened.read(0, len(opened))
    assert "train.bin.crc32" in hashed and "train.bin" not in hashed


def test_a_changed_part_of_a_large_file_is_refused_when_it_is_read_even_the_first_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified, "_START_S", -1.0)
    change(folder / "train.bin", PART_BYTES + 7)
    opened, part = open_tokens(folder), PART_BYTES // 2  # in tokens
    opened.read(0, part)
    opened.read(2 * part, len(opened))
    with pytest.raises(DataError, match=r"train.bin is damaged or modified: its bytes 512 to 1,024 \(part 2 of"):
        opened.read(part, part + 1)


def test_a_change_that_a_start_comes_upon_is_refused_before_training(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder / "train.bin", 5)
    capsys.readouterr()
    assert run_command(["train", *small("--train_data_path", "tokens")]) == 1
    error, fix = capsys.readouterr().err.splitlines()
    assert "tokens/train.bin is damaged or modified: its bytes 0 to 512" in error and "copy it again" in fix


def test_changed_hashes_are_refused_by_name(folder: Path) -> None:
    change(folder / "train.bin.crc32", 3)
    with pytest.raises(DataError, match=r"train.bin.crc32 is damaged or modified"):
        open_tokens(folder)


def test_missing_hashes_are_refused_by_name(folder: Path) -> None:
    (folder / "train.bin.crc32").unlink()
    with pytest.raises(DataError, match=r"train.bin.crc32 is listed in its manifest but cannot be read"):
        open_tokens(folder)


def test_hashes_of_another_number_of_parts_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "LARGE_PART_BYTES", PART_BYTES * 2)
    with pytest.raises(DataError, match=r"train.bin.crc32 has \d+ bytes, but train.bin needs \d+"):
        open_tokens(folder)


def test_a_copy_of_a_large_folder_gives_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    before, after = open_tokens(folder), open_tokens(tmp_path / "copy")
    assert np.array_equal(before.read(0, len(before)), after.read(0, len(after)))


def test_a_terabyte_of_tokens_is_opened_and_visited_in_bounded_memory(tmp_path: Path) -> None:
    folder = sparse_folder(tmp_path / "tokens", tokens=TERABYTE_TOKENS, documents=1000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = BatchPlan(8, 64)
    batches = TokenBatches(open_tokens(folder), plan, context=1024, seed=1)
    assert batches.items == (TERABYTE_TOKENS - 1) // 1024
    inputs, targets, _ = batches.micro_batch(10**5, 63)
    assert inputs.shape == targets.shape == (8, 1024)
    assert batches.names(3, 0)
    # A function that is no permutation would visit some two hundred of these windows twice.
    visited = np.concatenate([visits(batches, 1, step) for step in range(0, 900_000, 900)])
    assert len(np.unique(visited)) == len(visited) == 1000 * plan.sequences
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 200 << 10, "64 MB of hashes are mapped, and some parts"


@given(items=st.integers(2, 1 << 42), epoch=st.integers(0, 1000), seed=st.integers(0, 1 << 31), data=st.data())
def test_the_order_never_visits_an_item_twice_in_an_epoch(
    items: int, epoch: int, seed: int, data: st.DataObject
) -> None:
    places = data.draw(st.sets(st.integers(0, items - 1), max_size=64))
    positions = np.array(sorted(places), dtype=np.int64) + epoch * items
    visited = visit_order(positions, items=items, seed=seed)
    assert len(set(visited.tolist())) == len(places)
    assert all(0 <= item < items for item in visited.tolist())


def test_ids_of_a_huge_foreign_file_are_checked_where_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    with path.open("wb") as file:
        file.truncate(TERABYTE_TOKENS * 2)
        file.seek(2 * (SCAN_TOKENS + 5))  # between the places that are looked at when it is opened
        file.write(b"\xff\xff")
    opened = open_tokens(path, vocab_size=50257)
    opened.read(0, SCAN_TOKENS)
    with pytest.raises(DataError, match=rf"token 65535 at position {SCAN_TOKENS + 5} of .* vocabulary of 50257"):
        opened.read(SCAN_TOKENS, SCAN_TOKENS + 1024)


@given(st.integers(1, 1 << 45))
def test_of_a_file_of_any_size_about_as_many_ids_are_looked_at_as_are_affordable(count: int) -> None:
    places = scanned_places(count)
    assert len(places) * SCAN_TOKENS <= MOST_SCANNED + SCAN_TOKENS
    if count <= MOST_SCANNED:
        assert len(places) == -(-count // SCAN_TOKENS)
