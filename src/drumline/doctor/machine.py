"""What this machine is like apart from its GPUs: each check is given what was measured, and judges it.

The functions named read_* and measure_* look at the machine; those named check_* judge what they are given, so they can
be asked about a machine that is not there.
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
from drumline.units import count

_GIB = 1 << 30
_MIB = 1 << 20
TORCH_FLOOR = (2, 11)
SHARED_MEMORY = Path("/dev/shm")
SHARED_BYTES = _GIB
"""What should be free there for snapshots and for NCCL, which takes megabytes for each pair of GPUs; Docker's default
are 64 MiB."""
_OPEN_FILES = 1024
_RELEASED_S = 1_767_225_600.0
"""The beginning of 2026: no right clock shows less."""
_STA_UNSYNC = 0x40
_SLOW_BYTES_PER_S = 30e6
EXAMPLE_CHECKPOINT_BYTES = 1_500_000_000
"""Of GPT-2 124M: weights and AdamW's two moments."""
_SAMPLE_BYTES = 64 * _MIB
_LONGEST_WRITE_S = 3.0
_NO_LIMIT = 1 << 60
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
    """The machine in a line.

    allowed_cores: what a container's limit or an affinity leaves of them
    threads:       OMP_NUM_THREADS, None where it is not set
    limit_bytes:   a container's limit of memory
    """
    what = (
        f"{socket.gethostname()}: {platform.system()} {platform.release().split('-')[0]}, {_of(allowed_cores, cores)}"
    )
    limited = (
        f" of the machine's {memory_bytes / _GIB:.0f}, a limit of its container" if limit_bytes < memory_bytes else ""
    )
    what += f", {min(memory_bytes, limit_bytes) / _GIB:.1f} GiB of memory{limited}"
    most = max(1, int(allowed_cores))
    if most < cores and (threads or cores) > most:
        what += f"; torch would start {threads or cores} threads, which then wait for each other"
        return Finding("system", "warning", what, f"export OMP_NUM_THREADS={most}")
    return Finding("system", "ok", what)


def _of(allowed: float, cores: int) -> str:
    return f"{cores} cores" if allowed >= cores else f"{allowed:g} of {cores} cores"


def read_limits(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> tuple[float, int]:
    """The cores and the bytes of memory that this process's control groups, and those above them, leave it."""
    cores, memory_bytes = float("inf"), _NO_LIMIT
    try:
        groups = [line.split(":", 2)[1:] for line in proc.read_text().splitlines()]
    except OSError:
        return cores, memory_bytes
    for controllers, name in groups:
        base = root / controllers if controllers else root  # the second is cgroup v2
        path = base / name.lstrip("/")
        for folder in (path, *(above for above in path.parents if above.is_relative_to(base))):
            quota, _, period = _read(folder / "cpu.max").partition(" ")
            quota, period = quota or _read(folder / "cpu.cfs_quota_us"), period or _read(folder / "cpu.cfs_period_us")
            if quota.isdigit() and period.isdigit():
                cores = min(cores, int(quota) / int(period))
            limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
            if limit.isdigit():
                memory_bytes = min(memory_bytes, int(limit))
    return cores, memory_bytes


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def read_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else psutil.cpu_count() or 1


def check_torch(version: str, *, cuda: str | None, nccl: str) -> Finding:
    numbers = tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2])
    with_cuda = f", CUDA {cuda}, NCCL {nccl}" if cuda else ""
    if numbers < TORCH_FLOOR:
        floor = ".".join(map(str, TORCH_FLOOR))
        return Finding("torch", "failed", f"{version}: older than {floor}", f"pip install 'torch>={floor}'")
    return Finding("torch", "ok", f"{version}{with_cuda}")


def check_compiler(path: str | None, version: str = "", *, wanted: str | None, needed: bool = False) -> Finding:
    """Whether torch finds a compiler.

    wanted: CXX, where the user chooses another than g++
    needed: whether a run is to compile
    """
    if path is None:
        fix = "xcode-select --install" if sys.platform == "darwin" else _install("g++")
        state: State = "failed" if needed else "warning"
        what = f"there is no {f'{wanted} (CXX)' if wanted else 'g++'}, which torch.compile (--compile) needs"
        return Finding("compiler", state, what, "unset CXX" if wanted else fix)
    return Finding("compiler", "ok", f"{version or path} for --compile")


def find_compiler(wanted: str | None) -> str | None:
    """As torch.compile looks for it."""
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
    """total_bytes: None where there is none"""
    check, fix = str(SHARED_MEMORY), as_root("mount -o remount,size=8G /dev/shm")
    if in_container():
        fix = "docker run --shm-size=8g ..."
    if total_bytes is None:
        return Finding(check, "warning", "not there: no snapshots in memory, and NCCL fails on one host", fix)
    if free_bytes < needed_bytes:
        what = f"{count(free_bytes)}B of {count(total_bytes)}B are free: NCCL and snapshots in memory need more"
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
    """The disk that a folder lies on, or would."""

    folder: Path
    existing: Path
    """The folder itself, or the nearest above it that is there."""
    error: OSError | None = None
    """Why nothing can be written there."""
    free_bytes: int = 0
    bytes_per_s: float | None = None
    """None: not measured."""
    kind: str = ""
    """The file system."""
    roomier: Path | None = None
    """A place with more room."""


