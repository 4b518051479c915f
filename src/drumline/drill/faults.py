"""The faults of a drill: how each is let loose on a run, and what must be seen for it to count as survived."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from drumline.checkpoint import Snapshots, checkpoint_paths
from drumline.drill.run import DrilledRun, Line
from drumline.errors import EXIT_STOPPED
from drumline.files import RunFolder

Fault = Literal["kill", "crash", "stop", "term", "disk", "corrupt", "nan", "host"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
_GOING_ON = r"going on from .* \(step ([\d,]+)\)"


@dataclass
class Outcome:
    """What one fault did."""

    fault: Fault
    at_step: int
    noticed_s: float | None
    """From the fault to the message about it."""
    again_s: float | None
    """From the fault to the next step that was trained; 0 if training never paused."""
    lost_steps: int | None
    """Steps that had to be computed again."""
    named: bool
    """Whether the message names the right cause."""
    note: str = ""

    @property
    def held(self) -> bool:
        return self.named and self.noticed_s is not None and self.again_s is not None and self.lost_steps is not None


def inject(fault: Fault, run: DrilledRun, draw: random.Random) -> Outcome:
    """Break the run, all of whose ranks are training, and watch it mend itself."""
    return _FAULTS[fault](run, draw)


def _kill(run: DrilledRun, draw: random.Random) -> Outcome:
    rank, pid = _victim(run, draw)
    return _restarted(run, "kill", rf"rank {rank} .*SIGKILL", lambda: os.kill(pid, signal.SIGKILL), f"rank {rank}")


def _crash(run: DrilledRun, draw: random.Random) -> Outcome:
    """What a broken library does to a process."""
    rank, pid = _victim(run, draw)
    return _restarted(run, "crash", rf"rank {rank} .*SIGABRT", lambda: os.kill(pid, signal.SIGABRT), f"rank {rank}")


def _stop(run: DrilledRun, draw: random.Random) -> Outcome:
    rank, pid = _victim(run, draw)
    freeze = lambda: os.kill(pid, signal.SIGSTOP)  # noqa: E731
    return _restarted(run, "stop", rf"rank {rank} .*(frozen|stopped)", freeze, f"rank {rank}")


def _corrupt(run: DrilledRun, draw: random.Random) -> Outcome:
    """A bit flips in the newest checkpoint, on disk and in memory, and a rank dies: an older one must be used."""
    rank, pid = _victim(run, draw)

    def harm() -> None:
        memory = Snapshots.of(RunFolder(run.run_dir)).folder
        for folder in (RunFolder(run.run_dir).checkpoints, memory):
            for path in checkpoint_paths(folder)[-1:]:
                _flip_a_bit(path, draw)
        os.kill(pid, signal.SIGKILL)

    _wait_for_two_checkpoints(run)
    return _restarted(run, "corrupt", r"is damaged: .* set aside", harm, f"and rank {rank} killed")


def _term(run: DrilledRun, draw: random.Random) -> Outcome:
    """What a scheduler does: ask to stop, and start the same command again later."""
    before, began = run.step(), time.monotonic()
    codes = run.signal_launchers(draw.choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)))
    noticed = time.monotonic() - began
    stopped = run.said(r"stopped at step ([\d,]+), everything is saved", since=began)
    run.start()
    going = run.wait_for(_GOING_ON, since=began)
    again = run.wait_for_steps(1, ranks=sum(run.shares))
    lost = _number(stopped, 1) - _number(going, 1) if stopped and going else None
    right = all(code == EXIT_STOPPED for code in codes) and stopped is not None
    return Outcome("term", before, noticed, again and again - began, lost, right, f"exit codes {codes}")


def _disk(run: DrilledRun, draw: random.Random) -> Outcome:
    """No file of any rank can grow for a while, as on a full disk: training goes on, and saves again afterwards."""
    before, began = run.step(), time.monotonic()
    pids = [beat.pid for beat in run.beats().values()]
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    failed = run.wait_for(r"could not be saved to .* needed", since=began)
    step = run.step()
    went_on = run.wait_for_steps(2) is not None and run.step() > step
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    mended = _wait_for_a_save(run, after_step=step)
    note = "saved again" if mended else "not saved again"
    noticed = failed.said_s - began if failed else None
    return Outcome("disk", before, noticed, 0.0 if went_on else None, 0, failed is not None and mended, note)


def _nan(run: DrilledRun, draw: random.Random) -> Outcome:
    """One rank computes nonsense once."""
    rank, _ = _victim(run, draw)
    before, began = run.step(), time.monotonic()
    (run.folder / f"nan-{rank}").touch()
    named = run.wait_for(r"not finite", since=began)
    mended = run.wait_for(r"finite when computed again", since=began)
    right = named is not None and f"rank {rank} " in named.text and mended is not None
    noticed = named.said_s - began if named else None
    return Outcome("nan", before, noticed, mended.said_s - began if mended else None, 0, right, f"rank {rank}")


def _host(run: DrilledRun, draw: random.Random) -> Outcome:
    """A host dies with all its ranks; the other goes on alone; it comes back, and both go on."""
    host = draw.randrange(len(run.shares))
    before, began, attempts = run.step(), time.monotonic(), list(run.attempts().values())
    launcher = run.launchers[host]
    assert launcher is not None
    launcher.kill()
    launcher.wait()
    going = run.wait_for(_GOING_ON, since=began)
    alone = run.wait_for_steps(1, ranks=run.shares[1 - host], but=attempts)
    attempts = list(run.attempts().values())
    back = time.monotonic()
    run.start([host])
    both = run.wait_for_steps(1, ranks=sum(run.shares), but=attempts)
    again = run.wait_for(_GOING_ON, since=back)
    lost = max(0, before - _number(going, 1)) if going and again else None
    note = f"host {host}; together again {both - back:.1f} s after it was started" if both else f"host {host} not back"
    noticed = going.said_s - began if going else None
    return Outcome("host", before, noticed, alone and alone - began, lost, alone is not None and both is not None, note)


def _restarted(run: DrilledRun, fault: Fault, pattern: str, harm: Callable[[], None], note: str) -> Outcome:
    """Do harm that ends in a restart of the ranks, which a message that matches `pattern` must explain."""
    before, began, attempts = run.step(), time.monotonic(), list(run.attempts().values())
    harm()
    named = run.wait_for(pattern, since=began)
    again = run.wait_for_steps(1, ranks=sum(run.shares), but=attempts)
    going = run.wait_for(_GOING_ON, since=began, within_s=5.0)  # it was said before; it may not have been read yet
    lost = max(0, before - _number(going, 1)) if going else None
    noticed = named.said_s - began if named else None
    return Outcome(fault, before, noticed, again and again - began, lost, named is not None, note)


def _victim(run: DrilledRun, draw: random.Random) -> tuple[int, int]:
    beats = run.beats()
    rank = draw.choice(sorted(beats))
    return rank, beats[rank].pid


def _number(line: Line, group: int) -> int:
    found = re.search(r"\(step ([\d,]+)\)|at step ([\d,]+)", line.text)
    assert found is not None
    return int((found.group(1) or found.group(2)).replace(",", ""))


def _flip_a_bit(checkpoint: Path, draw: random.Random) -> None:
    file = draw.choice(sorted(checkpoint.iterdir()))
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
