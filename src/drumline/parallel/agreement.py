"""Before the first step, all ranks compare versions, settings and data; a rank that differs is reported."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from drumline.config import TrainConfig, names_with
from drumline.errors import DrumlineError
from drumline.parallel.heartbeat import waiting_for

if TYPE_CHECKING:  # launchers use this module without torch
    from drumline.parallel.world import World

Key = TypeVar("Key")
Value = TypeVar("Value", bound=Hashable)


class DisagreementError(DrumlineError):
    """Ranks that would not train the same run."""


def odd_ones(values: Mapping[Key, Value]) -> tuple[Value, list[Key]]:
    """The most common value, and those that have another one; on a tie, the first one counts as common."""
    usual = Counter(values.values()).most_common(1)[0][0]
    return usual, [key for key, value in values.items() if value != usual]


def settings(config: TrainConfig) -> dict[str, Any]:
    """Every setting that must be the same on all ranks. Paths may differ; file contents are compared by hash."""
    local = names_with("per_host")
    return {name: value for part in asdict(config).values() for name, value in part.items() if name not in local}


def compare(world: World, facts: dict[str, Any]) -> None:
    """Raise on all ranks if any of these facts differ between ranks."""
    with waiting_for("the comparison of versions, settings and data"):
        everyone = world.gather({"host": socket.gethostname(), **{name: str(value) for name, value in facts.items()}})
    differing = [name for name in facts if len({each[name] for each in everyone}) > 1]
    if not differing:
        return
    rows, odd_hosts = [], set()
    for name in differing:
        usual, odd = odd_ones({rank: each[name] for rank, each in enumerate(everyone)})
        for rank in odd:
            host = everyone[rank]["host"]
            rows.append(f"rank {rank} on {host}: {name} {everyone[rank][name]} (others: {usual})")
            odd_hosts.add(host)
    raise DisagreementError(
        f"the ranks would not train the same run: they differ in {', '.join(differing)}",
        fix=f"make {', '.join(sorted(odd_hosts))} like the others: same versions, flags and data on every host",
        details=rows,
        reported=not world.is_rank0,
    )
