"""Why ranks ended: which of them was the first cause, and how to say it.

When one rank dies the others lose their connection to it and die too, so that most of what a crash prints is about its
consequences. A rank writes its exception into the attempt's folder; the supervisor adds signals, exit codes and hangs,
and picks the one that the others follow from.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from drumline.heartbeat import ATTEMPT, Beat, Hang, read_pulse

Kind = Literal["hang", "signal", "exception", "exit", "lost peer"]

_SYMPTOMS = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|DistNetworkError|DistStoreError|failed to recv"
    r"|recvValue failed|socket timeout|remote process exited|ncclRemoteError|gloo.*timed out|no route to host",
    re.IGNORECASE,
)
"""What a rank says whose peer is gone."""


@dataclass(frozen=True)
class End:
    """How one rank's process ended."""

    rank: int
    pid: int
    code: int | None
    """None: it still ran, and the supervisor ended it."""
    step: int | None = None
    found: dict[str, Any] | None = None
    """What the rank itself wrote about it."""

    @property
    def is_symptom(self) -> bool:
        return self.found is not None and bool(_SYMPTOMS.search(self.found["exception"]))


@dataclass(frozen=True)
class Cause:
    """Why an attempt ended."""

    host: str
    rank: int
    pid: int
    step: int | None
    kind: Kind
    what: str
    trace: str = ""
    """The traceback of an exception, or the stacks of all ranks in a hang."""
    others: tuple[str, ...] = ()
    """A line for each other rank."""

    @property
    def line(self) -> str:
        happened = {"signal": "was ended by", "hang": "was", "exception": "failed with", "exit": "ended with exit code"}
        at = "" if self.step is None else f" at step {self.step:,}"
        who = f"rank {self.rank} on {self.host} (process {self.pid})"
        return f"{who} {happened.get(self.kind, 'lost the other ranks:')} {' '.join(self.what.split())}{at}"

    @property
    def details(self) -> list[str]:
        """All that is known beyond the line."""
        return [*self.trace.rstrip().splitlines(), *self.others]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def record_cause(error: BaseException) -> None:
    """Leave this rank's exception where the supervisor looks for it; on stderr where nobody supervises."""
    folder, rank = os.environ.get(ATTEMPT), int(os.environ.get("RANK", "0"))
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next))
    if folder is None:
        sys.stderr.write(trace)
        return
    beat = read_pulse(Path(folder), rank)
    found = {
        "host": socket.gethostname(),
        "rank": rank,
        "step": _step(beat),
        "exception": "".join(traceback.format_exception_only(error)).strip(),
        "traceback": trace,
        "time": time.time(),
    }
    aside = Path(folder) / f"cause-{rank}.aside"
    aside.write_text(json.dumps(found), encoding="utf-8")
    aside.replace(Path(folder) / f"cause-{rank}.json")


def read_end(folder: Path, rank: int, *, pid: int, code: int | None) -> End:
    """A rank's end, with what it left in the attempt's folder."""
    beat = read_pulse(folder, rank)
    try:
        found = json.loads((folder / f"cause-{rank}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    return End(rank, pid, code, _step(beat), found)


def first_cause(ends: Sequence[End]) -> Cause:
    """The end that the others follow from: a signal, then an exception of its own, then whoever lost a peer first."""
    failed = [end for end in ends if end.code not in (0, None)] or list(ends)
    first = min(failed, key=lambda end: (end.is_symptom, (end.code or 0) >= 0, end.found["time"] if end.found else 0))
    return _cause(first, others=tuple(_brief(end) for end in ends if end is not first))


def hang_cause(hang: Hang, ends: Sequence[End], *, stopped: bool, stacks: dict[int, str]) -> Cause:
    """The rank that held up the others, with every stack that could be had."""
    how = "stopped (SIGSTOP)" if stopped else "frozen" if hang.frozen else "without progress"
    end = next(end for end in ends if end.rank == hang.rank)
    return Cause(
        host=socket.gethostname(),
        rank=hang.rank,
        pid=end.pid,
        step=hang.step,
        kind="hang",
        what=f"{how} for {hang.idle_s:.0f} s in {hang.phase}",
        trace="\n".join(f"rank {rank}:\n{_trimmed(stack)}" for rank, stack in stacks.items() if stack),
        others=tuple(_brief(other) for other in ends if other is not end),
    )


def is_to_tell() -> bool:
    """Whether this rank tells a mistake. Before the ranks have met, those of one host make the same ones."""
    together = "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized()
    return together or os.environ.get("LOCAL_RANK", "0") == "0"


def _step(beat: Beat | None) -> int | None:
    return None if beat is None or beat.phase == "starting" else beat.step


def _trimmed(stacks: str) -> str:
    """The threads that do a rank's work, from where they are up to where the rank was called."""
    threads = [thread.split("  File", 1) for thread in stacks.strip().split("\n\n") if "_keep_ticking" not in thread]
    return "\n".join(
        "  File".join(thread).partition('/drumline/forked.py"')[0].rpartition("\n")[0] for thread in threads
    )


def _cause(end: End, others: tuple[str, ...]) -> Cause:
    kind, what = _what(end)
    found = end.found or {}
    return Cause(
        host=found.get("host", socket.gethostname()),
        rank=end.rank,
        pid=end.pid,
        step=end.step,
        kind=kind,
        what=what,
        trace=found.get("traceback", ""),
        others=others,
    )


def _what(end: End) -> tuple[Kind, str]:
    if end.code is not None and end.code < 0:
        return "signal", signal.Signals(-end.code).name
    if end.found is not None:
        return ("lost peer" if end.is_symptom else "exception"), end.found["exception"]
    return "exit", str(end.code)


def _brief(end: End) -> str:
    at = "" if end.step is None else f" at step {end.step:,}"
    if end.code is None:
        return f"rank {end.rank} (process {end.pid}) still ran{at}"
    if end.code == 0:
        return f"rank {end.rank} (process {end.pid}) had finished{at}"
    kind, what = _what(end)
    shown = {"lost peer": "lost its connection", "exit": f"ended with exit code {what}"}.get(kind, what)
    return f"rank {end.rank} (process {end.pid}) {shown}{at}"
