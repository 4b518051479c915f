"""The faults of a drill: how each is injected into a run, and what must be observed for it to count as survived."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from drumline.checkpoint import checkpoint_paths, snapshots_of
from drumline.drill.run import DrilledRun
from drumline.errors import EXIT_STOPPED
from drumline.files import RunFolder

Fault = Literal["kill", "crash", "stop", "term", "disk", "corrupt", "nan", "host"]
FAULTS: tuple[Fault, ...] = get_args(Fault)


@dataclass
class Outcome:
    """The outcome of one fault."""

    fault: Fault
    at_step: int
    noticed_s: float | None
    """Seconds from the fault to the event that reports it."""
    again_s: float | None
    """Seconds from the fault to the next trained step; 0 if training never paused."""
    lost_steps: int | None
    """Steps that had to be recomputed."""
    named: bool
    """Whether that event names the correct cause."""
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.named and self.noticed_s is not None and self.again_s is not None and self.lost_steps is not None


def inject(fault: Fault, run: DrilledRun, draw: random.Random) -> Outcome:
    """Inject a fault while all ranks are training, and watch the run recover."""
    return _FAULTS[fault](run, draw)


def _kill(run: DrilledRun, draw: random.Random) -> Outcome:
    return _signalled(run, "kill", draw, signal.SIGKILL, cause_kind="signal", cause_what="SIGKILL")


def _crash(run: DrilledRun, draw: random.Random) -> Outcome:
    """A process that aborts in a library."""
    return _signalled(run, "crash", draw, signal.SIGABRT, cause_kind="signal", cause_what="SIGABRT")


def _stop(run: DrilledRun, draw: random.Random) -> Outcome:
    return _signalled(run, "stop", draw, signal.SIGSTOP, cause_kind="hang", cause_frozen=True)


def _signalled(run: DrilledRun, fault: Fault, draw: random.Random, signum: signal.Signals, **cause: Any) -> Outcome:
    rank, pid = _victim(run, draw)
    named = {"name": "restart", "cause_rank": rank, **cause}
    return _restarted(run, fault, named, lambda: os.kill(pid, signum), f"rank {rank}")


def _corrupt(run: DrilledRun, draw: random.Random) -> Outcome:
    """A bit flips in the newest checkpoint, on disk and in memory, and a rank dies: an older one must be used."""
    rank, pid = _victim(run, draw)

    def harm() -> None:
        folder = RunFolder(run.run_dir)
        for path in checkpoint_paths(folder.checkpoints)[-1:]:
            _flip_a_bit(draw.choice(sorted(path.iterdir())), draw)
        for snapshot in snapshots_of(folder).complete()[:1]:
            _flip_a_bit(draw.choice(snapshot.slots), draw)
        os.kill(pid, signal.SIGKILL)

    _wait_for_two_checkpoints(run)
    return _restarted(run, "corrupt", {"name": "checkpoint damaged"}, harm, f"and rank {rank} killed")


def _term(run: DrilledRun, draw: random.Random) -> Outcome:
    """A scheduler's preemption: ask to stop, and run the same command again later."""
    before, began = run.step(), time.monotonic()
    codes = run.signal_launchers(draw.choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)))
    noticed = time.monotonic() - began
    status = RunFolder(run.run_dir).read_status()
    back = time.monotonic()
    run.start()
    resumed = run.wait_for("resumed", since=back)
    again = run.wait_for_steps(1, ranks=sum(run.shares))
    lost = status["step"] - resumed.facts["step"] if resumed else None
    right = all(code == EXIT_STOPPED for code in codes) and status["state"] == "stopped"
    return Outcome("term", before, noticed, again and again - began, lost, right, f"exit codes {codes}")


def _disk(run: DrilledRun, draw: random.Random) -> Outcome:
    """Writes fail for a while, as on a full disk: training continues, and saves again afterwards."""
    before, began = run.step(), time.monotonic()
    pids = [beat.pid for beat in run.beats().values()]
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    failed = run.wait_for("save failed", since=began)
    step = run.step()
    went_on = run.wait_for_steps(2) is not None and run.step() > step
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    mended = _wait_for_a_save(run, after_step=step)
    note = "saved again" if mended else "not saved again"
    noticed = failed.heard_s - began if failed else None
    return Outcome("disk", before, noticed, 0.0 if went_on else None, 0, failed is not None and mended, note)


