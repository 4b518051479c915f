"""Checks of this machine apart from its GPUs.

read_* and measure_* functions look at the machine; check_* functions judge what they are given, so that tests can
describe any machine.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from drumline.doctor.finding import UNWRITABLE, Finding, State
from drumline.network import InfiniBandPort, Interface, is_loopback
from drumline.report import command
from drumline.units import count

_GIB = 1 << 30
_MIB = 1 << 20
TORCH_FLOOR = (2, 11)
SHARED_MEMORY = Path("/dev/shm")
SHARED_BYTES = _GIB
"""Free space needed for snapshots and for NCCL, which takes megabytes per pair of GPUs; Docker's default is 64 MiB."""
_OPEN_FILES = 1024
_RELEASED_S = 1_767_225_600.0
"""The beginning of 2026: an earlier clock is wrong."""
_STA_UNSYNC = 0x40
_SLOW_BYTES_PER_S = 30e6
EXAMPLE_CHECKPOINT_BYTES = 1_500_000_000
"""Of GPT-2 124M: weights and both moments of AdamW."""
_SAMPLE_BYTES = 64 * _MIB
_LONGEST_WRITE_S = 3.0
_SMALLEST_MTU = 1280
_PACKAGES = {
    "apt-get": "apt install",
    "dnf": "dnf install",
    "apk": "apk add",
    "pacman": "pacman -S",
    "zypper": "zypper in",
}


def as_root(command: str) -> str:
    return command if os.geteuid() == 0 else f"sudo {command}"


def in_container() -> bool:
    return any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv"))


def _install(package: str) -> str:
    manager = next((how for program, how in _PACKAGES.items() if shutil.which(program)), "apt install")
    return as_root(f"{manager} {package}")


def check_system(
    *, cores: int, allowed_cores: float, threads: int | None, memory_bytes: int, limit_bytes: int
) -> Finding:
    """The machine in one line.

    allowed_cores: cores within the container's limit and CPU affinity
    threads:       OMP_NUM_THREADS, None if it is not set
    limit_bytes:   memory limit of the container
    """
    what = (
        f"{socket.gethostname()}: {platform.system()} {platform.release().split('-')[0]}, {_of(allowed_cores, cores)}"
    )
    limited = (
        f" of the machine's {memory_bytes / _GIB:.0f}, limited by its container" if limit_bytes < memory_bytes else ""
    )
    what += f", {min(memory_bytes, limit_bytes) / _GIB:.1f} GiB of memory{limited}"
    most = max(1, int(allowed_cores))
    if most < cores and (threads or cores) > most:
        what += f"; torch would start {threads or cores} threads, more than it can run"
        return Finding("system", "warning", what, f"export OMP_NUM_THREADS={most}")
    return Finding("system", "ok", what)


def _of(allowed: float, cores: int) -> str:
    return f"{cores} cores" if allowed >= cores else f"{allowed:g} of {cores} cores"


def read_cores() -> int:
    """Number of cores in this process's CPU affinity."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else psutil.cpu_count() or 1


def check_torch(version: str, *, cuda: str | None, nccl: str) -> Finding:
    numbers = tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2])
    with_cuda = f", CUDA {cuda}, NCCL {nccl}" if cuda else ""
    if numbers < TORCH_FLOOR:
        floor = ".".join(map(str, TORCH_FLOOR))
        return Finding("torch", "failed", f"{version}: older than {floor}", f"pip install 'torch>={floor}'")
    return Finding("torch", "ok", f"{version}{with_cuda}")


def check_compiler(path: str | None, version: str = "", *, wanted: str | None, needed: bool = False) -> Finding:
    """Whether torch.compile finds a compiler.

    wanted: CXX, if the user chose another compiler than g++
    needed: whether the run uses torch.compile
    """
    if path is None:
        fix = "xcode-select --install" if sys.platform == "darwin" else _install("g++")
        state: State = "failed" if needed else "warning"
        what = f"there is no {f'{wanted} (CXX)' if wanted else 'g++'}, which torch.compile (--compile) needs"
        return Finding("compiler", state, what, "unset CXX" if wanted else fix)
    return Finding("compiler", "ok", f"{version or path} for --compile")


def find_compiler(wanted: str | None) -> str | None:
    """Look for a compiler the way torch.compile does."""
    return shutil.which(wanted or ("clang++" if sys.platform == "darwin" else "g++"))


def read_compiler(path: str | None) -> str:
    """A compiler's name and version."""
    if path is None:
        return ""
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter(answer.stdout.splitlines()), "")


