"""What tests need of a machine beside Python, and what to install where it is missing.

    @pytest.mark.needs("hosts", "firewall")

A test so marked is skipped where one of these is not to be had, with a reason that names the Debian package or the
right that is missing. Each is looked for once, and only if a marked test was chosen.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

PACKAGES = {
    "bash": "bash",
    "g++": "g++",
    "getent": "libc-bin",
    "git": "git",
    "hostname": "hostname",
    "ip": "iproute2",
    "make": "make",
    "mount": "mount",
    "munged": "munge",
    "nft": "nftables",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "unshare": "util-linux",
    **dict.fromkeys(
        ("sbatch", "scancel", "scontrol", "sinfo", "slurmctld", "slurmd", "squeue", "srun"),
        "slurm-wlm",
    ),
}
"""Program -> the package that has it."""

WHOLE = {
    "compiler": ("g++",),
    "hosts": ("ip", "mount", "unshare", "hostname", "getent"),
    "disks": ("mount", "unshare"),
    "processes": ("unshare", "mount"),
    "firewall": ("ip", "nft"),
    "ipv6": (),
    "shm": (),
    "sshd": ("sshd", "ssh", "ssh-keygen"),
    "slurm": ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "squeue", "scancel", "scontrol"),
}
"""What consists of several programs, some of which need rights too: see `_TRIES`."""

SHM_BYTES = 16 << 20
"""What the heartbeats and snapshots of a few small runs need in memory."""

# Made and gone at once, in the ways that tests make them.
_HOST = f"drumline-try-{os.getpid()}"
_IN_A_HOST = "ip netns add {host} || exit 1; {then}; code=$?; ip netns del {host}; exit $code"
_TRIES = {
    "hosts": _IN_A_HOST.format(
        host=_HOST,
        then=f"ip -n {_HOST} link add eth0 type veth peer name eth1 && ip -n {_HOST} link add eth2 type bridge"
        f" && ip netns exec {_HOST} unshare --uts sh -c 'mount --bind /etc/hosts /etc/hosts && hostname host-a'",
    ),
    "firewall": _IN_A_HOST.format(host=_HOST, then=f"ip netns exec {_HOST} nft add table inet t"),
    "disks": "unshare --mount sh -c 'mount -t tmpfs -o size=64k none /mnt'",
    "processes": "unshare --pid --fork --mount-proc true",
    "ipv6": "grep -qw lo /proc/net/if_inet6",
    "slurm": "test $(id -u) = 0",
}
_RIGHTS = {
    "hosts": "the right to make network namespaces (root with CAP_NET_ADMIN and CAP_SYS_ADMIN)",
    "firewall": "the right to filter packets (root with CAP_NET_ADMIN, and a kernel with nftables)",
    "disks": "the right to mount (root with CAP_SYS_ADMIN)",
    "processes": "the right to make process namespaces (root with CAP_SYS_ADMIN)",
    "ipv6": "IPv6, with the address ::1",
    "slurm": "root",
}


@functools.cache
def missing(*needs: str) -> str:
    """Why a test that needs these is skipped; empty where all of it is there."""
    programs = [program for need in needs for program in WHOLE.get(need, (need,))]
    packages = dict.fromkeys(PACKAGES[program] for program in programs if shutil.which(program) is None)
    if "compiler" in needs and not Path(sysconfig.get_path("include"), "Python.h").exists():
        packages["python3-dev"] = None
    if "shm" in needs and (shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0) < SHM_BYTES:
        return f"needs {SHM_BYTES >> 20} MiB of room in /dev/shm (mount -o remount,size=64M /dev/shm)"
    if packages:
        return f"needs {' '.join(packages)} (apt-get install {' '.join(packages)})"
    return next((f"needs {_RIGHTS[need]}: {why}" for need in needs if (why := _refused(need))), "")


@functools.cache
def _refused(need: str) -> str:
    """What this machine answers where it does not let this user do it."""
    if need not in _TRIES:
        return ""
    tried = subprocess.run(["sh", "-c", _TRIES[need]], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["not allowed"])[0]
