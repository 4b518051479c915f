"""Hosts on one machine: network namespaces joined by a cable or a switch, each with its own address, name and ports.

Only the disk is shared, and a test that gives each host a folder of its own has not even that. Linux alone can do this,
and only for root: what uses it is marked `needs("hosts")`. Faults are made with nftables (`needs("firewall")`), and
delay by a relay that holds frames back, which is this file, run with two cards and the seconds.
"""

from __future__ import annotations

import array
import collections
import contextlib
import fcntl
import itertools
import multiprocessing
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # it is a program of its own on other hosts

from helpers.namespaces import enter_host
from helpers.warm import Warm

PORT = 29500
"""Nothing else listens on a host that was just made."""

_NAMES, _NUMBERS = ("host-a", "host-b"), itertools.count()
_SIOCETHTOOL, _OFFLOADS = 0x8946, (0x17, 0x1F, 0x24)  # ETHTOOL_STXCSUM, _STSO, _SGSO
# `ip netns exec` has given the process its own mounts, so that the bind is seen by no one else and ends with it.
_ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


@dataclass
class Started:
    """A process on a host."""

    host: str
    process: subprocess.Popen[Any]
    log: Path

    @property
    def said(self) -> str:
        """All it wrote so far, to either stream."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def ended(self, *, within_s: float) -> int:
        """Its exit code."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.host} still runs after {within_s} s and said:\n{self.said}") from None


@dataclass
class Called:
    """A function that runs on a host."""

    host: str
    process: ForkServerProcess
    pipe: Connection

    def result(self, *, within_s: float) -> Any:
        """What it returned; an assertion with its traceback if it raised."""
        assert self.pipe.poll(within_s), f"{self.host} gave no answer within {within_s} s"
        raised, value = self.pipe.recv()
        assert not raised, f"{self.host} raised\n{value}"
        return value


@dataclass
class Host:
    """A network of its own, with a name that resolves on all hosts."""

    name: str
    address: str
    namespace: str
    scratch: Path
    """Where the file of names and the logs lie."""
    names: str = "hosts"
    started: list[Started] = field(default_factory=list)
    called: list[Called] = field(default_factory=list)
    filtered: bool = False

    def call(self, work: Callable[..., Any], *arguments: Any, env: Mapping[str, str] | None = None) -> Called:
        """Call a function here, in a process that has torch from the start: much cheaper than one that imports it."""
        import helpers.ranks  # names what the server imports  # noqa: F401

        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_call_here,
            args=(theirs, self.namespace, self.scratch / self.names, self.name, dict(env or {}), work, arguments),
        )
        process.start()
        theirs.close()
        self.called.append(Called(self.name, process, ours))
        return self.called[-1]

    def filter(self, hook: str, rule: str) -> None:
        """Add a rule of nftables: what comes in passes "prerouting" and then "input"."""
        words = f"add table inet t; add chain inet t {hook} {{ type filter hook {hook} priority 0; }}"
        command = ["ip", "netns", "exec", self.namespace, "nft", f"{words}; add rule inet t {hook} {rule}"]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        self.filtered = True

    def heal(self) -> None:
        """Remove all rules."""
        if self.filtered:
            subprocess.run(["ip", "netns", "exec", self.namespace, "nft", "flush", "ruleset"], check=True)
        self.filtered = False

    def start(self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None) -> Started:
        """Start a command here, with some variables beside the test's own."""
        log = self.scratch / f"{self.name}-{len(self.started)}.log"
        names = str(self.scratch / self.names)
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", _ENTER, "sh", names, self.name]
        how: dict[str, Any] = {"cwd": cwd, "env": {**os.environ, **(env or {})}}
        with log.open("wb") as file:
            how |= {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            if list(command[:2]) == [sys.executable, "-m"]:
                process = Warm(command, host=(self.namespace, names, self.name), **how)
            else:
                process = subprocess.Popen([*enter, *command], **how)
        self.started.append(Started(self.name, process, log))
        return self.started[-1]

    def end_all(self) -> None:
        """Kill what still runs here, also what its parent left behind."""
        for each in self.started:
            each.process.kill()
            each.process.wait()
        for call in self.called:
            call.process.kill()
            call.process.join()
            call.pipe.close()
        while pids := _ip("netns", "pids", self.namespace).split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


@contextlib.contextmanager
def two_hosts(scratch: Path, *, debian: bool = False) -> Iterator[tuple[Host, Host]]:
    """Host a and host b, gone when the block ends.

    debian: each takes its own name for 127.0.1.1, as Debian and Ubuntu are installed
    """
    prefix = f"drumline-{os.getpid()}-{next(_NUMBERS)}"
    hosts = [Host(name, f"10.77.0.{i}", f"{prefix}-{name}", scratch) for i, name in enumerate(_NAMES, start=1)]
    names = [("127.0.0.1", "localhost"), *((host.address, host.name) for host in hosts)]
    (scratch / "hosts").write_text("".join(f"{address} {name}\n" for address, name in names))
    for host in hosts if debian else ():
        host.names = f"hosts-{host.name}"
        own = [("127.0.1.1" if name == host.name else address, name) for address, name in names]
        (scratch / host.names).write_text("".join(f"{address} {name}\n" for address, name in own))
    with contextlib.ExitStack() as stack:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "del", host.namespace)
            stack.callback(host.end_all)
        a, b = hosts
        _ip("link", "add", "eth0", "netns", a.namespace, "type", "veth", "peer", "name", "eth0", "netns", b.namespace)
        for host in hosts:
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
        _wait_for_links(hosts)
        yield a, b


