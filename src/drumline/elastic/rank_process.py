"""Rank processes: forked from a server that has already imported torch, and killed when their launcher dies."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from typing import Any, NoReturn

import psutil

from drumline.elastic.diagnosis import record_cause
from drumline.elastic.lifetime import die_with_parent
from drumline.errors import EXIT_CRASHED, EXIT_INTERRUPTED, EXIT_STOPPED, DrumlineError
from drumline.parallel import own_pulse
from drumline.report import flush_console, is_to_tell, tell
from drumline.signals import blocked, start_afresh

_CONTEXT = multiprocessing.get_context("forkserver")
_spawn = util.spawnv_passfds
_LONGEST_TMPDIR, _LONGEST_CODE = 60, 1 << 17
_POLL_S = 0.01
_PRELOAD = [
    "drumline.elastic.preload",  # must be first: the rest takes seconds
    "torch._dynamo",
    "torch.nn.parallel",
    "drumline.elastic.rank_process",
    "drumline.train.pretraining",
    "drumline.report.terminal",
]
"""Modules to preload, so that a rank starts without imports. None of them may initialize CUDA: a process forked after
that cannot use it."""


UNKNOWN = 255
"""The exit code of a rank whose server is gone, which alone would know it."""
_SERVER_ENDS_S = 1.0
_spare: list[tuple[int, socket.socket]] = []
"""The process that becomes the server if the first one dies, and where it is told to."""


@dataclass(frozen=True)
class _NotStarted:
    """In the place of a rank's process, if the server died before it could start one."""

    pid: int | None = None
    exitcode: int | None = UNKNOWN

    def join(self) -> None:
        pass


class Ranks:
    """The rank processes of one attempt."""

    def __init__(self) -> None:
        self._processes: dict[int, multiprocessing.process.BaseProcess | _NotStarted] = {}

    def start(self, rank: int, environ: dict[str, str], work: Callable[[], Any]) -> None:
        """Call `work` as this rank."""
        process = _CONTEXT.Process(target=_rank, args=(environ, work), name=f"rank {rank}")
        try:
            process.start()
        except (EOFError, ConnectionError):
            self._processes[rank] = _NotStarted()
        else:
            self._processes[rank] = process

    def codes(self) -> dict[int, int | None]:
        """Exit code by rank: None while it is running, negative if it was killed by a signal."""
        return {rank: process.exitcode for rank, process in self._processes.items()}

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid or 0

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to all running ranks."""
        for process in self._processes.values():
            if process.exitcode is None and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signum)

    def kill(self) -> None:
        """Kill all running ranks."""
        self.send(signal.SIGKILL)
        for process in self._processes.values():
            process.join()


def start_server(nproc: int, *, early: bool = False) -> None:
    """Start the server that `nproc` ranks are forked from, unless it is running; does not wait until it is ready.

    early: this process has done nothing yet, so the server can be forked from it, and torch is imported only once.
           Later, a fork would inherit objects whose destructors close files that are no longer theirs
    """
    # Both are read when torch is imported. The store's warnings on ranks say only that a peer is gone.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (psutil.cpu_count(logical=False) or 1) // nproc)))
    _CONTEXT.set_forkserver_preload(_PRELOAD)
    _keep_paths_short()
    resource_tracker.ensure_running()  # if it started with the server, it would unblock the signals
    # Signals that are blocked now stay blocked in the server: Ctrl-C is handled by the launcher.
    with _forking() if early else _taking_the_spare(), blocked():
        if early:
            _keep_a_spare()
        forkserver.ensure_running()


def server_end() -> tuple[int, int] | None:
    """(process id, exit code) of the server if it has died, and all ranks with it; the code is negative for a signal.

    Only after a rank has ended in a way that nobody knows. The server is gone a moment later than its connections.
    """
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    deadline = time.monotonic() + _SERVER_ENDS_S
    while pid is not None and time.monotonic() < deadline:
        # Not reaped: multiprocessing does that when it starts the next one.
        if ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return pid, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        time.sleep(_POLL_S)
    return None


@contextlib.contextmanager
def _forking() -> Iterator[None]:
    """Make multiprocessing fork its server from this process instead of starting another interpreter.

    There is no setting for that. It saves a second import of torch: a quarter of the time to the first step.
    """
    import torch  # noqa: F401

    flush_console()  # or the server would print buffered output again
    util.spawnv_passfds = _fork  # type: ignore[assignment]
    try:
        yield
    finally:
        util.spawnv_passfds = _spawn


def _fork(path: str, words: list[str], passed: list[int]) -> int:
    """Replacement for `spawnv_passfds` that forks: `words` end with the Python code that the server runs."""
    pid = os.fork()
    if pid == 0:
        forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]  # the caller holds the copied one
        _serve(words[-1], passed)
    return pid


def _serve(code: str, passed: Sequence[int]) -> NoReturn:
    """Be the server, in a process that was forked for it."""
    try:
        util.spawnv_passfds = _spawn  # for programs that ranks start
        _close_all_but(passed)
        exec(code, {})
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(EXIT_CRASHED)


def _close_all_but(kept: Sequence[int]) -> None:
    for name in os.listdir("/dev/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _keep_a_spare() -> None:
    """Fork a process that waits to become the server, so that a second one need not import torch either."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid:
        theirs.close()
        _spare.append((pid, ours))
        return
    die_with_parent()
    _close_all_but([theirs.fileno()])
    said, given, *_ = socket.recv_fds(theirs, _LONGEST_CODE, 2)
    if not said:
        os._exit(0)  # the launcher has ended
    wanted = json.loads(said)
    # The code has the numbers that these files have in the launcher; a high one is in nobody's way.
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(wanted["passed"]) + 1) for fd in given]
    for fd, number in zip(aside, wanted["passed"], strict=True):
        os.dup2(fd, number)
    _serve(wanted["code"], wanted["passed"])