def measure_disk(folder: Path, *, speed: bool) -> Disk:
    """speed: write a sample and flush it, which takes a moment; else only find out whether something can be written"""
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
    """Bytes per second to the disk itself; None if there is no room to measure it."""
    block, written = os.urandom(_MIB), 0  # nothing that a file system could make smaller
    began = time.perf_counter()
    while written < size_bytes and time.perf_counter() - began < _LONGEST_WRITE_S:
        written += os.write(descriptor, block)
        if written % (8 * _MIB) == 0:
            os.fsync(descriptor)  # else a slow disk takes all at once, and then its time
    os.fsync(descriptor)
    return written / (time.perf_counter() - began) if written else None


def _file_systems(folder: Path) -> tuple[str, Path | None]:
    """The kind of file system of a folder, and where there is ten times as much room."""
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
    """needed_bytes: what a run will keep there, as `what_for` says it"""
    where, other = disk.folder, f"--run_dir {_quoted((disk.roomier or Path.home()) / 'runs' / 'NAME')}"
    if disk.error is not None:
        what = f"{where} cannot be written ({disk.error.strerror})"
        return Finding("disk", "failed", what, _writable(disk, other), code=UNWRITABLE)
    speed = "" if disk.bytes_per_s is None else f", writes {count(disk.bytes_per_s)}B/s"
    what = f"{where}{f' on {disk.kind}' if disk.kind else ''}: {count(disk.free_bytes)}B free{speed}"
    if disk.free_bytes < needed_bytes:
        fix = f"drumline train {other}" if disk.roomier else f"du -sh {_quoted(disk.existing)}/* | sort -h"
        return Finding("disk", "warning", f"{what}; {what_for} {count(needed_bytes)}B", fix)
    if disk.bytes_per_s is not None and disk.kind in ("tmpfs", "ramfs"):
        return Finding(
            "disk", "warning", f"{what}; it is memory, and lost with the next restart", f"drumline train {other}"
        )
    if disk.bytes_per_s is not None and disk.bytes_per_s < _SLOW_BYTES_PER_S:
        took_s = EXAMPLE_CHECKPOINT_BYTES / disk.bytes_per_s
        slow = f"a checkpoint of GPT-2 124M ({count(EXAMPLE_CHECKPOINT_BYTES)}B) takes {took_s:.0f} s"
        return Finding("disk", "warning", f"{what}; {slow}", f"drumline train {other}")
    return Finding("disk", "ok", what)


def _writable(disk: Disk, other: str) -> str:
    path = disk.existing
    if isinstance(disk.error, PermissionError):  # the run's folder alone: what lies above it is others'
        how = "chown" if path == disk.folder else "install -d -o"
        return f'sudo {how} "$(id -un)" {_quoted(disk.folder)}'
    if disk.error is not None and disk.error.errno == errno.EROFS:
        mount = next(above for above in (path, *path.parents) if above.is_mount())
        return as_root(f"mount -o remount,rw {_quoted(mount)}")
    return f"drumline train {other}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def check_open_files(soft: int, hard: int) -> Finding:
    """soft, hard: limits, negative for none"""
    if 0 <= soft < _OPEN_FILES:
        fix = f"ulimit -n {65536 if hard < _OPEN_FILES else min(65536, hard)}"
        if 0 <= hard < _OPEN_FILES and os.geteuid() != 0:
            fix = "sudo prlimit --pid $$ --nofile=65536:65536"
        return Finding(
            "open files", "warning", f"at most {soft}: ranks, sockets and data files need {_OPEN_FILES}", fix
        )
    return Finding("open files", "ok", "no limit" if soft < 0 else f"at most {soft:,}")


def read_open_files() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def check_clock(now_s: float, *, synchronised: bool | None) -> Finding:
    """synchronised: by a time server; None: not known"""
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    fix = f"{_install('chrony')} && {as_root('chronyd')}"
    if Path("/run/systemd/system").exists():
        fix = as_root("timedatectl set-ntp true")
    if now_s < _RELEASED_S:
        return Finding("clock", "failed", f"{shown} is long past: files and certificates look as if of the future", fix)
    if synchronised is False:
        return Finding("clock", "warning", f"{shown}, kept by no time server: hosts' clocks drift apart", fix)
    return Finding("clock", "ok", f"{shown}, {'synchronised' if synchronised else 'not known whether synchronised'}")


class _Timex(ctypes.Structure):
    """The beginning of the kernel's struct timex, and room for the rest."""

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
    """Whether a time server keeps the clock; None where the kernel does not say."""
    try:
        about = _Timex()
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(about))  # modes 0: reads only
    except (OSError, AttributeError):
        return None
    return None if state < 0 else not about.status & _STA_UNSYNC


def check_interfaces(interfaces: Sequence[Interface], *, name: str, own_address: str | None) -> list[Finding]:
    """own_address: what the name of this machine stands for"""
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
                Finding("network", "warning", f"{what}: packets this small are slow, IPv6 refuses them", fix)
            )
        else:
            findings.append(Finding("network", "ok", what))
    if not findings:
        return [Finding("network", "ok", "no interface with an address: this machine trains alone")]
    if own_address is not None and is_loopback(own_address):
        first = next(
            interface.name
            for interface in interfaces
            if not interface.is_loopback and interface.addresses and interface.is_up
        )
        what = (
            f"{name} stands for {own_address} here; should it train with other hosts: export GLOO_SOCKET_IFNAME={first}"
        )
        findings.append(Finding("host name", "ok", what))
    return findings


def check_infiniband(ports: Sequence[InfiniBandPort], *, several_hosts: bool) -> list[Finding]:
    """All ports in one line; nothing where there are none."""
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
        what += ": NCCL goes over TCP, many times slower between hosts"
        return [Finding("InfiniBand", "warning", what, "rdma link")]
    return [Finding("InfiniBand", "ok", what)]
