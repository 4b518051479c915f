"""Why ranks died: which failure came first, and how to report it.

When one rank dies, the others lose their connection to it and die too, so most of a crash's output is about its
consequences. A rank writes its exception to the attempt's folder; the supervisor adds signals, exit codes and hangs,
and picks the failure that explains the others. In a hang, ranks have recorded which of them only wait for others, and
what for; their stacks are shown.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from drumline.elastic.watch import Beat, Hang, read_pulse
from drumline.parallel import Attempt, SupervisedPulse

Kind = Literal["hang", "signal", "exception", "exit", "lost peer", "server"]

_SYMPTOMS = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|DistNetworkError|DistStoreError|failed to recv"
    r"|recvValue failed|socket timeout|remote process exited|ncclRemoteError|gloo.*timed out|no route to host",
    re.IGNORECASE,
)
"""Errors of a rank whose peer is gone."""

_FRAME = re.compile(r'File "([^"]+)", line (\d+),? in (\S+)')
_TORCH_DISTRIBUTED = ("torch", "distributed", "distributed_c10d.py")
_TORCH_DDP = ("torch", "nn", "parallel", "distributed.py")
_RANK_PROCESS = f'"{Path(__file__).with_name("rank_process.py")}"'
"""Where a rank's own stack starts."""
_PULSE = Path(inspect.getfile(SupervisedPulse))


@dataclass(frozen=True)
class End:
    """How one rank's process exited."""

    rank: int
    pid: int
    code: int | None
    """None: it was still running, and the supervisor killed it."""
    step: int | None = None
    said: dict[str, Any] | None = None
    """What the rank itself recorded about it."""
    phase: str = ""
    waits_for: str = ""
    """What it was waiting for the other ranks in, if anything."""
    to_end: bool = False
    """Whether it was supposed to reach the end of the run before exiting."""

    @property
    def is_symptom(self) -> bool:
        return self.said is not None and bool(_SYMPTOMS.search(self.said["exception"]))

    @property
    def is_early(self) -> bool:
        """Whether it exited with 0 before the run was over."""
        may_exit = ("", "ending") if self.to_end else ("", "starting", "ending")  # "": it has no heartbeat
        return self.code == 0 and self.phase not in may_exit


@dataclass(frozen=True)
class Cause:
    """Why an attempt failed."""

    host: str
    rank: int
    """-1: none, but the process that a host's ranks are forked from"""
    pid: int
    step: int | None
    kind: Kind
    what: str
    trace: str = ""
    """The traceback of an exception, or the stacks of all ranks in a hang."""
    others: tuple[str, ...] = ()
    """One line per other rank."""
    place: str = ""
    """Function, file and line where a rank hangs."""
    frozen: bool = False
    """Whether the process of a hung rank does not run at all: stopped, or stuck in a system call."""

    @property
    def line(self) -> str:
        happened = {"signal": "was killed by", "hang": "was", "exception": "failed with", "exit": "exited with code"}
        at = "" if self.step is None else f" at step {self.step:,}"
        who = "the process that ranks are forked from" if self.kind == "server" else f"rank {self.rank}"
        who = f"{who} on {self.host} (process {self.pid})"
        where = f", in {self.place}" if self.place else ""
        early = " before the end of the run" if (self.kind, self.what) == ("exit", "0") else ""
        did = happened.get(self.kind, "" if self.kind == "server" else "lost the other ranks:")
        return " ".join(f"{who} {did} {self.what}".split()) + f"{at}{where}{early}"

    @property
    def details(self) -> list[str]:
        """Everything known beyond the one-line summary."""
        trace = self.trace.rstrip().splitlines()
        return [*self.others, *trace] if self.kind == "hang" else [*trace, *self.others]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def record_cause(error: BaseException) -> None:
    """Write this rank's exception where the supervisor looks for it; to stderr without a supervisor."""
    attempt, rank = Attempt.current(), int(os.environ.get("RANK", "0"))
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next))
    if attempt is None:
        sys.stderr.write(trace)
        return
    said = {
        "host": socket.gethostname(),
        "rank": rank,
        "step": _step(read_pulse(attempt, rank)),
        "exception": "".join(traceback.format_exception_only(error)).strip(),
        "traceback": trace,
        "time": time.time(),
    }
    try:
        attempt.fill(attempt.cause(rank), json.dumps(said))
    except OSError:  # there is no room
        sys.stderr.write(trace)


