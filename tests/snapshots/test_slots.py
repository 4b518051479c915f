"""A slot is used only if it holds exactly what was sealed, whatever happened to it or to the process that wrote it."""

import contextlib
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.saved import flipped

from drumline.snapshots import slots
from drumline.snapshots.layout import Layout
from drumline.snapshots.memory import Memory
from drumline.snapshots.slots import DamagedError, Slot, SlotTakenError, is_in_use, read_header, read_slot
from drumline.snapshots.sums import sums

CPU = torch.device("cpu")
TENSORS = {
    "weights": torch.arange(3000, dtype=torch.float32).reshape(30, 100),
    "exp_avg/weights": torch.randn(30, 100, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "step/weights": torch.tensor(7.0),
    "seen": torch.tensor([True, False]),
    "nothing": torch.empty(0, 4),
}
ABOUT = {"step": 12, "facts": {"seed": 1}, "losses": [2.5, 2.25]}


@pytest.fixture
def threads() -> Any:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def write(path: Path, threads: ThreadPoolExecutor, *, step: int = 12, by_gpu: int = 0) -> Slot:
    """by_gpu: so many bytes at the beginning have checksums as a GPU computes them"""
    slot = Slot(path, replace(Layout.of(TENSORS), on_device=by_gpu), device=CPU)
    slot.open()
    for name, view in slot.layout.views(slot.data).items():
        view.copy_(TENSORS[name])
    summed = sums(slot.data[:by_gpu], CPU).tolist() if by_gpu else None
    slot.seal(step, "token", {**ABOUT, "step": step}, threads, summed)
    return slot


@pytest.mark.parametrize("by_gpu", [0, 8192])
def test_what_is_sealed_is_read_again_bit_for_bit(tmp_path: Path, threads: ThreadPoolExecutor, by_gpu: int) -> None:
    write(tmp_path / "slot", threads, by_gpu=by_gpu).close()
    header = read_header(tmp_path / "slot")
    assert header is not None and header.step == 12 and header.token == "token"
    content = read_slot(tmp_path / "slot", threads, device=CPU)
    assert content.about == ABOUT and content.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(content.tensors[name], tensor) and content.tensors[name].dtype == tensor.dtype
    assert (tmp_path / "slot").stat().st_mode & 0o077 == 0 or tmp_path.stat().st_mode & 0o077 == 0


def test_a_slot_that_is_being_written_holds_nothing(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    slot = write(tmp_path / "slot", threads)
    slot.open()
    assert read_header(tmp_path / "slot") is None


@pytest.mark.parametrize("seed", range(40))
def test_one_bit_that_has_another_value_is_noticed_wherever_it_is(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(slots, "_PIECE_BYTES", 1024)
    path, draw = tmp_path / "slot", random.Random(seed)
    write(path, threads, by_gpu=8192 if seed % 4 < 2 else 0).close()
    header = read_header(path)
    assert header is not None
    content = path.read_bytes()
    used = slots._HEADER.size + slots._CHECKSUM.size
    data = slots.HEADER_BYTES + header.data_bytes + header.seal_bytes
    start, end = ((0, used), (slots.HEADER_BYTES, data))[seed % 2]
    path.write_bytes(content[:start] + flipped(content[start:end], draw) + content[end:])
    with pytest.raises(DamagedError):
        read_slot(path, threads, device=CPU)


@pytest.mark.parametrize(
    "harm",
    [
        lambda content: content[:10],
        lambda content: content[:5000],
        lambda content: content[:15000],
        lambda content: b"drumline" + bytes(len(content) - 8),
        lambda content: bytes(len(content)),
        lambda content: os.urandom(len(content)),
        lambda content: b"",
    ],
)
def test_what_is_torn_or_something_else_is_not_used(
    tmp_path: Path, threads: ThreadPoolExecutor, harm: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "slot"
    write(path, threads).close()
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(DamagedError):
        read_slot(path, threads, device=CPU)


def killed_after(path: Path, point: int) -> None:
    """Write a slot over another one, and be killed after so many writes to its memory."""
    written = 0
    plain = Memory.bytes.fget
    assert plain is not None

    class Dying:
        def __init__(self, view: memoryview) -> None:
            self.view = view

        def __getitem__(self, where: slice) -> Any:
            part = self.view[where]
            return Dying(part) if where.start == slots.HEADER_BYTES + Layout.of(TENSORS).size else part

        def __len__(self) -> int:
            return len(self.view)

        def __setitem__(self, where: slice, value: bytes) -> None:
            nonlocal written
            if written == point:
                self.view[where.start or 0 : (where.start or 0) + len(value) // 2] = value[: len(value) // 2]
                os._exit(9)
            written += 1
            self.view[where] = value

    Memory.bytes = property(lambda self: Dying(plain(self)))  # type: ignore[assignment,method-assign]
    with ThreadPoolExecutor(1) as threads:
        write(path, threads, step=13)


@pytest.mark.parametrize("point", [0, 1, 2])
def test_a_process_killed_at_any_point_leaves_the_old_content_or_none(
    tmp_path: Path, threads: ThreadPoolExecutor, point: int
) -> None:
    path = tmp_path / "slot"
    write(path, threads, step=12).close()
    pid = os.fork()
    if pid == 0:
        killed_after(path, point)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9  # it was killed there, and nowhere else
    with contextlib.suppress(DamagedError):
        assert read_header(path) is None or read_slot(path, threads, device=CPU).about["step"] == 12
    assert not is_in_use(path)
    write(path, threads, step=14).close()
    assert read_slot(path, threads, device=CPU).about["step"] == 14


def test_a_slot_belongs_to_one_process_at_a_time(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    slot = write(tmp_path / "slot", threads)
    assert is_in_use(tmp_path / "slot")
    with pytest.raises(SlotTakenError):
        Slot(tmp_path / "slot", Layout.of(TENSORS), device=CPU)
    slot.close()
    assert not is_in_use(tmp_path / "slot") and not is_in_use(tmp_path / "not there")
    Slot(tmp_path / "slot", Layout.of(TENSORS), device=CPU).close()


@pytest.mark.needs("disks")
def test_memory_that_is_not_there_is_refused_and_kills_nobody(small_disk: Path) -> None:
    with pytest.raises(OSError, match="no room"):
        Slot(small_disk / "slot", Layout.of({"large": torch.empty(1 << 20)}), device=CPU)
    assert list(small_disk.iterdir()) == []


def test_what_stands_beside_the_tensors_may_grow_but_not_without_end(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    slot = write(tmp_path / "slot", threads)
    slot.open()
    slot.seal(13, "token", {"losses": [1.25] * 5000}, threads)
    assert len(read_slot(tmp_path / "slot", threads, device=CPU).about["losses"]) == 5000
    slot.open()
    with pytest.raises(OSError, match="do not fit"):
        slot.seal(14, "token", {"losses": [1.25] * 500_000}, threads)
    assert read_header(tmp_path / "slot") is None
