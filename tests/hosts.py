"""Two hosts on one machine: network namespaces joined by a cable, each with its own address, name and ports.

Only the disk is shared, and a test that gives each host a folder of its own has not even that. Linux alone can do this,
and only for root.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PORT = 29500
"""Nothing else listens on a host that was just made."""

_NAMES, _NUMBERS = ("host-a", "host-b"), itertools.count()
# `ip netns exec` has given the process its own mounts, so that the bind is seen by no one else and ends with it.
_ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


@dataclass
class Started:
    """A process on a host."""

    host: str
    process: subprocess.Popen[bytes]
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
class Host:
    """A network of its own, with a name that resolves on both hosts."""

    name: str
    address: str
    namespace: str
    scratch: Path
    """Where the file of names and the logs lie."""
    started: list[Started] = field(default_factory=list)

    def start(self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None) -> Started:
        """Start a command here, with some variables beside the test's own."""
        log = self.scratch / f"{self.name}-{len(self.started)}.log"
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", _ENTER, "sh"]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*enter, str(self.scratch / "hosts"), self.name, *command],
                cwd=cwd,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.started.append(Started(self.name, process, log))
        return self.started[-1]

    def end_all(self) -> None:
        """Kill what still runs here, also what its parent left behind."""
        for each in self.started:
            each.process.kill()
            each.process.wait()
        while pids := _ip("netns", "pids", self.namespace).split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


@contextlib.contextmanager
def two_hosts(scratch: Path) -> Iterator[tuple[Host, Host]]:
    """Host a and host b, gone when the block ends; skips the test where they cannot be made."""
    prefix = f"drumline-{os.getpid()}-{next(_NUMBERS)}"
    hosts = [Host(name, f"10.77.0.{i}", f"{prefix}-{name}", scratch) for i, name in enumerate(_NAMES, start=1)]
    names = [("127.0.0.1", "localhost"), *((host.address, host.name) for host in hosts)]
    (scratch / "hosts").write_text("".join(f"{address} {name}\n" for address, name in names))
    with contextlib.ExitStack() as stack:
        for host in hosts:
            _make(host.namespace)
            stack.callback(_ip, "netns", "del", host.namespace)
            stack.callback(host.end_all)
        a, b = hosts
        _ip("link", "add", "eth0", "netns", a.namespace, "type", "veth", "peer", "name", "eth0", "netns", b.namespace)
        for host in hosts:
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
        yield a, b


def _make(namespace: str) -> None:
    """A new network namespace, or a skipped test where this machine or user cannot have one."""
    if shutil.which("ip") is None:
        pytest.skip("hosts are made with `ip`: apt install iproute2")
    made = subprocess.run(["ip", "netns", "add", namespace], capture_output=True, text=True, check=False)
    if "denied" in made.stderr or "not permitted" in made.stderr:
        pytest.skip(f"hosts need root with CAP_NET_ADMIN and CAP_SYS_ADMIN: {made.stderr.strip()}")
    assert made.returncode == 0, made.stderr


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout
