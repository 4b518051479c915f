"""One ssh per host, followed together: whole lines, heartbeats in both directions, and one Ctrl-C for all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal

from drumline.launch.hosts_file import RemoteHost
from drumline.launch.remote_agent import MARK
from drumline.signals import counting

Stream = Literal["stdout", "stderr"]

_BEAT_S, _POLL_S, _FOLLOW_S, _LEAVE_S, _DRAIN_S = 5.0, 0.1, 5.0, 5.0, 1.0
"""Seconds between heartbeats; for the other hosts to exit after one failed; for a host to exit after it is killed; and
for ssh's last output to arrive after it exited."""
_KEPT_LINES = 2000
_LONGEST_BYTES = 65536
"""Longer lines are split; replies of the remote agent never are."""
# A progress bar returns to the start of its line and rewrites it: each version counts as a line.
_LINE_ENDS = re.compile(rb"\r*\n(?:\r+(?=[^\r\n]))?|\r+(?=[^\r\n])")


@dataclass(frozen=True)
class Line:
    """A line of a host's output."""

    stream: Stream
    text: str
    heard_s: float
    """By the local clock: clocks of hosts may differ."""


Show = Callable[[RemoteHost, Line], None]


class Session:
    """The connection to a host's remote agent."""

    def __init__(self, host: RemoteHost, command: Sequence[str], order: dict[str, Any]) -> None:
        self.host = host
        self.answers: dict[str, Any] = {}
        """All replies of the remote agent; without a code, it did not finish."""
        self.lines: deque[Line] = deque(maxlen=_KEPT_LINES)
        self.ended_s: float | None = None
        pipe = subprocess.PIPE
        # In its own session: Ctrl-C in the terminal goes to the launcher alone, which asks the hosts to stop once.
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        self._half: dict[Stream, bytes] = {}
        self._exited_s: float | None = None
        self._unsent = b""
        assert self._process.stdin is not None
        # Nonblocking: one slow host must not block the others.
        os.set_blocking(self._process.stdin.fileno(), False)
        self.send(json.dumps(order))

    @property
    def ssh_code(self) -> int | None:
        return self._process.returncode

    @property
    def code(self) -> int | None:
        """Exit code of the command there; None if unknown."""
        return self.answers.get("code")

    @property
    def error(self) -> Mapping[str, Any] | None:
        """The last error that the command reported, as DrumlineError.as_dict, with ago_s: seconds before its exit."""
        return self.answers.get("error")

    @property
    def pipes(self) -> Iterator[tuple[Stream, IO[bytes]]]:
        assert self._process.stdout is not None and self._process.stderr is not None
        yield "stdout", self._process.stdout
        yield "stderr", self._process.stderr

    def send(self, word: str) -> None:
        """Send one line to the remote agent, now or when `follow` finds its pipe writable."""
        self._unsent += word.encode() + b"\n"
        self.send_rest()

    def send_rest(self) -> None:
        """Write as much as the pipe takes; that a host is gone is noticed elsewhere."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            while self._unsent:
                self._unsent = self._unsent[os.write(self._process.stdin.fileno(), self._unsent) :]

    def kill(self) -> None:
        self._process.kill()

    def read(self, stream: Stream, pipe: IO[bytes]) -> tuple[bool, list[Line]]:
        """Whether more output may come, and whole lines of what did; an unfinished last line counts as one."""
        chunk = os.read(pipe.fileno(), 65536)
        *whole, half = _LINE_ENDS.split((self._half.pop(stream, b"") + chunk).lstrip(b"\r"))
        if chunk and (len(half) <= _LONGEST_BYTES or MARK.encode() in half):
            self._half[stream] = half
        elif half:
            whole.append(half)
        return bool(chunk), [line for text in whole for line in self._take(stream, text)]

    def _take(self, stream: Stream, raw: bytes) -> Iterator[Line]:
        text, mark, answer = raw.decode(errors="replace").rstrip("\r").partition(MARK)
        if mark:
            with contextlib.suppress(ValueError):
                self.answers |= json.loads(answer)
        if text or not mark:
            line = Line(stream, text, time.monotonic())
            self.lines.append(line)
            yield line

    def look(self, *, drained: bool) -> None:
        """Check whether ssh has exited. A background process may keep its pipes open forever."""
        if self._process.poll() is not None and self.ended_s is None:
            now_s = time.monotonic()
            self._exited_s = self._exited_s or now_s
            if drained or now_s - self._exited_s > _DRAIN_S:
                self.ended_s = now_s

    def close(self) -> None:
        for _, pipe in self.pipes:
            pipe.close()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()


def follow(sessions: Sequence[Session], show: Show, *, together: bool, limit_s: float = float("inf")) -> int:
    """Wait until all have exited; returns how often a signal asked to stop.

    together: if one fails, the others are stopped, and the first signal lets all of them save
    limit_s:  time after which those still running are killed
    """
    began_s = beaten_s = time.monotonic()
    asked = killed_s = failed_s = None
    with counting() as stops, _reading(sessions) as selector:
        while running := [session for session in sessions if session.ended_s is None]:
            _read(selector, show)
            now_s = time.monotonic()
            open_ones = {key.data[0] for key in selector.get_map().values()}
            for session in running:
                session.send_rest()
                session.look(drained=session not in open_ones)
                if session.ended_s is not None and session.code != 0:
                    failed_s = failed_s or now_s
            if now_s - beaten_s > _BEAT_S:
                beaten_s = now_s
                _send(running, "")
            follows = together and failed_s is not None and now_s - failed_s > _FOLLOW_S
            if asked is None and (stops or follows):
                asked = _send(running, "TERM")
                if stops and together:
                    _say("asking all hosts to save and stop; press Ctrl-C again to stop immediately")
            if killed_s is None and (len(stops) > (1 if together else 0) or now_s - began_s > limit_s):
                _send(running, "KILL")
                killed_s = now_s
            if killed_s is not None and now_s - killed_s > _LEAVE_S:
                for session in running:
                    session.kill()
    return len(stops)


@contextlib.contextmanager
def _reading(sessions: Sequence[Session]) -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        for session in sessions:
            for stream, pipe in session.pipes:
                selector.register(pipe, selectors.EVENT_READ, (session, stream))
        try:
            yield selector
        finally:
            for session in sessions:
                session.close()


def _read(selector: selectors.BaseSelector, show: Show) -> None:
    for key, _ in selector.select(_POLL_S):
        session, stream = key.data
        goes_on, lines = session.read(stream, key.fileobj)
        for line in lines:
            show(session.host, line)
        if not goes_on:
            selector.unregister(key.fileobj)


def _send(sessions: Sequence[Session], word: str) -> bool:
    for session in sessions:
        session.send(word)
    return True


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
