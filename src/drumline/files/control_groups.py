"""What a container's control groups, of either version, allow this process: cores, and memory with what is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60


def read_limits() -> tuple[float, int]:
    """Cores and bytes of memory."""
    cores, memory_bytes = float("inf"), NO_LIMIT
    for folder in _own_groups():
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        quota, period = quota or _read(folder / "cpu.cfs_quota_us"), period or _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, int(quota) / int(period))
        memory_bytes = min(memory_bytes, _memory_limit(folder))
    return cores, memory_bytes


def room_in_container() -> int:
    """Bytes of memory left under the limits; NO_LIMIT if there are none."""
    room = NO_LIMIT
    for folder in _own_groups():
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if used.isdigit() and (limit := _memory_limit(folder)) < NO_LIMIT:
            room = min(room, max(0, limit - max(0, int(used) - _reclaimed(folder))))
    return room


def _own_groups() -> Iterator[Path]:
    """Of this process, each followed by those around it."""
    try:
        groups = [line.split(":", 2)[1:] for line in PROC.read_text().splitlines()]
    except OSError:
        return
    for controllers, name in groups:
        base = ROOT / controllers if controllers else ROOT  # the latter is version 2
        path = base / name.lstrip("/")
        yield from (path, *(above for above in path.parents if above.is_relative_to(base)))


def _memory_limit(folder: Path) -> int:
    limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
    return min(NO_LIMIT, int(limit)) if limit.isdigit() else NO_LIMIT


def _reclaimed(folder: Path) -> int:
    """Pages of files, which give way to other memory. Those of /dev/shm are not among them."""
    sizes = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    # Version 1 counts groups within this one only in its totals.
    return max(
        sum(int(sizes.get(f"{which}{kind}_file", 0)) for kind in ("inactive", "active")) for which in ("", "total_")
    )


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""