@contextlib.contextmanager
def hosts_on_a_switch(scratch: Path, count: int, *, delay_last_s: float = 0.0) -> Iterator[list[Host]]:
    """Hosts a, b, c and so on; packets to and from the last one may be held back."""
    prefix = f"drumline-{os.getpid()}-{next(_NUMBERS)}"
    switch = f"{prefix}-switch"
    hosts = [
        Host(f"host-{chr(ord('a') + i)}", f"10.77.0.{i + 1}", f"{prefix}-host-{chr(ord('a') + i)}", scratch)
        for i in range(count)
    ]
    names = [("127.0.0.1", "localhost"), *((host.address, host.name) for host in hosts)]
    (scratch / "hosts").write_text("".join(f"{address} {name}\n" for address, name in names))
    with contextlib.ExitStack() as stack:
        _ip("netns", "add", switch)
        stack.callback(_ip, "netns", "del", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for number, host in enumerate(hosts):
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "del", host.namespace)
            stack.callback(host.end_all)
            port, delayed = f"port{number}", bool(delay_last_s) and host is hosts[-1]
            _ip("link", "add", "eth0", "netns", host.namespace, "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            for card in ("lo", "eth0"):
                _ip("-n", host.namespace, "link", "set", card, "up")
            if delayed:
                _ip("-n", switch, "link", "add", "delayed", "type", "veth", "peer", "name", "behind")
            for card in (port, *(("delayed", "behind") if delayed else ())):
                _ip("-n", switch, "link", "set", card, "up")
            _ip("-n", switch, "link", "set", "behind" if delayed else port, "master", "switch")
            if delayed:
                stack.enter_context(_relay(switch, [each.namespace for each in hosts], port, "delayed", delay_last_s))
        _wait_for_links(hosts)
        yield hosts


def _wait_for_links(hosts: Sequence[Host]) -> None:
    """The kernel takes up to a second to say that a card which has a cable is up."""
    deadline = time.monotonic() + 10
    for host in hosts:
        while " UP " not in (said := _ip("-n", host.namespace, "-brief", "link", "show", "dev", "eth0")):
            assert time.monotonic() < deadline, said
            time.sleep(0.02)


@contextlib.contextmanager
def _relay(switch: str, namespaces: Sequence[str], one: str, other: str, delay_s: float) -> Iterator[None]:
    me = [sys.executable, __file__]
    for namespace in namespaces:  # frames as on a cable: whole, and no longer than it carries
        subprocess.run(["ip", "netns", "exec", namespace, *me, "plain", "eth0"], check=True)
    relay = subprocess.Popen(["ip", "netns", "exec", switch, *me, one, other, str(delay_s)], stdout=subprocess.PIPE)
    assert relay.stdout is not None
    try:
        assert relay.stdout.readline() == b"ready\n"
        yield
    finally:
        relay.kill()
        relay.wait()
        relay.stdout.close()


def _hold_frames(cards: Sequence[str], delay_s: float) -> None:
    """Pass frames from each card to the other, later."""
    everything = socket.htons(3)
    sockets = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, everything) for _ in cards]
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    selector = selectors.DefaultSelector()
    for number, (card, each) in enumerate(zip(cards, sockets, strict=True)):
        each.bind((card, 0))
        each.setblocking(False)
        selector.register(each, selectors.EVENT_READ, number)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select(max(0.0, waiting[0][0] - time.monotonic()) if waiting else None):
            frame, sender = sockets[key.data].recvfrom(1 << 16)
            if sender[2] != socket.PACKET_OUTGOING:
                waiting.append((time.monotonic() + delay_s, 1 - key.data, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, number, frame = waiting.popleft()
            with contextlib.suppress(OSError):
                sockets[number].send(frame)


def _without_offload(card: str) -> None:
    """Make a card compute checksums and cut packets itself instead of leaving it to hardware that is not there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in _OFFLOADS:
            value = array.array("B", struct.pack("II", command, 0))
            request = struct.pack("16sP", card.encode(), value.buffer_info()[0]).ljust(40, b"\0")
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request)


def _call_here(
    pipe: Connection,
    namespace: str,
    names: Path,
    name: str,
    environ: Mapping[str, str],
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Move this process to a host, as `ip netns exec` and _ENTER do, and call something there."""
    try:
        enter_host(namespace, str(names), name)
        os.environ.update(environ)
        answer = False, work(*arguments)
    except BaseException:
        answer = True, traceback.format_exc()
    pipe.send(answer)
    os._exit(0)  # as drumline ends


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        _without_offload(sys.argv[2])
    else:
        _hold_frames(sys.argv[1:3], float(sys.argv[3]))
