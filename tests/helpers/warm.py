"""Python programs that start at once: forked from a process that has imported torch and drumline already.

`Warm` is `subprocess.Popen` for a command that begins with this Python. What it starts is a process of its own with its
own variables, folder, streams and signals, and does what `python -m MODULE` or `python SCRIPT` would; only the seconds
that the imports take are saved. The ranks of torchrun and the runs of a drill are forked as well, and so is the server
of ranks that a script starts. What a test says about the start of Python itself, it must start with subprocess; any
other program is started as ever. `warm_programs` are python, drumline and torchrun for a shell, a SLURM or an ssh.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import importlib
import json
import multiprocessing.process
import multiprocessing.util
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":  # the process that forks; what it forks puts its own folder in this place
    sys.path[0] = str(Path(__file__).parents[1])

from helpers.as_python import replace_by, run_words, uncaught
from helpers.namespaces import NAMESPACES, enter_host, enter_namespaces

_PRELOAD = """
helpers.idle
numpy torch torch._dynamo torch.distributed torch.distributed.launcher.api torch.nn.parallel matplotlib.figure
drumline.cli.train drumline.train.pretraining drumline.trainer.trainer drumline.elastic.launch drumline.report.terminal
""".split()
_Popen, _LONGEST = subprocess.Popen, 1 << 17
_PROGRAMS = {"python": "", "drumline": "-m drumline", "torchrun": "-m torch.distributed.run"}
_TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")
_spawn = multiprocessing.util.spawnv_passfds


class Warm(subprocess.Popen[Any]):
    """A process that runs this Python with "-m MODULE", "-c CODE" or a script, and more words.

    host: the network namespace, the file of names and the host's name, where it runs on a host of its own
    cold: the processes that it starts import all that they need themselves
    """

    def __init__(
        self, args: Sequence[str], *, host: tuple[str, str, str] | None = None, cold: bool = False, **more: Any
    ) -> None:
        self._host, self._cold, self._forked = host, cold, True
        super().__init__(args, **more)

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None:  # a test that fails or is skipped does not wait for what it has started
            self.kill()
        super().__exit__(kind, *rest)

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:  # type: ignore[override]
        # As in subprocess: cwd and env, and the ends of the three pipes, of which the child has every other one.
        cwd, env, session = rest[4], rest[5], rest[20]
        p2cread, _, _, c2pwrite, _, errwrite = rest[9:15]
        words = [str(word) for word in args]
        if words[1:2] == ["-u"]:  # what is forked writes at once in any case when it ends
            del words[1]
        self._forked = words[0] == sys.executable and words[1] in ("-m", "-c", *(w for w in words if w[:1] != "-"))
        if not self._forked:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        streams = [p2cread, c2pwrite, errwrite]
        null = os.open(os.devnull, os.O_RDWR)
        server = _server()
        try:
            self.pid = server.start(
                {
                    "words": words[1:],
                    "cwd": os.path.abspath(cwd or os.getcwd()),
                    "env": dict(os.environ if env is None else env),
                    "host": self._host,
                    "cold": self._cold,
                    "session": session,
                },
                [(own if server.is_below else null) if fd == -1 else fd for own, fd in enumerate(streams)],
            )
        finally:
            os.close(null)
        self._child_created = True
        for fd in {fd for fd in streams if fd > 2 and fd not in self._kept}:
            os.close(fd)

    @functools.cached_property
    def _kept(self) -> set[int]:
        return set()

    def _get_handles(self, stdin: Any, stdout: Any, stderr: Any) -> Any:  # type: ignore[override]
        files = [each if isinstance(each, int) else each.fileno() for each in (stdin, stdout, stderr) if each]
        self._kept |= {fd for fd in files if fd >= 0}
        return super()._get_handles(stdin, stdout, stderr)  # type: ignore[misc]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if not self._forked:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        status = _server().status(self.pid, wait=not wait_flags & os.WNOHANG)
        return (0, 0) if status is None else (self.pid, status)

    def _internal_poll(self, *how: Any, **more: Any) -> int | None:
        if not self._forked:
            return super()._internal_poll(*how, **more)  # type: ignore[misc,no-any-return]
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def run_warm(args: Sequence[str], *, timeout: float, **more: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with text that is captured."""
    with Warm(args, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(list(args), process.returncode, out, err)


def piped(words: Sequence[str]) -> Warm:
    """A command of this Python with both of its streams in one pipe, as text."""
    return Warm([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def warm_programs(folder: Path) -> Path:
    """A folder with python, drumline and torchrun that start at once."""
    folder.mkdir()
    client = Path(__file__).with_name("warm_client.py")
    for name, first in _PROGRAMS.items():
        words = shlex.join([sys.executable, "-IS", str(client), _server().place, *first.split()])
        (folder / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


class _Server:
    """The process that forks, seen from the one that asks it to.

    is_below: it was forked from the one that asks, whose streams are for what it starts
    place:    the socket where programs ask
    """

    def __init__(self, ours: socket.socket, *, is_below: bool, place: str = "") -> None:
        self._ours, self.is_below, self.place = ours, is_below, place
        self._lock, self._ended = threading.Lock(), dict[int, int]()

    @classmethod
    def started(cls) -> _Server:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        folder = tempfile.mkdtemp(prefix="warm-", dir="/tmp")  # a socket's path must be short
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind(f"{folder}/socket")
        listening.listen()
        passed = [theirs.fileno(), listening.fileno()]
        process = _Popen(
            [sys.executable, __file__, *map(str, passed)], pass_fds=passed, env=environ, start_new_session=True
        )
        theirs.close()
        listening.close()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        atexit.register(process.wait)
        atexit.register(ours.close)
        return cls(ours, is_below=False, place=f"{folder}/socket")

    @classmethod
    def forked(cls) -> _Server:
        """Of this process, which has done nothing yet."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            _serve(theirs)
        theirs.close()
        return cls(ours, is_below=True)

    def start(self, what: dict[str, Any], streams: Sequence[int]) -> int:
        with self._lock:
            socket.send_fds(self._ours, [json.dumps(what).encode()], list(streams))
            while "started" not in (answer := self._receive()):
                pass
            pid = int(answer["started"])
            self._ended.pop(pid, None)  # of an earlier process: numbers are used again
            return pid

    def status(self, pid: int, *, wait: bool) -> int | None:
        """How a process ended, as waitpid has it."""
        while True:
            with self._lock:
                while pid not in self._ended and select.select([self._ours], [], [], 0)[0]:
                    self._receive()
                if pid in self._ended or not wait:
                    return self._ended.get(pid)
            select.select([self._ours], [], [], 0.05)

    def _receive(self) -> dict[str, int]:
        answer: dict[str, int] = json.loads(self._ours.recv(_LONGEST) or '{"started": 0, "gone": 1}')
        assert "gone" not in answer, "the process that forks has died"
        if "ended" in answer:
            self._ended[answer["ended"]] = answer["status"]
        return answer


_SERVERS: list[_Server] = []


def _server() -> _Server:
    """The one that this process asks: started when it is first asked."""
    if not _SERVERS:
        _SERVERS.append(_Server.started())
    return _SERVERS[-1]


def _serve(asked: socket.socket, listening: socket.socket | None = None) -> NoReturn:
    """Fork what is asked for, and tell how each ended, until nobody asks any more."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    clients: dict[int, socket.socket] = {}
    own = [asked, *([listening] if listening else [])]

    def fork(said: bytes, fds: Sequence[int]) -> int:
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, fd in enumerate(fds[:3]):
                os.dup2(fd, number)
            enter_namespaces(fds[3:]) if fds[3:] else None
            opened = {each.detach() for each in (*own, *clients.values())} | {woken, wakes, *fds[:3]}
            for fd in opened - {0, 1, 2}:
                os.close(fd)
            _become(json.loads(said))
        for fd in fds:
            os.close(fd)
        return pid

    while True:
        ready = select.select([*own, woken, *clients.values()], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _tell_ended(asked, clients)
        if asked in ready:
            said, fds, _, _ = socket.recv_fds(asked, _LONGEST, 3)
            if not said:
                os._exit(0)
            asked.send(json.dumps({"started": fork(said, fds)}).encode())
        if listening in ready:
            client = listening.accept()[0]  # type: ignore[union-attr]
            said, fds, _, _ = socket.recv_fds(client, _LONGEST, 3 + len(NAMESPACES))
            if said:
                pid = fork(said, fds)
                clients[pid] = client
                client.send(json.dumps({"started": pid}).encode())
        for pid in [pid for pid, client in clients.items() if client in ready and not client.recv(1)]:
            clients.pop(pid).close()  # killed, and so is what it stood for
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)


def _tell_ended(asked: socket.socket, clients: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        client = clients.pop(pid, None)
        with contextlib.suppress(OSError) if client else contextlib.nullcontext():
            (client or asked).send(json.dumps({"ended": pid, "status": status}).encode())
        if client:
            client.close()


def _become(what: dict[str, Any]) -> NoReturn:
    """Do what this Python does with these words."""
    words, code = what["words"], 0
    try:
        if what["host"]:
            enter_host(*what["host"])
        os.chdir(what["cwd"])
        os.environ.clear()
        os.environ.update(what["env"])
        tempfile.tempdir = None
        multiprocessing.process.ORIGINAL_DIR = what["cwd"]  # where processes look for a script by its name
        first = what["cwd"] if words[0] in ("-c", "-m") else str(Path(words[0]).resolve().parent)
        added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[:] = [first, *added, *(path for path in sys.path[1:] if path not in added)]
        importlib.invalidate_caches()
        if what["session"]:
            os.setsid()
        if not what["cold"]:
            _warm_what_it_starts(words)
        os.execv = replace_by  # type: ignore[assignment]
        while words:
            words = run_words(words)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        code = uncaught(error)
    threading._shutdown()  # type: ignore[attr-defined]  # as at the end of any program
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _warm_what_it_starts(words: Sequence[str]) -> None:
    """Let this process, which has done nothing yet, start its own ranks from a process as fresh as it is now."""
    is_torchrun, is_drill = words[0] == "-m" and words[1] in _TORCHRUN, list(words[:3]) == ["-m", "drumline", "drill"]
    if is_torchrun or is_drill:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        _SERVERS.append(_Server.forked())
        subprocess_handler.Popen = Warm  # type: ignore[misc]
        if is_drill:
            subprocess.Popen = Warm  # type: ignore[misc]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve_ranks(theirs)
    theirs.close()

    def spawn(path: bytes, args: Sequence[Any], passed: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in str(args[-1]):
            return _spawn(path, args, passed)
        multiprocessing.util.spawnv_passfds = _spawn  # there is one that is fresh
        what = {
            "code": args[-1],
            "fds": list(passed),
            "cwd": os.getcwd(),
            "env": dict(os.environ),
            "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        }
        socket.send_fds(ours, [json.dumps(what).encode()], list(passed))
        ours.close()
        return pid

    multiprocessing.util.spawnv_passfds = spawn


def _serve_ranks(asked: socket.socket) -> NoReturn:
    """Become the server that multiprocessing forks from, if it is asked for before the one that may ask ends."""
    said, fds, _, _ = socket.recv_fds(asked, _LONGEST, 9)
    if not said:
        os._exit(0)
    what = json.loads(said)
    asked.close()
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD, 512) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, place in zip(aside, what["fds"], strict=True):
        os.dup2(fd, place)
        os.close(fd)
    os.chdir(what["cwd"])
    os.environ.clear()
    os.environ.update(what["env"])
    signal.pthread_sigmask(signal.SIG_SETMASK, what["blocked"])
    with contextlib.suppress(SystemExit):
        exec(what["code"], {})
    os._exit(0)


if __name__ == "__main__":
    for module in _PRELOAD:
        importlib.import_module(module)
    _serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1:]))
