"""One attempt to run all ranks, and what a rank and its supervisor exchange in the attempt's folder.

A supervisor starts the ranks of its host as often as needed. Each attempt has its own folder in shared memory,
/dev/shm/drumline-PID-X/attempt-N (elastic/scratch.py), which ranks find through the variable DRUMLINE_ATTEMPT:

    file          written by                  read by the supervisor
    pulse-RANK    the rank, continuously      phase, step, what it waits for, last progress, a tick: which rank hangs
    stack-RANK    the rank, on SIGUSR2        the stacks of all threads, if a rank hangs
    cause-RANK    .json, a rank that fails    its exception: the reason why the others lost a peer; its room is reserved
    to_end        ranks that train            a rank that exits with 0 before phase `ending` counts as failed
    run_dir       rank 0                      where status.json is, to record the cause of a restart

      supervisor                                   rank
        |-- fork, DRUMLINE_ATTEMPT, RANK, ... ------>|  touches to_end, writes run_dir, ticks
        |<------------- pulse-RANK ------------------|
        |-- SIGTERM: save and stop ----------------->|  exit code 75, everything saved
        |-- SIGUSR2: dump stacks ------------------->|  stack-RANK
        |-- SIGKILL, once one has failed or hangs -->|
        |<------------- exit code, cause-RANK.json --|

    exit code of a rank        what the supervisor does
    0 in phase `ending`        done, once all ranks are
    75 (stopped)               exits with 75; restarts if a change of hosts was the reason
    1, 2, 3, 130               exits with the same code: a restart would not help
    anything else, a signal    reports the first cause, writes status.json (`restarting`), starts attempt-N+1

    Restarted ranks (N > 1) resume from the newest snapshot or checkpoint. If the user gave --resume_from, the file
    `.resumed` in the run folder records that it was followed: it applies to the first attempt only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from drumline.parallel.heartbeat import ATTEMPT


@dataclass(frozen=True)
class Attempt:
    """The file names in an attempt's folder, for both sides."""

    folder: Path

    @classmethod
    def current(cls) -> Attempt | None:
        """The attempt that this process is a rank of; None without a supervisor."""
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
        """Ranks that have a heartbeat."""
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
        """Write a file of this folder atomically."""
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)

    def fill(self, path: Path, text: str) -> None:
        """Write a file into the room that is reserved for it; whoever reads it waits until the writer has exited."""
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
            file.truncate()