def _nan(run: DrilledRun, draw: random.Random) -> Outcome:
    """One rank produces NaN once."""
    rank, _ = _victim(run, draw)
    before, began = run.step(), time.monotonic()
    (run.folder / f"nan-{rank}").touch()
    named = run.wait_for("not finite", since=began)
    mended = run.wait_for("computed again", since=began)
    right = named is not None and named.facts["ranks"] == [rank] and mended is not None
    noticed = named.heard_s - began if named else None
    return Outcome("nan", before, noticed, mended.heard_s - began if mended else None, 0, right, f"rank {rank}")


def _host(run: DrilledRun, draw: random.Random) -> Outcome:
    """A host dies with all its ranks; the other one continues alone; it comes back, and both continue."""
    host = draw.randrange(len(run.shares))
    before, began, attempts = run.step(), time.monotonic(), list(run.attempts().values())
    launcher = run.launchers[host]
    assert launcher is not None
    launcher.kill()
    launcher.wait()
    resumed = run.wait_for("resumed", since=began)
    alone = run.wait_for_steps(1, ranks=run.shares[1 - host], but=attempts)
    attempts = list(run.attempts().values())
    back = time.monotonic()
    run.start([host])
    both = run.wait_for_steps(1, ranks=sum(run.shares), but=attempts)
    again = run.wait_for("resumed", since=back)
    lost = max(0, before - resumed.facts["step"]) if resumed and again else None
    note = f"host {host}; rejoined {both - back:.1f} s after it was started" if both else f"host {host} not back"
    noticed = resumed.heard_s - began if resumed else None
    return Outcome("host", before, noticed, alone and alone - began, lost, alone is not None and both is not None, note)


def _restarted(run: DrilledRun, fault: Fault, named: dict[str, Any], harm: Callable[[], None], note: str) -> Outcome:
    """Inject a fault that causes a restart, which an event with the name and values `named` must explain."""
    before, began, attempts = run.step(), time.monotonic(), list(run.attempts().values())
    harm()
    event = run.wait_for(since=began, **named)
    again = run.wait_for_steps(1, ranks=sum(run.shares), but=attempts)
    resumed = run.wait_for("resumed", since=began, within_s=5.0)  # it has happened; the event may not be read yet
    lost = max(0, before - resumed.facts["step"]) if resumed else None
    noticed = event.heard_s - began if event else None
    return Outcome(fault, before, noticed, again and again - began, lost, event is not None, note)


def _victim(run: DrilledRun, draw: random.Random) -> tuple[int, int]:
    beats = run.beats()
    rank = draw.choice(sorted(beats))
    return rank, beats[rank].pid


def _flip_a_bit(file: Path, draw: random.Random) -> None:
    with file.open("r+b") as content:
        place = draw.randrange(file.stat().st_size)
        content.seek(place)
        byte = content.read(1)[0]
        content.seek(place)
        content.write(bytes([byte ^ (1 << draw.randrange(8))]))


def _wait_for_two_checkpoints(run: DrilledRun) -> None:
    while len(checkpoint_paths(RunFolder(run.run_dir).checkpoints)) < 2 and not run.is_over():
        run.sleep(until=time.monotonic() + 0.1)


def _wait_for_a_save(run: DrilledRun, *, after_step: int) -> bool:
    limit = time.monotonic() + 60.0
    while time.monotonic() < limit and not run.is_over():
        paths = checkpoint_paths(RunFolder(run.run_dir).checkpoints)
        if paths and int(paths[-1].name.rsplit("-", 1)[1]) > after_step:
            return True
        time.sleep(0.05)
    return False


_FAULTS: dict[Fault, Callable[[DrilledRun, random.Random], Outcome]] = {
    "kill": _kill,
    "crash": _crash,
    "stop": _stop,
    "term": _term,
    "disk": _disk,
    "corrupt": _corrupt,
    "nan": _nan,
    "host": _host,
}
