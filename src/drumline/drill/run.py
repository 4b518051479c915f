"""The run that a drill injects faults into: its launchers, their ranks, events and progress.

Events come through a FIFO (`files.EVENTS`), immediately and independent of the disk; printed output is only logged.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.elastic import Beat, newest_attempt, read_pulse
from drumline.files import EVENTS
from drumline.parallel import Attempt

_TIED = "import os, sys, drumline.elastic; drumline.elastic.die_with_parent(); os.execv(sys.argv[1], sys.argv[1:])"
"""Start a command that dies with the drill."""
_POLL_S = 0.01
_PATIENCE_S = 60.0
"""How long the drill waits for something that should happen immediately; longer counts as failed."""


@dataclass(frozen=True)
class Event:
    """An event published by a process of the run."""

    heard_s: float
    facts: Mapping[str, Any]

    def matches(self, name: str, **wanted: Any) -> bool:
        """Whether it has this name and these values; those of a cause are given as cause_NAME."""
        facts = {**self.facts, **{f"cause_{key}": value for key, value in self.facts.get("cause", {}).items()}}
        return facts["event"] == name and all(facts.get(key) == value for key, value in wanted.items())


class DrilledRun:
    """One or two launchers of the same run, each with its ranks; all processes are killed when the block exits."""

    def __init__(
        self, command: Sequence[str], folder: Path, environ: Mapping[str, str], ranks: int, hosts: int
    ) -> None:
        self._command, self._environ = list(command), dict(environ)
        self.folder = folder
        self.shares = [ranks // hosts + (host < ranks % hosts) for host in range(hosts)]
        """Number of ranks by host."""
        self.launchers: list[subprocess.Popen[str] | None] = [None] * hosts
        self.events: list[Event] = []
        self.step_times: list[float] = []
        self.log = folder / "disturbed.log"
        self._log = self.log.open("w", encoding="utf-8")
        self._fifo = folder / "events.fifo"
        self._fifo.unlink(missing_ok=True)
        os.mkfifo(self._fifo)
        self._environ[EVENTS] = str(self._fifo)

    def __enter__(self) -> DrilledRun:
        # Opened for reading and writing, so that there is no end of file when the run's last process exits.
        self._reading = os.open(self._fifo, os.O_RDWR)
        threading.Thread(target=self._follow, args=(self._reading,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for launcher in self.launchers:
            if launcher is not None and launcher.poll() is None:
                launcher.kill()  # its ranks die with it
                launcher.wait()
        os.write(self._reading, b"\n")  # an empty line stops the reader thread
        self._log.close()
        self._fifo.unlink(missing_ok=True)

    @property
    def run_dir(self) -> Path:
        return self.folder / "disturbed"

    def start(self, hosts: Sequence[int] | None = None) -> None:
        """Start the launchers of these hosts, or of all."""
        for host in range(len(self.shares)) if hosts is None else hosts:
            words = ["--nproc", str(self.shares[host])]
            words += ["--nnodes", f"1:{len(self.shares)}"] if len(self.shares) > 1 else []
            launcher = subprocess.Popen(
                [sys.executable, "-c", _TIED, *self._command, *words],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self.launchers[host] = launcher
            threading.Thread(target=self._keep_log, args=(host, launcher), daemon=True).start()

    def _keep_log(self, host: int, launcher: subprocess.Popen[str]) -> None:
        assert launcher.stdout is not None
        for text in launcher.stdout:
            if not self._log.closed:
                self._log.write(f"{time.monotonic():.3f} {host}: {text}")
                self._log.flush()

    def _follow(self, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8") as lines:
            for line in lines:
                if line == "\n":
                    return
                self.events.append(Event(time.monotonic(), json.loads(line)))

    def attempts(self) -> dict[int, Attempt]:
        """The folder of each host's current attempt."""
        running = {
            host: newest_attempt(launcher.pid)
            for host, launcher in enumerate(self.launchers)
            if launcher is not None and launcher.poll() is None
        }
        return {host: attempt for host, attempt in running.items() if attempt is not None}

    def beats(self) -> dict[int, Beat]:
        """Each rank's last heartbeat in the current attempt."""
        beats = {rank: read_pulse(attempt, rank) for attempt in self.attempts().values() for rank in attempt.ranks()}
        return {rank: beat for rank, beat in beats.items() if beat is not None}

    def step(self) -> int:
        return max((beat.step for beat in self.beats().values()), default=0)

    def is_over(self) -> bool:
        return all(launcher is None or launcher.poll() is not None for launcher in self.launchers)

    def wait_for(self, name: str, *, since: float, within_s: float = _PATIENCE_S, **wanted: Any) -> Event | None:
        """The first event after `since` with this name and these values."""
        limit, last_look = time.monotonic() + within_s, False
        while not last_look:
            last_look = time.monotonic() > limit or self.is_over()  # events published before the end are still read
            time.sleep(_POLL_S)
            for event in list(self.events):
                if event.heard_s >= since and event.matches(name, **wanted):
                    return event
        return None

    def wait_for_steps(self, number: int, *, ranks: int | None = None, but: Sequence[Attempt] = ()) -> float | None:
        """When this many steps were trained in one attempt, by `ranks` ranks, not counting the attempts `but`."""
        limit, first, attempt = time.monotonic() + _PATIENCE_S, None, None
        while time.monotonic() < limit and not self.is_over():
            now = {host: folder for host, folder in self.attempts().items() if folder not in but}
            beats = self.beats() if now else {}
            if now and beats and (ranks is None or len(beats) == ranks):
                steps = [beat.step for beat in beats.values() if beat.phase not in ("starting", "ending")]
                if now != attempt:
                    attempt, first = now, None
                if steps:
                    first = min(steps) if first is None else first
                    if min(steps) >= first + number:
                        return time.monotonic()
            time.sleep(_POLL_S)
        return None

    def sleep(self, *, until: float) -> None:
        """Let it train, and record how long a step takes."""
        seen: list[tuple[float, int]] = []
        while time.monotonic() < until and not self.is_over():
            step = self.step()
            if not seen or step != seen[-1][1]:
                seen.append((time.monotonic(), step))
            time.sleep(_POLL_S)
        if len(seen) > 6:
            (first_s, first), (last_s, last) = seen[1], seen[-1]
            self.step_times.append((last_s - first_s) / max(1, last - first))

    def signal_launchers(self, signum: signal.Signals) -> list[int]:
        """Send a signal to all launchers and wait for them to exit; returns their exit codes."""
        running = [launcher for launcher in self.launchers if launcher is not None]
        for launcher in running:
            launcher.send_signal(signum)
        return [launcher.wait(_PATIENCE_S) for launcher in running]

    def wait_for_the_end(self) -> int:
        """The worst exit code of the launchers."""
        while not self.is_over():
            self.sleep(until=time.monotonic() + 2.0)
        return max(launcher.returncode for launcher in self.launchers if launcher is not None)
