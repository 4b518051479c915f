"""Two hosts that ssh reaches: a real sshd in each network namespace, with keys that exist for one test run alone."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from helpers.hosts import Host, Started, two_hosts

LIMIT_S = 120.0
"""How long anything may take on a busy machine; what hangs takes for ever."""

_SSHD = """
Port 22
HostKey {folder}/{name}-key
AuthorizedKeysFile {folder}/client-key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
"""
_SSH = """
Host *
    User root
    IdentityFile {folder}/client-key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    LogLevel ERROR
"""
# sshd wants a folder in /run that belongs to root. The mounts of a host are its own: nothing of it is left.
_START = "mount -t tmpfs none /run && mkdir -m 0755 /run/sshd && exec $(command -v sshd) -D -e -f"


@dataclass
class Cluster:
    """Host a and host b, and how to reach them."""

    a: Host
    b: Host
    folder: Path

    @property
    def ssh(self) -> str:
        """What --ssh takes."""
        return f"ssh -F {self.folder}/ssh_config"

    def launch(self, *words: str, cwd: Path, env: Mapping[str, str] | None = None, ssh: str | None = None) -> Started:
        """`drumline launch`, on host a."""
        command = [sys.executable, "-m", "drumline", "launch", "--ssh", ssh or self.ssh, *words]
        return self.a.start(command, cwd=cwd, env={"OMP_NUM_THREADS": "1", **(env or {})})

    def pids(self, host: Host) -> set[int]:
        """All processes on a host."""
        done = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True)
        return {int(pid) for pid in done.stdout.split()}


@contextlib.contextmanager
def two_hosts_with_sshd(folder: Path) -> Iterator[Cluster]:
    """Two hosts with an sshd each, for tests marked `needs("hosts", "sshd")`."""
    with two_hosts(folder) as (a, b):
        for name in ("client", a.name, b.name):
            _keygen(folder / f"{name}-key")
        (folder / "ssh_config").write_text(_SSH.format(folder=folder))
        keys = {host.name: (folder / f"{host.name}-key.pub").read_text().split()[:2] for host in (a, b)}
        known = [" ".join((f"{host.name},{host.address}", *keys[host.name])) for host in (a, b)]
        (folder / "known_hosts").write_text("\n".join(known) + "\n")
        for host in (a, b):
            config = folder / f"{host.name}-sshd_config"
            config.write_text(_SSHD.format(folder=folder, name=host.name))
            host.start(["sh", "-c", f"{_START} {config}"], cwd=folder)
        cluster = Cluster(a, b, folder)
        for host in (a, b):
            _wait_for(["ssh", "-F", f"{folder}/ssh_config", host.name, "true"], a)
        yield cluster


def wait(condition: Callable[[], bool], what: str, *started: Started) -> None:
    """Until a condition holds, which none of the processes may end before."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline or any(each.process.poll() is not None for each in started):
            codes = [each.process.poll() for each in started]
            raise AssertionError(f"never came: {what}; exit codes {codes}\n" + "\n".join(e.said for e in started))
        time.sleep(0.05)


def _keygen(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True)


def _wait_for(command: Sequence[str], host: Host) -> None:
    deadline = time.monotonic() + LIMIT_S
    while (tried := host.start(command, cwd=host.scratch)).ended(within_s=LIMIT_S):
        said = tried.said + "".join(each.said for each in host.started[:1])
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
