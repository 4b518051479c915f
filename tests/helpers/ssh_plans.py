"""Plans for hosts that a script in the place of ssh reaches."""

from __future__ import annotations

import sys
from pathlib import Path

from drumline.launch.hosts_file import parse_hosts
from drumline.launch.ssh_plan import Plan
from drumline.network.endpoint import Endpoint


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def plan(ssh: str, workdir: Path, *command: str, hosts: str = "left,right", python: str = sys.executable) -> Plan:
    return Plan(
        hosts=parse_hosts(hosts),
        command=command,
        nproc=None,
        ssh=[ssh],
        endpoint=Endpoint("10.1.2.3", 29400),
        workdir=str(workdir),
        python=python,
        environ={},
    )