def check_shared_memory(total_bytes: int | None, free_bytes: int, *, needed_bytes: int) -> Finding:
    """total_bytes: None if it does not exist"""
    check, fix = str(SHARED_MEMORY), as_root("mount -o remount,size=8G /dev/shm")
    if in_container():
        fix = "docker run --shm-size=8g ..."
    if total_bytes is None:
        return Finding(check, "warning", "does not exist: no in-memory snapshots, and NCCL fails on one host", fix)
    if free_bytes < needed_bytes:
        what = f"{count(free_bytes)}B of {count(total_bytes)}B are free: NCCL and in-memory snapshots need more"
        return Finding(check, "warning", what, fix if total_bytes < needed_bytes else f"du -sh {SHARED_MEMORY}/*")
    return Finding(check, "ok", f"{count(free_bytes)}B of {count(total_bytes)}B free")


def read_shared_memory() -> tuple[int | None, int]:
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return None, 0
    return usage.total, usage.free


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The disk of a folder that may not exist yet."""

    folder: Path
    existing: Path
    """The folder itself, or its nearest existing parent."""
    error: OSError | None = None
    """Why it is not writable."""
    free_bytes: int = 0
    bytes_per_s: float | None = None
    """None: not measured."""
    kind: str = ""
    """The file system."""
    roomier: Path | None = None
    """A place with more space."""


def measure_disk(folder: Path, *, speed: bool) -> Disk:
    """speed: write and flush a sample, which takes a moment; otherwise only check that the folder is writable"""
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    kind, roomier = _file_systems(existing)
    try:
        free_bytes = shutil.disk_usage(existing).free
        with tempfile.TemporaryFile(dir=existing) as file:
            rate = _write_speed(file.fileno(), min(_SAMPLE_BYTES, free_bytes // 4)) if speed else None
    except OSError as error:
        return Disk(folder=folder, existing=existing, error=error, kind=kind, roomier=roomier)
    return Disk(folder=folder, existing=existing, free_bytes=free_bytes, bytes_per_s=rate, kind=kind, roomier=roomier)


def _write_speed(descriptor: int, size_bytes: int) -> float | None:
    """Write speed of the disk itself in bytes per second; None if there is no space to measure it."""
    block, written = os.urandom(_MIB), 0  # not compressible
    began = time.perf_counter()
    while written < size_bytes and time.perf_counter() - began < _LONGEST_WRITE_S:
        written += os.write(descriptor, block)
        if written % (8 * _MIB) == 0:
            os.fsync(descriptor)  # otherwise only the page cache is measured
    os.fsync(descriptor)
    return written / (time.perf_counter() - began) if written else None


def _file_systems(folder: Path) -> tuple[str, Path | None]:
    """The type of file system of a folder, and a place with ten times as much space."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    own = next((mounts[path] for path in (folder, *folder.parents) if path in mounts), "")
    try:
        enough = 10 * shutil.disk_usage(folder).free
    except OSError:
        return own, None
    for path in (Path.home(), *(Path(part.mountpoint) for part in psutil.disk_partitions())):
        with suppress(OSError):
            if path.is_dir() and os.access(path, os.W_OK) and shutil.disk_usage(path).free > enough:
                return own, path
    return own, None


def check_disk(disk: Disk, *, needed_bytes: int = 0, what_for: str = "") -> Finding:
    """needed_bytes: disk space that the run will use, described by `what_for`"""
    where, other = disk.folder, f"--run_dir {_quoted((disk.roomier or Path.home()) / 'runs' / 'NAME')}"
    if disk.error is not None:
        what = f"{where} is not writable ({disk.error.strerror})"
        return Finding("disk", "failed", what, _writable(disk, other), code=UNWRITABLE)
    speed = "" if disk.bytes_per_s is None else f", writes {count(disk.bytes_per_s)}B/s"
    what = f"{where}{f' on {disk.kind}' if disk.kind else ''}: {count(disk.free_bytes)}B free{speed}"
    if disk.free_bytes < needed_bytes:
        fix = f"{command('train')} {other}" if disk.roomier else f"du -sh {_quoted(disk.existing)}/* | sort -h"
        return Finding("disk", "warning", f"{what}; {what_for} {count(needed_bytes)}B", fix)
    if disk.bytes_per_s is not None and disk.kind in ("tmpfs", "ramfs"):
        return Finding(
            "disk", "warning", f"{what}; it is in memory, and lost at the next reboot", f"{command('train')} {other}"
        )
    if disk.bytes_per_s is not None and disk.bytes_per_s < _SLOW_BYTES_PER_S:
        took_s = EXAMPLE_CHECKPOINT_BYTES / disk.bytes_per_s
        slow = f"a checkpoint of GPT-2 124M ({count(EXAMPLE_CHECKPOINT_BYTES)}B) takes {took_s:.0f} s"
        return Finding("disk", "warning", f"{what}; {slow}", f"{command('train')} {other}")
    return Finding("disk", "ok", what)