@contextlib.contextmanager
def _taking_the_spare() -> Iterator[None]:
    """Make multiprocessing use the spare as its server if it needs another one."""
    if not _spare:
        yield
        return
    util.spawnv_passfds = _take_the_spare  # type: ignore[assignment]
    try:
        yield
    finally:
        util.spawnv_passfds = _spawn


def _take_the_spare(path: str, words: list[str], passed: list[int]) -> int:
    """Replacement for `spawnv_passfds`; if the spare is gone too, another interpreter is started."""
    pid, told = _spare.pop()
    with told, contextlib.suppress(OSError):
        socket.send_fds(told, [json.dumps({"code": words[-1], "passed": passed}).encode()], passed)
        return pid
    return _spawn(path, words, passed)  # type: ignore[arg-type]


def _keep_paths_short() -> None:
    """multiprocessing keeps its sockets in TMPDIR, whose path may be too long for a socket."""
    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if settings.get("tempdir") is None and len(tempfile.gettempdir()) > _LONGEST_TMPDIR:
        short = next(folder for folder in ("/tmp", "/dev/shm") if os.access(folder, os.W_OK))
        settings["tempdir"] = tempfile.mkdtemp(prefix="drumline-", dir=short)
        atexit.register(shutil.rmtree, settings["tempdir"], ignore_errors=True)


def end_server() -> None:
    """Kill the server, and with it all ranks."""
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # multiprocessing reaps it when it starts the next one


def _rank(environ: dict[str, str], work: Callable[[], Any]) -> None:
    """The body of a rank process. Never returns."""
    die_with_parent()
    launcher = multiprocessing.parent_process()
    if os.getppid() == 1 or launcher is None or not psutil.pid_exists(launcher.pid or 0):
        os._exit(EXIT_INTERRUPTED)  # the server or launcher died before PR_SET_PDEATHSIG took effect
    os.setsid()  # Ctrl-C in the terminal goes to the launcher alone, which asks ranks to stop once
    start_afresh()
    os.environ.clear()
    os.environ.update(environ)
    import torch  # already imported by the server; the launcher starts the server before importing torch itself

    from drumline.parallel import leave

    torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    own_pulse.cache_clear()  # of the server, which this process was forked from
    own_pulse().start(int(environ["RANK"]))
    code = _outcome(work)
    if code in (0, EXIT_STOPPED):
        leave()  # others may still be reading from this rank's store
    flush_console()
    util._run_finalizers(0)  # type: ignore[attr-defined]  # semaphores of a process that is gone count as leaked
    # Interpreter shutdown under gloo's threads sometimes aborts a process that has finished its work.
    os._exit(code)


def _outcome(work: Callable[[], Any]) -> int:
    """Run the rank's work and return its exit code."""
    try:
        work()
    except DrumlineError as error:
        if error.exit_code == EXIT_CRASHED:
            record_cause(error)
        elif is_to_tell():
            tell(error)
        return error.exit_code
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BaseException as error:
        record_cause(error)
        return EXIT_CRASHED
    return 0
