"""Start ranks, watch them, and restart them when one dies or hangs.

All it knows about a rank is its exit code and the files in the attempt's folder: heartbeat, exception and stacks.
It never computes, and holds no connection that a rank needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from drumline.elastic.deleted import FolderOfRun
from drumline.elastic.diagnosis import (
    Cause,
    End,
    blame,
    cause_of_another_host,
    first_cause,
    hang_cause,
    read_end,
    server_cause,
)
from drumline.elastic.rank_process import UNKNOWN, Ranks, end_server, server_end, start_server
from drumline.elastic.scratch import Scratch
from drumline.elastic.watch import Beat, Hang, Stacks, Watch, read_pulse, read_run_dir
from drumline.errors import EXIT_CODES, EXIT_INTERRUPTED, EXIT_STOPPED, DrumlineError, PeersLostError, RunLostError
from drumline.files import LineFile, RunFolder, now, publish
from drumline.network import SECRET
from drumline.parallel import ATTEMPT, Attempt
from drumline.rendezvous import Hosts, Rendezvous
from drumline.signals import SHOW_STACKS, counting

_POLL_S = 0.05
_BARREN = 3
"""Number of consecutive crashes without progress after which the run fails."""
_SAVE_S, _LEAVE_S, _SYMPTOM_S = 600.0, 5.0, 1.0
"""How long ranks may take to save and stop; to exit after one has failed; to report a better cause."""
_EXCUSES = 10
"""How many extensions ranks get that all wait, so that the host of the rank they wait for can name it."""
_MOVED_S = 3.0
"""How long ranks may wait for ranks of a host that left the attempt, before they are killed."""
_CHANGES = {
    "left": "another host is gone; continuing without it",
    "moved on": "another host is restarting its ranks; restarting here too",
    "cut off": "lost the connection to the rendezvous host; stopping the ranks here until it is back",
}


class _InterruptedError(Exception):
    """A stop signal arrived while there was nothing to save."""


class Supervisor:
    """The ranks of this host, from the first attempt to the end of the run."""

    def __init__(
        self,
        work: Callable[[], Any],
        rendezvous: Rendezvous,
        *,
        nproc: int,
        max_restarts: int | None,
        limit_s: float | None,
    ) -> None:
        self._work, self._nproc = work, nproc
        self._rendezvous = rendezvous
        self._max_restarts = max_restarts
        self._limit_s = limit_s
        self._scratch = Scratch()
        self._attempt = Attempt(Path(os.devnull))  # none yet
        self._ranks = Ranks()
        self._watch = Watch(limit_s)
        self._stops: list[int] = []
        self._attempts = self._restarts = self._excused = 0
        self._other_hosts = False
        self._first = self._size = 0
        self._may_raise = False
        self._asked_s: float | None = None
        self._reached = -1
        self._barren: list[Cause] = []
        self._run = FolderOfRun()

    def run(self) -> int:
        """Run until the end; returns the exit code. RunLostError if the run cannot continue."""
        with counting(then=self._interrupt) as self._stops:
            try:
                self._may_raise = True
                start_server(self._nproc)
                return self._attempts_until_the_end()
            except _InterruptedError:
                end_server()  # it may still be importing, with a rank about to be forked
                return EXIT_INTERRUPTED
            finally:
                self._may_raise = False
                self._ranks.kill()
                self._rendezvous.leave(finished=False)
                self._scratch.remove()

    def _attempts_until_the_end(self) -> int:
        while True:
            self._may_raise = True
            if self._stops:
                raise _InterruptedError
            self._start(self._rendezvous.join(self._nproc))
            self._may_raise = False
            ended = self._until_the_attempt_ends()
            if isinstance(ended, int):
                self._rendezvous.leave(finished=ended == 0, hurry=lambda: bool(self._stops))
                return ended
            cause = self._first_of_all_hosts(ended)
            if cause is not None:
                self._after_crash(cause)

    def _start(self, hosts: Hosts) -> None:
        """Start the ranks of the next attempt."""
        self._attempts += 1
        first = hosts.first_rank
        self._attempt = self._scratch.attempt(self._attempts, range(first, first + self._nproc))
        self._ranks, self._watch = Ranks(), Watch(self._limit_s)
        self._asked_s = None
        self._excused = 0
        self._other_hosts = len(hosts.ranks) > 1
        self._first, self._size = first, sum(hosts.ranks)
        for local_rank in range(self._nproc):
            environ = {**os.environ, **self._place(hosts, local_rank)}
            self._ranks.start(first + local_rank, environ, self._work)

    def _place(self, hosts: Hosts, local_rank: int) -> dict[str, str]:
        """The environment variables of a rank, with torchrun's names."""
        rank, size = hosts.first_rank + local_rank, sum(hosts.ranks)
        place = {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": self._nproc,
            "GROUP_RANK": hosts.number,
            "GROUP_WORLD_SIZE": len(hosts.ranks),
            "ROLE_NAME": "rank",
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": size,
            "MASTER_ADDR": hosts.master_addr,
            "MASTER_PORT": hosts.master_port,
            "TORCHELASTIC_RESTART_COUNT": self._restarts,
            "TORCHELASTIC_MAX_RESTARTS": self._max_restarts or 0,
            "TORCHELASTIC_RUN_ID": self._rendezvous.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": False,
            ATTEMPT: self._attempt.folder,
            SECRET: hosts.key,  # not the one of the rendezvous, where ranks have no business
        }
        return {name: str(value) for name, value in place.items()}

    def _until_the_attempt_ends(self) -> int | Cause | None:
        """An exit code if the run is over, the cause of a crash, or None to restart with other hosts."""
        while True:
            time.sleep(_POLL_S)
            self._run.look(self._run_dir())
            codes = self._ranks.codes()
            if any(codes.values()) or (0 in codes.values() and any(end.is_early for end in self._ends(codes))):
                return self._settle()
            if all(code == 0 for code in codes.values()):
                return 0
            hang = self._watch.look(self._beats(), time.monotonic())
            cause = self._name(hang) if hang else None
            if cause is not None:
                return self._interrupted_by(cause) if self._stops else cause
            if len(self._stops) > 1 or (self._asked_s and time.monotonic() - self._asked_s > _SAVE_S):
                self._ranks.kill()
                return EXIT_INTERRUPTED
            change = self._rendezvous.change()
            # Ranks that save because they were asked to stop need each other, but not the hosts that are done already.
            if (change in ("left", "cut off") and not self._stops) or (change in _CHANGES and self._waits_in_vain()):
                self._ranks.kill()
                _say(f"{socket.gethostname()}: {_CHANGES[change]}")
                return None
            if (self._stops or change) and self._asked_s is None:
                self._ranks.send(signal.SIGTERM)
                self._asked_s = time.monotonic()
                if self._stops and self._run_dir() is not None:
                    _say("saving after this step, then stopping; press Ctrl-C again to stop immediately")

    def _waits_in_vain(self) -> bool:
        """Whether ranks that were asked to stop are waiting for ranks that are gone, and not for a checkpoint."""
        saving = any(beat.phase in ("save", "ending") for beat in self._beats().values())
        return self._asked_s is not None and time.monotonic() - self._asked_s > _MOVED_S and not saving

    def _settle(self) -> int | Cause | None:
        """A rank has exited: give the others time to report or save, then kill them."""
        since = time.monotonic()
        while time.monotonic() - since < self._patience_s() and len(self._stops) < 2:
            if None not in self._ranks.codes().values():
                break
            time.sleep(_POLL_S)
        codes = self._ranks.codes()
        self._ranks.kill()
        ends = self._ends(codes)
        crashed = [end for end in ends if end.is_early or end.code not in (0, None, *EXIT_CODES)]
        given = [end.code for end in ends if end.code in EXIT_CODES]
        if self._stops:
            return EXIT_STOPPED if EXIT_STOPPED in given else given[0] if given else EXIT_INTERRUPTED
        by_us = -signal.SIGTERM if self._asked_s else None
        if all(end.is_symptom or end.code == by_us for end in crashed):
            if self._asked_s or (self._rendezvous.elastic and EXIT_STOPPED in given):
                mistakes = [code for code in given if code != EXIT_STOPPED]
                return mistakes[0] if mistakes else None  # everything is saved: continue with other hosts
            if given:
                return given[0]
        if UNKNOWN in codes.values() and (died := server_end()):
            start_server(self._nproc)
            return server_cause(*died, ends)
        return first_cause(ends)

    def _patience_s(self) -> float:
        """How long to wait for the running ranks, given how the others exited."""
        ends = [end for end in self._ends(self._ranks.codes()) if end.code or end.is_early]
        if self._asked_s is None and any(end.code not in EXIT_CODES and not end.is_symptom for end in ends):
            return 0.0
        if all(end.code == EXIT_STOPPED for end in ends):
            return _SAVE_S
        return _LEAVE_S if self._asked_s or any(end.code in EXIT_CODES for end in ends) else _SYMPTOM_S

    def _name(self, hang: Hang) -> Cause | None:
        """Report the hung rank, with all stacks, and kill the ranks; None: they wait for a rank of another host."""
        codes, pid = self._ranks.codes(), self._ranks.pid(hang.rank)
        stopped = _process_state(pid) == psutil.STATUS_STOPPED
        ends = self._ends(codes)
        shown = Stacks(self._attempt, [rank for rank, code in codes.items() if code is None])
        self._ranks.send(SHOW_STACKS)
        shown.wait(but=hang.rank if stopped else None)
        if stopped:  # it dumps its stack as soon as it continues, and is killed right after
            os.kill(pid, signal.SIGCONT)
            shown.wait()
        stacks = shown.read()
        blamed = blame(hang, ends, stacks)
        if blamed is None and self._other_hosts and self._excused < _EXCUSES:
            self._excused += 1
            self._watch.excuse(time.monotonic())
            return None
        self._ranks.kill()
        return hang_cause(blamed or hang, ends, stopped=stopped, stacks=stacks, all_wait=blamed is None)

    def _first_of_all_hosts(self, cause: Cause | None) -> Cause | None:
        """If no rank here failed by itself, use the cause from the host whose rank died first."""
        if cause is not None and cause.kind != "lost peer":
            self._rendezvous.share(cause.as_dict())
            return cause
        if cause is None and self._rendezvous.change() in ("left", "cut off"):
            return None  # the host that could report it is gone
        shared = self._rendezvous.shared(wait=cause is not None)
        return cause_of_another_host(shared, self._ends(self._ranks.codes())) if shared else cause

    def _after_crash(self, cause: Cause) -> None:
        """Report the cause; RunLostError if a restart would not help."""
        reached = self._farthest()
        if reached > self._reached:
            self._reached, self._barren = reached, []
        self._barren.append(cause)
        if self._max_restarts is None:
            lost = len(self._barren) >= _BARREN
            why = f" ({len(self._barren)} crashes in a row without progress)"
        else:
            lost, why = self._restarts >= self._max_restarts, ""
        if lost:
            cause = self._barren[0] if self._max_restarts is None else cause
            self._tell_run("failed", cause)
            self._write_status("failed", cause)
            details = [*cause.details, *(f"log and status: {folder}" for folder in [self._run_dir()] if folder)]
            lost_error = PeersLostError if cause.kind == "lost peer" else RunLostError
            raise lost_error(cause.line + why, details=details, fix="run the same command again to resume")
        self._restarts += 1
        if self._run.put_back():
            _say(self._run.deleted)
        self._tell_run("restart", cause)
        self._write_status("restarting", cause)
        frames = [line.strip() for line in cause.trace.splitlines() if line.lstrip().startswith("File ")]
        more = {"exception": frames[-1:], "hang": cause.details}.get(cause.kind, [])
        _say(f"{cause.line}; restarting ({self._restarts})", *more)

    def _interrupted_by(self, cause: Cause) -> int:
        _say(cause.line)
        return EXIT_INTERRUPTED

    def _ends(self, codes: dict[int, int | None]) -> list[End]:
        return [read_end(self._attempt, rank, pid=self._ranks.pid(rank), code=code) for rank, code in codes.items()]

    def _beats(self) -> dict[int, Beat]:
        beats = {rank: read_pulse(self._attempt, rank) for rank, code in self._ranks.codes().items() if code is None}
        return {rank: beat for rank, beat in beats.items() if beat is not None}

    def _run_dir(self) -> Path | None:
        return read_run_dir(self._attempt)

    def _farthest(self) -> int:
        """The highest step that a rank reached in this attempt, or that the run folder records."""
        path = self._run_dir()
        saved = RunFolder(path).read_status().get("step", -1) if path else -1
        beats = [read_pulse(self._attempt, rank) for rank in self._ranks.codes()]
        return max([int(saved), *(beat.step for beat in beats if beat is not None)])

    def _tell_run(self, what: str, cause: Cause) -> None:
        """In events.jsonl, beside what its ranks wrote, and for programs that follow this one."""
        event = {"event": what, "attempt": self._attempts, "world_size": self._size, "cause": cause.as_dict()}
        publish(event)
        path = self._run_dir()
        if path is not None and path.is_dir() and self._first == 0:
            with contextlib.suppress(OSError):
                LineFile(RunFolder(path).events).append(json.dumps({**event, "what": cause.line, "time": now()}))

    def _write_status(self, state: str, cause: Cause) -> None:
        path = self._run_dir()
        if path is None or not path.is_dir():
            return
        folder = RunFolder(path)
        before = folder.read_status()
        with contextlib.suppress(OSError, DrumlineError):  # a full disk must not prevent a restart
            folder.write_status(
                state,
                step=int(before.get("step", 0)),
                total_steps=int(before.get("total_steps", 0)),
                cause=cause.line,
                first_cause=cause.as_dict(),
            )

    def _interrupt(self) -> None:
        """While ranks are only starting, the first stop signal ends the run."""
        if self._may_raise:
            self._may_raise = False
            raise _InterruptedError


def _say(*lines: str) -> None:
    sys.stderr.write("".join(line + "\n" for line in lines))
    sys.stderr.flush()


def _process_state(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return ""