def read_end(attempt: Attempt, rank: int, *, pid: int, code: int | None) -> End:
    """How a rank exited, with what it left in the attempt's folder."""
    beat = read_pulse(attempt, rank)
    try:
        said = json.loads(attempt.cause(rank).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        said = None
    phase, waits_for = (beat.phase, beat.waits_for) if beat else ("", "")
    return End(rank, pid, code, _step(beat), said, phase, waits_for, to_end=attempt.to_end.exists())


def first_cause(ends: Sequence[End]) -> Cause:
    """The failure that explains the others: a signal, else an exception or an exit before the end of the run, else the
    rank that lost a peer first."""
    failed = [end for end in ends if end.code not in (0, None) or end.is_early] or list(ends)
    first = min(failed, key=lambda end: (end.is_symptom, (end.code or 0) >= 0, end.said["time"] if end.said else 0))
    return _cause(first, others=tuple(_brief(end) for end in ends if end is not first))


def server_cause(pid: int, code: int, ends: Sequence[End]) -> Cause:
    """All ranks here have died with the process that they were forked from. code: negative for a signal"""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    step = max((end.step for end in ends if end.step is not None), default=None)
    return Cause(host=socket.gethostname(), rank=-1, pid=pid, step=step, kind="server", what=how)


def blame(hang: Hang, ends: Sequence[End], stacks: dict[int, str]) -> Hang | None:
    """The hang of the rank that blocks the others: among those furthest behind, one that is not waiting for a peer.

    None: all of them wait, so the culprit is not among them.
    """
    if hang.frozen:
        return hang
    least_far = [end for end in ends if (end.step, end.phase) == (hang.step, hang.phase)]
    busy = [end.rank for end in least_far if not _awaited(end, stacks.get(end.rank, ""))]
    return replace(hang, rank=hang.rank if hang.rank in busy else busy[0]) if busy else None


def hang_cause(
    hang: Hang, ends: Sequence[End], *, stopped: bool, stacks: dict[int, str], all_wait: bool = False
) -> Cause:
    """The rank that blocked the others, with all stacks that could be collected."""
    how = "stopped (SIGSTOP)" if stopped else "frozen" if hang.frozen else "without progress"
    end = next(end for end in ends if end.rank == hang.rank)
    stack = stacks.get(hang.rank, "")
    return Cause(
        host=socket.gethostname(),
        rank=hang.rank,
        pid=end.pid,
        step=hang.step,
        kind="hang",
        what=f"{'waiting, like all ranks here,' if all_wait else how} for {hang.idle_s:.0f} s in {hang.phase}",
        trace="\n".join(f"rank {rank}:\n{_trimmed(stack)}" for rank, stack in stacks.items() if stack),
        others=tuple(_brief(other, stacks.get(other.rank, "")) for other in ends if other is not end),
        place=_awaited(end, stack) if all_wait else _innermost(stack),
        frozen=stopped or hang.frozen,
    )


def cause_of_another_host(shared: dict[str, Any], ends: Sequence[End]) -> Cause:
    """The cause reported by another host, with what the ranks here were waiting for when they lost their peers."""
    host = socket.gethostname()
    lost = [end for end in ends if end.is_symptom]
    stacks = [f"rank {end.rank} on {host}:\n{(end.said or {})['traceback']}" for end in lost]
    return Cause(
        **{
            **shared,
            "others": (*shared["others"], *(f"on {host}: {_brief(end)}" for end in lost)),
            "trace": "\n".join([shared["trace"], *stacks]) if shared["kind"] == "hang" else shared["trace"],
        }
    )


def _step(beat: Beat | None) -> int | None:
    return None if beat is None or beat.phase == "starting" else beat.step


def _trimmed(stacks: str) -> str:
    """The relevant threads of a rank, from the innermost frame to where the rank was called."""
    threads = [thread for thread in stacks.strip().split("\n\n") if not _is_idle(thread)]
    return "\n".join(thread.partition(_RANK_PROCESS)[0].rpartition("\n")[0] for thread in threads)


def _is_idle(thread: str) -> bool:
    """A heartbeat thread, an idle pool thread, or one that is just starting."""
    frames = _frames(thread)
    own = [frame for frame in frames if not _is_library(frame[0].parts)]
    ticks = bool(own) and own[0][0] == _PULSE
    return not frames or ticks or frames[0][0].parts[-3:-1] == ("concurrent", "futures")


def _frames(stack: str) -> list[tuple[Path, int, str]]:
    """(file, line, function), innermost first, of the training thread: from faulthandler, or from a traceback."""
    if "most recent call last" in stack:
        threads = [stack.rpartition("most recent call last")[2]]
    else:
        threads = stack.strip().split("\n\n")
    thread = next((thread for thread in threads if _RANK_PROCESS in thread), threads[-1])
    frames = [(Path(path), int(line), function) for path, line, function in _FRAME.findall(thread)]
    return frames[::-1] if "most recent call last" in stack else frames


def _awaited(end: End, stack: str) -> str:
    """What a rank is waiting for the others in, in its own words; empty if it is not waiting."""
    if end.waits_for:
        return end.waits_for
    # Code outside drumline does not record it: then it is a torch.distributed call that has not returned.
    frames = _frames(stack)
    if not frames or not {_TORCH_DISTRIBUTED, _TORCH_DDP} & {frames[0][0].parts[-3:], frames[0][0].parts[-4:]}:
        return ""
    path, line, _ = next((frame for frame in frames if "torch" not in frame[0].parts), frames[0])
    return f"{frames[0][2]} ({path.name}:{line})"


def _innermost(stack: str) -> str:
    """The innermost frame outside torch and Python."""
    frames = _frames(stack)
    beyond = [frame for frame in frames if not _is_library(frame[0].parts)]
    return "".join(f"{name} ({path.name}:{line})" for path, line, name in (beyond or frames)[:1])


def _is_library(parts: Sequence[str]) -> bool:
    stdlib = any(part.startswith("python3.") for part in parts) and "site-packages" not in parts
    return stdlib or "torch" in parts


def _cause(end: End, others: tuple[str, ...]) -> Cause:
    kind, what = _what(end)
    said = end.said or {}
    return Cause(
        host=said.get("host", socket.gethostname()),
        rank=end.rank,
        pid=end.pid,
        step=end.step,
        kind=kind,
        what=what,
        trace=said.get("traceback", ""),
        others=others,
    )


def _what(end: End) -> tuple[Kind, str]:
    if end.code is not None and end.code < 0:
        return "signal", signal.Signals(-end.code).name
    if end.said is not None:
        return ("lost peer" if end.is_symptom else "exception"), end.said["exception"]
    return "exit", str(end.code)


def _brief(end: End, stack: str = "") -> str:
    at = "" if end.step is None else f" at step {end.step:,}"
    awaited = _awaited(end, stack or (end.said or {}).get("traceback", ""))
    who = f"rank {end.rank} (process {end.pid})"
    if end.code is None:
        place = _innermost(stack)
        return f"{who} waits in {awaited}{at}" if awaited else f"{who} was still running{at}{place and f', in {place}'}"
    if end.code == 0:
        return f"{who} had {'exited early' if end.is_early else 'finished'}{at}"
    kind, what = _what(end)
    shown = {"lost peer": "lost its connection", "exit": f"exited with code {what}"}.get(kind, what)
    return f"{who} {shown}{at}{awaited and f', waiting in {awaited}'}"
