"""Collectives between hosts: all-reduce by size over all of them, and by pair; and the host that slows others down.

Each host takes part with one process. Process groups use the store that the hosts already share, and live until the
process exits: freeing one can deadlock with gloo's threads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from drumline.doctor.finding import Finding
from drumline.doctor.hosts.judge import slow_host

CollectiveBackend = Literal["gloo", "nccl"]

SIZES_BYTES = (4 << 10, 256 << 10, 8 << 20)
SIZE_COLUMNS = ("all-reduce of", "ms", "per host")
PAIR_COLUMNS = ("pair", "latency ms", "bandwidth")
_PAIR_BYTES = (4 << 10, 1 << 20)
_MOST_ROUNDS = 8
_TIMES, _BUDGET_S, _LONGEST_S, _TIMEOUT = 5, 0.5, 4.0, timedelta(seconds=20)
_SLOWER_S = 2e-3
_KEPT: list[Any] = []


@dataclass(frozen=True)
class SizeRow:
    """Over all hosts."""

    bytes: int
    seconds: float


@dataclass(frozen=True)
class PairRow:
    """Between two hosts, by number."""

    hosts: tuple[int, int]
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Timings:
    """Measurements with one backend."""

    backend: CollectiveBackend
    sizes: tuple[SizeRow, ...] = ()
    pairs: tuple[PairRow, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Timings:
        pairs = (PairRow(tuple(row["hosts"]), row["latency_s"], row["bytes_per_s"]) for row in fields["pairs"])
        return cls(fields["backend"], tuple(SizeRow(**row) for row in fields["sizes"]), tuple(pairs))

    def size_rows(self) -> list[tuple[str, ...]]:
        """For SIZE_COLUMNS."""
        return [(_bytes(row.bytes), f"{row.seconds * 1e3:.2f}", _rate(row.bytes / row.seconds)) for row in self.sizes]

    def pair_rows(self, names: Mapping[int, str]) -> list[tuple[str, ...]]:
        """For PAIR_COLUMNS, slowest first."""
        slowest = sorted(self.pairs, key=lambda row: -row.latency_s)
        return [
            (" - ".join(names[number] for number in row.hosts), f"{row.latency_s * 1e3:.2f}", _rate(row.bytes_per_s))
            for row in slowest
        ]


def measure(store: Store, numbers: Sequence[int], own: int, backend: CollectiveBackend) -> Timings:
    """Time all-reduce over all hosts and for each pair; raises torch's RuntimeError if a collective fails.

    numbers: of all hosts that take part; own: of this one
    """
    if backend == "nccl":
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a timeout raises here instead of killing the process
        torch.cuda.set_device(0)
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    store = PrefixStore(f"collectives/{backend}", store)
    whole = _Group(PrefixStore("all", store), numbers.index(own), len(numbers), backend, device)
    sizes: list[SizeRow] = []
    for size_bytes in SIZES_BYTES:
        if len(sizes) > 1 and (sizes[-1].seconds - sizes[-2].seconds) * size_bytes / sizes[-1].bytes > _LONGEST_S:
            break  # on every host: all have the same measurements
        sizes.append(SizeRow(size_bytes, whole.fastest_s(size_bytes)))
    pairs = []
    for round_of in rounds(len(numbers))[:_MOST_ROUNDS]:
        for places in round_of:
            pair = numbers[places[0]], numbers[places[1]]
            if own in pair:
                name = f"{pair[0]}-{pair[1]}"
                group = _Group(PrefixStore(name, store), pair.index(own), 2, backend, device)
                latency_s, large_s = (group.fastest_s(size_bytes) for size_bytes in _PAIR_BYTES)
                pairs.append(PairRow(pair, latency_s, _PAIR_BYTES[-1] / large_s))
    return Timings(backend, tuple(sizes), tuple(pairs))


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pairs in rounds: every host is paired with every other once, and with one at a time."""
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    table = []
    for _ in range(len(places) - 1):
        ends = zip(places[: len(places) // 2], reversed(places), strict=False)
        table.append([(min(a, b), max(a, b)) for a, b in ends if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return table


def merged(every: Sequence[Timings]) -> Timings:
    """All measurements with one backend."""
    sizes = max((timings.sizes for timings in every), key=len)
    pairs = {row.hosts: row for timings in every for row in timings.pairs}
    return Timings(every[0].backend, sizes, tuple(pairs[key] for key in sorted(pairs)))


def judge_timings(timings: Timings, names: Mapping[int, str], interfaces: Mapping[int, str]) -> list[Finding]:
    """The measurements in one line, and the host that is slow with all others."""
    sizes = ", ".join(f"{_bytes(row.bytes)} {row.seconds * 1e3:.1f} ms" for row in timings.sizes)
    largest = timings.sizes[-1]
    speed = _rate(largest.bytes / largest.seconds)
    findings = [Finding(timings.backend, "ok", f"all-reduce over {len(names)} hosts: {sizes} ({speed} per host)")]
    if timings.pairs:
        slowest = max(timings.pairs, key=lambda row: row.latency_s)
        pair = " and ".join(names[number] for number in slowest.hosts)
        figures = f"{slowest.latency_s * 1e3:.1f} ms, {_rate(slowest.bytes_per_s)}"
        findings.append(Finding(timings.backend, "ok", f"the slowest pair is {pair}: {figures}"))
    latencies = {row.hosts: row.latency_s for row in timings.pairs}
    takes = {row.hosts: _PAIR_BYTES[-1] / row.bytes_per_s for row in timings.pairs}
    for values, operation in (
        (latencies, "a small all-reduce"),
        (takes, f"an all-reduce of {_bytes(_PAIR_BYTES[-1])}"),
    ):
        if slow := slow_host(values, at_least=_SLOWER_S):
            number, own_s, usual_s = slow
            what = (
                f"{names[number]} is slow with every other host: {operation} takes at least {own_s * 1e3:.1f} ms "
                f"with it, {usual_s * 1e3:.1f} ms between the others"
            )
            fix = f"tc -s qdisc show dev {interfaces.get(number, 'eth0')}"
            findings.append(Finding(timings.backend, "warning", what, fix, names[number]))
            break
    return findings


class _Group:
    """A process group of some hosts."""

    def __init__(self, store: Store, place: int, size: int, backend: CollectiveBackend, device: torch.device) -> None:
        kind = dist.ProcessGroupNCCL if backend == "nccl" else dist.ProcessGroupGloo
        self._group: Any = kind(store, place, size, _TIMEOUT)  # type: ignore[arg-type]
        _KEPT.append(self._group)
        self._device = device

    def fastest_s(self, size_bytes: int) -> float:
        """The fastest of a few all-reduces, as the slowest host saw it; not counting the first, which connects."""
        tensor = torch.zeros(size_bytes // 4, device=self._device)
        self._reduce(tensor)
        best_s = self._agreed(self._timed(tensor))
        for _ in range(min(_TIMES, int(_BUDGET_S / max(best_s, 1e-6)))):
            best_s = min(best_s, self._timed(tensor))
        return self._agreed(best_s)

    def _timed(self, tensor: Tensor) -> float:
        since = time.perf_counter()
        self._reduce(tensor)
        return time.perf_counter() - since

    def _reduce(self, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        self._group.allreduce([tensor], options).wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _agreed(self, seconds: float) -> float:
        tensor = torch.tensor([seconds], device=self._device)
        self._reduce(tensor, dist.ReduceOp.MAX)
        return float(tensor)


def _bytes(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.1f} MB/s"
