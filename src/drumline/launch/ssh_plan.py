"""What `drumline launch` runs over SSH: the ssh command line for each host, and the command it runs there."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.config import RENDEZVOUS_PORT, flag
from drumline.doctor import masked
from drumline.errors import ConfigError
from drumline.launch.hosts_file import RemoteHost, parse_hosts, read_hosts
from drumline.network import SECRET, SECRET_FILE, Endpoint, new_secret
from drumline.parallel import ATTEMPT

COMMANDS = ("train", "bench", "doctor")
SILENT_S = 60.0
"""How long a host waits for a heartbeat before it considers the connection broken."""
_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
"""Never prompt, since nobody may be there to answer; and detect a dead connection within 15 s."""
_PASSED = (
    *("NCCL_", "GLOO_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "CUBLAS_"),
    *("OMP_", "MKL_", "KMP_", "ONEDNN_", "HF_", "TOKENIZERS_", "WANDB_", "DRUMLINE_"),
)
_PASSED_NAMES = frozenset(
    "PYTHONPATH http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY "
    "CUDA_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS".split()
)
_NEVER = frozenset("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()) | {ATTEMPT}
_OURS = {
    "nproc": "put it before the --, or per host: --hosts a:2,b:4",
    "nnodes": "drop it: the hosts are counted",
    "rdzv_endpoint": "put it before the --",
    "names": "drop it: the hosts' names are known",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything needed to start a command on hosts."""

    hosts: Sequence[RemoteHost]
    command: Sequence[str]
    """The arguments of `drumline`, as train --total_steps 100."""
    nproc: int | None
    """Ranks on hosts without a number of their own; None: one per GPU."""
    ssh: Sequence[str]
    endpoint: Endpoint
    """The rendezvous endpoint."""
    workdir: str
    python: str
    environ: Mapping[str, str]

    @property
    def rendezvous_host(self) -> str:
        return self.endpoint.host

    @property
    def agent_command(self) -> str:
        """The command for the host's shell."""
        path = self.environ.get("PYTHONPATH")
        before = ["env", f"PYTHONPATH={path}"] if path else []
        return shlex.join([*before, self.python, "-m", "drumline.launch.remote_agent"])

    def order(self, host: RemoteHost) -> dict[str, Any]:
        """The command that a host runs."""
        return self._order(self.words(host))

    def words(self, host: RemoteHost) -> list[str]:
        """The arguments of `drumline` on a host."""
        slots = host.slots or self.nproc
        words = [*self.command]
        if slots and self.command[0] != "doctor":
            words += ["--nproc", str(slots)]
        if len(self.hosts) > 1 and self.command[0] != "bench":
            words += ["--nnodes", str(len(self.hosts)), "--rdzv_endpoint", str(self.endpoint)]
        if len(self.hosts) > 1 and self.command[0] == "doctor":
            words += ["--names", ",".join(each.name for each in self.hosts)]  # so that missing hosts can be named
        return words

    def check(self) -> dict[str, Any]:
        """What every host is asked first: some facts, and the quick checks unless the command is the doctor itself."""
        run_dir = flag(self.command, "run_dir")
        quick = ["doctor", "--quick", "--json", *(["--run_dir", run_dir] if run_dir else [])]
        return {"meeting_host": self.rendezvous_host, **self._order([] if self.command[0] == "doctor" else quick)}

    def _order(self, words: Sequence[str]) -> dict[str, Any]:
        argv = {"argv": [self.python, "-m", "drumline", *words]} if words else {}
        return {**argv, "environ": dict(self.environ), "cwd": self.workdir, "silent_s": SILENT_S}

    def ssh_line(self, host: RemoteHost) -> list[str]:
        """The ssh command line. The user's options come first: ssh uses the first value of an option."""
        return [*self.ssh, *_OPTIONS, host.target, self.agent_command]

    def by_hand(self, host: RemoteHost, *words: str) -> str:
        """A command for the user that runs something on a host."""
        return shlex.join([*self.ssh, host.target, *words])

    def again(self, *, endpoint: Endpoint | None = None, python: str | None = None) -> str:
        """A command for the user that repeats this launch with another option."""
        hosts = ",".join(f"{host.target}:{host.slots}" if host.slots else host.target for host in self.hosts)
        flags = {
            "--ssh": (shlex.join(self.ssh), "ssh"),
            "--rdzv_endpoint": (str(endpoint or self.endpoint), str(Endpoint(self.hosts[0].name, RENDEZVOUS_PORT))),
            "--workdir": (self.workdir, str(Path.cwd())),
            "--python": (python or self.python, sys.executable),
            "--nproc": (str(self.nproc), "None"),
        }
        words = [word for name, (value, default) in flags.items() if value != default for word in (name, value)]
        words += [word for name in self.environ if not _steers(name) for word in ("--env", name)]
        return shlex.join(["drumline", "launch", "--hosts", hosts, *words, "--", *self.command])


