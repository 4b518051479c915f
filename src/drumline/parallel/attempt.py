"""One attempt to run all ranks, and what a rank and its supervisor tell each other in the attempt's folder.

A supervisor starts the ranks of its host as often as needed. Each time is an attempt with a folder of its own in
memory, /dev/shm/drumline-PID-X/attempt-N, which the ranks find in the variable DRUMLINE_ATTEMPT:

    file          written by                  read by the supervisor
    pulse-RANK    the rank, all the time      phase, step, what it waits for, last progress, a tick: who hangs
    stack-RANK    the rank, on SIGUSR2        the stacks of all threads, once a rank hangs
    cause-RANK    .json, a rank that fails    its exception: whose fault it is that the others lost a peer
    to_end        ranks that train            one that exits with 0 before phase `ending` has failed all the same
    run_dir       rank 0                      where status.json is, to write there why ranks are started again

      supervisor                                   rank
        |-- fork, DRUMLINE_ATTEMPT, RANK, ... ------>|  touches to_end, writes run_dir, ticks
        |<------------- pulse-RANK ------------------|
        |-- SIGTERM: save and stop ----------------->|  exit code 75, all saved
        |-- SIGUSR2: show your stacks -------------->|  stack-RANK
        |-- SIGKILL, once one has failed or hangs -->|
        |<------------- exit code, cause-RANK.json --|

    exit code of a rank        what the supervisor does
    0 in phase `ending`        done, once all ranks are
    75 (stopped)               ends with 75; starts again where it was a change of hosts that asked for it
    1, 2, 3, 130              ends with the same: starting again would not help
    anything else, a signal    names the first cause, writes status.json (`restarting`), starts attempt-N+1

Ranks that are started again (N > 1) resume from the newest snapshot or checkpoint. Where the user gave --resume_from,
the run folder's `.resumed` says that it has been followed: it holds for the first attempt only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from drumline.parallel.heartbeat import ATTEMPT


@dataclass(frozen=True)
class Attempt:
    """The names in an attempt's folder, for both sides."""

    folder: Path

    @classmethod
    def current(cls) -> Attempt | None:
        """The attempt that this process is a rank of; None where nobody supervises it."""
        folder = os.environ.get(ATTEMPT)
        return None if folder is None else cls(Path(folder))

    @classmethod
    def numbered(cls, scratch: Path, number: int) -> Attempt:
        """Counted from 1."""
        return cls(scratch / f"attempt-{number}")

    @property
    def number(self) -> int:
        return int(self.folder.name.rpartition("-")[2])

    def ranks(self) -> list[int]:
        """Those that have said something."""
        return sorted(int(path.name.partition("-")[2]) for path in self.folder.glob("pulse-*"))

    def pulse(self, rank: int) -> Path:
        return self.folder / f"pulse-{rank}"

    def stacks(self, rank: int) -> Path:
        return self.folder / f"stack-{rank}"

    def cause(self, rank: int) -> Path:
        return self.folder / f"cause-{rank}.json"

    @property
    def to_end(self) -> Path:
        return self.folder / "to_end"

    @property
    def run_dir(self) -> Path:
        return self.folder / "run_dir"

    def write(self, path: Path, text: str) -> None:
        """All of a file of this folder at once."""
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