def _writable(disk: Disk, other: str) -> str:
    path = disk.existing
    if isinstance(disk.error, PermissionError):  # change only the run folder: its parents belong to others
        how = "chown" if path == disk.folder else "install -d -o"
        return f'sudo {how} "$(id -un)" {_quoted(disk.folder)}'
    if disk.error is not None and disk.error.errno == errno.EROFS:
        mount = next(above for above in (path, *path.parents) if above.is_mount())
        return as_root(f"mount -o remount,rw {_quoted(mount)}")
    return f"{command('train')} {other}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def check_open_files(soft: int, hard: int) -> Finding:
    """soft, hard: limits; negative: unlimited"""
    if 0 <= soft < _OPEN_FILES:
        fix = f"ulimit -n {65536 if hard < _OPEN_FILES else min(65536, hard)}"
        if 0 <= hard < _OPEN_FILES and os.geteuid() != 0:
            fix = "sudo prlimit --pid $$ --nofile=65536:65536"
        return Finding("open files", "warning", f"limit {soft}: ranks, sockets and data files need {_OPEN_FILES}", fix)
    return Finding("open files", "ok", "no limit" if soft < 0 else f"limit {soft:,}")


def read_open_files() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def check_clock(now_s: float, *, synchronised: bool | None) -> Finding:
    """synchronised: with a time server; None: unknown"""
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    fix = f"{_install('chrony')} && {as_root('chronyd')}"
    if Path("/run/systemd/system").exists():
        fix = as_root("timedatectl set-ntp true")
    if now_s < _RELEASED_S:
        return Finding("clock", "failed", f"{shown} is wrong: files and certificates seem to be from the future", fix)
    if synchronised is False:
        return Finding("clock", "warning", f"{shown}, not synchronized: clocks of hosts drift apart", fix)
    return Finding("clock", "ok", f"{shown}, {'synchronized' if synchronised else 'unknown whether synchronized'}")


class _Timex(ctypes.Structure):
    """The beginning of the kernel's struct timex, with space for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 512),
    )


def read_synchronised() -> bool | None:
    """Whether the clock is synchronized; None if the kernel does not say."""
    try:
        about = _Timex()
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(about))  # modes 0: read only
    except (OSError, AttributeError):
        return None
    return None if state < 0 else not about.status & _STA_UNSYNC


def check_interfaces(interfaces: Sequence[Interface], *, name: str, own_address: str | None) -> list[Finding]:
    """own_address: what this machine's name resolves to"""
    findings = []
    for interface in interfaces:
        if interface.is_loopback or interface.is_virtual or not interface.is_up or not interface.addresses:
            continue
        speed = f", {interface.speed_mbit / 1000:g} Gbit/s" if interface.speed_mbit > 0 else ""
        addresses = [each for each in interface.addresses if not each.startswith("fe80:")] or interface.addresses
        what = f"{interface.name} {', '.join(addresses)}, MTU {interface.mtu}{speed}"
        if interface.mtu < _SMALLEST_MTU:
            fix = as_root(f"ip link set dev {interface.name} mtu 1500")
            findings.append(
                Finding("network", "warning", f"{what}: packets this small are slow, and IPv6 does not allow them", fix)
            )
        else:
            findings.append(Finding("network", "ok", what))
    if not findings:
        return [Finding("network", "ok", "no interface with an address: this machine can only train alone")]
    if own_address is not None and is_loopback(own_address):
        first = next(
            interface.name
            for interface in interfaces
            if not interface.is_loopback and interface.addresses and interface.is_up
        )
        what = f"{name} resolves to {own_address} here; to train with other hosts: export GLOO_SOCKET_IFNAME={first}"
        findings.append(Finding("host name", "ok", what))
    return findings


def check_infiniband(ports: Sequence[InfiniBandPort], *, several_hosts: bool) -> list[Finding]:
    """All ports in one line; nothing if there are none."""
    if not ports:
        return []
    alike: dict[str, list[str]] = {}
    for port in ports:
        name = port.device if port.number == 1 else f"{port.device}:{port.number}"
        kind = "RoCE" if port.layer == "Ethernet" else port.layer
        state = f"active, {port.rate}" if port.is_active else port.state
        alike.setdefault(f"{kind} {state}", []).append(name)
    what = "; ".join(f"{', '.join(names)}: {state}" for state, names in alike.items())
    if several_hosts and not any(port.is_active for port in ports):
        what += ": NCCL uses TCP, many times slower between hosts"
        return [Finding("InfiniBand", "warning", what, "rdma link")]
    return [Finding("InfiniBand", "ok", what)]