def make_plan(
    command: Sequence[str],
    *,
    hosts: str | None,
    hostfile: Path | None,
    nproc: int | None,
    ssh: str,
    rdzv_endpoint: str | None,
    workdir: Path | None,
    python: str,
    environ: Mapping[str, str],
) -> Plan:
    """A plan from the command line; ConfigError for what cannot work."""
    _check_command(command)
    if hosts is not None and hostfile is None:
        remote_hosts = parse_hosts(hosts)
    elif hosts is None and hostfile is not None:
        remote_hosts = read_hosts(hostfile)
    else:
        raise ConfigError("hosts must be given in exactly one way", fix="--hosts a,b, or --hostfile FILE")
    if nproc is not None and nproc < 1:
        raise ConfigError(f"nproc is {nproc}", fix="give --nproc a value of 1 or more")
    words = shlex.split(ssh)
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(f"--ssh {ssh!r}: command not found", fix="apt install openssh-client")
    if len(remote_hosts) > 1 and not environ.get(SECRET) and not environ.get(SECRET_FILE):
        environ = {**environ, SECRET: new_secret()}
    return Plan(
        hosts=remote_hosts,
        command=command,
        nproc=nproc,
        ssh=words,
        endpoint=Endpoint.parse(rdzv_endpoint or remote_hosts[0].name),
        workdir=str((workdir or Path.cwd()).absolute()),
        python=python,
        environ=environ,
    )


def _check_command(command: Sequence[str]) -> None:
    """ConfigError for a command that cannot be started on several hosts."""
    if not command or command[0] not in COMMANDS:
        given = f"{command[0]!r} cannot be launched on hosts" if command else "there is no command to run on the hosts"
        raise ConfigError(
            f"{given}; use {', '.join(COMMANDS)}", fix="drumline launch --hosts a,b -- train --total_steps 100"
        )
    for name, fix in _OURS.items():
        if flag(command, name) is not None:
            raise ConfigError(f"--{name} cannot be given to {command[0]} here: the launcher sets it", fix=fix)


def passed_on(environ: Mapping[str, str], more: Iterable[str]) -> dict[str, str]:
    """Environment variables for the hosts: those that configure torch and related libraries, and `more`."""
    passed = {name: value for name, value in environ.items() if _steers(name)}
    for name in more:
        if name in _NEVER:
            raise ConfigError(f"--env {name}: it is set for every rank", fix=f"drop --env {name}")
        if name not in environ:
            raise ConfigError(f"--env {name}: it is not set here", fix=f"export {name}=... first")
        passed[name] = environ[name]
    return dict(sorted(passed.items()))


def _steers(name: str) -> bool:
    return (name.startswith(_PASSED) or name in _PASSED_NAMES) and name not in _NEVER


def describe(plan: Plan, *, checks: bool) -> list[str]:
    """What `launch` would run, line by line: ssh's command line and its stdin."""
    lines = []
    for host in plan.hosts:
        for what, order in [*([("check", plan.check())] if checks else []), ("start", plan.order(host))]:
            shown = {**order, "environ": {name: masked(name, value) for name, value in order["environ"].items()}}
            lines += [
                f"{what} {host.name}: {shlex.join(plan.ssh_line(host))}",
                f"  stdin: {json.dumps(shown)}",
            ]
    return lines
