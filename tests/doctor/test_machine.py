"""Checks of a machine, asked about machines that are broken in every way one can be."""

from __future__ import annotations

import errno
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.doctor.machine import (
    Disk,
    check_clock,
    check_compiler,
    check_disk,
    check_infiniband,
    check_interfaces,
    check_open_files,
    check_shared_memory,
    check_system,
    check_torch,
    measure_disk,
    read_open_files,
    read_synchronised,
)
from drumline.network.interfaces import InfiniBandPort, Interface, find_infiniband, is_loopback

GIB = 1 << 30
CPU = torch.device("cpu")


def test_a_machine_in_a_line() -> None:
    finding = check_system(cores=8, allowed_cores=8, threads=None, memory_bytes=32 * GIB, limit_bytes=64 * GIB)
    assert finding.state == "ok" and "8 cores, 32.0 GiB of memory" in finding.what


def test_a_container_with_fewer_cores_than_torch_would_start_threads_is_told_the_number() -> None:
    limits: dict[str, Any] = {"cores": 64, "allowed_cores": 2.5, "memory_bytes": 256 * GIB, "limit_bytes": 8 * GIB}
    finding = check_system(threads=None, **limits)
    assert finding.state == "warning" and finding.fix == "export OMP_NUM_THREADS=2"
    assert "2.5 of 64 cores" in finding.what and "8.0 GiB of memory of the machine's 256" in finding.what
    assert check_system(threads=2, **limits).state == "ok"


def test_a_torch_that_is_too_old_is_told_what_to_install() -> None:
    assert check_torch("2.10.1+cu128", cuda="12.8", nccl="2.27").fix == "pip install 'torch>=2.11'"
    assert check_torch("2.11.0", cuda="12.8", nccl="2.27").what == "2.11.0, CUDA 12.8, NCCL 2.27"
    assert check_torch("3.0.0a0+git123", cuda=None, nccl="none").state == "ok"


def test_no_compiler_is_a_warning_and_ends_only_a_run_that_compiles() -> None:
    finding = check_compiler(None, wanted=None)
    assert finding.state == "warning" and "g++" in finding.fix
    assert check_compiler(None, wanted=None, needed=True).state == "failed"
    assert check_compiler(None, wanted="icpx").fix == "unset CXX"
    assert check_compiler("/usr/bin/g++", "g++ 12", wanted=None).what == "g++ 12 for --compile"


def test_little_shared_memory_is_told_how_to_get_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.doctor.machine.in_container", lambda: True)
    finding = check_shared_memory(64 << 20, 64 << 20, needed_bytes=GIB)
    assert finding.state == "warning" and finding.fix == "docker run --shm-size=8g ..." and "67.1MB" in finding.what
    monkeypatch.setattr("drumline.doctor.machine.in_container", lambda: False)
    assert check_shared_memory(None, 0, needed_bytes=GIB).fix.endswith("mount -o remount,size=8G /dev/shm")
    assert check_shared_memory(8 * GIB, 1000, needed_bytes=GIB).fix == "du -sh /dev/shm/*"
    assert check_shared_memory(8 * GIB, 8 * GIB, needed_bytes=GIB).state == "ok"


def test_the_disk_of_a_folder_that_is_not_there_yet_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    disk = measure_disk(tmp_path / "runs" / "new", speed=True)
    assert disk.error is None and disk.existing == tmp_path and disk.bytes_per_s and disk.free_bytes > 0
    assert list(tmp_path.iterdir()) == []
    assert measure_disk(tmp_path, speed=False).bytes_per_s is None


def test_a_folder_that_cannot_be_is_failed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding = check_disk(measure_disk(tmp_path / "file" / "run", speed=False))
    assert (
        finding.state == "failed"
        and "Not a directory" in finding.what
        and finding.fix.startswith("drumline train --run_dir")
    )


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), 'sudo install -d -o "$(id -un)" /tmp/run'),
        (OSError(errno.EROFS, "Read-only file system"), "mount -o remount,rw /"),
        (OSError(errno.ENOSPC, "No space left on device"), "drumline train --run_dir /data/runs/NAME"),
    ],
)
def test_a_disk_that_takes_nothing_is_told_what_to_type(error: OSError, fix: str) -> None:
    disk = Disk(folder=Path("/tmp/run"), existing=Path("/tmp"), error=error, roomier=Path("/data"))
    finding = check_disk(disk)
    assert (
        finding.state == "failed"
        and finding.what == f"/tmp/run is not writable ({error.strerror})"
        and fix in finding.fix
    )


def test_a_folder_of_somebody_else_is_told_to_take_over_that_folder_and_none_above_it() -> None:
    denied = PermissionError(errno.EACCES, "Permission denied")
    absent = Disk(folder=Path("/my runs/x"), existing=Path("/"), error=denied)
    assert check_disk(absent).fix == "sudo install -d -o \"$(id -un)\" '/my runs/x'"
    there = Disk(folder=Path("/my runs/x"), existing=Path("/my runs/x"), error=denied)
    assert check_disk(there).fix == "sudo chown \"$(id -un)\" '/my runs/x'"


def test_paths_in_what_to_type_are_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    where: dict[str, Any] = {"folder": Path("/my runs/x"), "existing": Path("/my runs")}
    assert check_disk(Disk(**where), needed_bytes=1).fix == "du -sh '/my runs'/* | sort -h"
    roomy = check_disk(Disk(**where, roomier=Path("/big disk")), needed_bytes=1)
    assert roomy.fix == "drumline train --run_dir '/big disk/runs/NAME'"
    monkeypatch.setattr(Path, "is_mount", lambda path: path == Path("/my runs"))
    read_only = check_disk(Disk(**where, error=OSError(errno.EROFS, "Read-only file system")))
    assert read_only.fix.endswith("mount -o remount,rw '/my runs'")


def test_a_disk_that_is_full_slow_or_memory_is_a_warning() -> None:
    where: dict[str, Any] = {"folder": Path("/runs"), "existing": Path("/")}
    full = Disk(**where, free_bytes=10**6)
    finding = check_disk(full, needed_bytes=10**9, what_for="checkpoints take")
    assert (
        finding.state == "warning"
        and "1.0MB free; checkpoints take 1.0GB" in finding.what
        and finding.fix.startswith("du ")
    )
    slow = check_disk(Disk(**where, free_bytes=10**12, bytes_per_s=10e6, roomier=Path("/data")))
    assert slow.state == "warning" and "takes 150 s" in slow.what and "/data" in slow.fix
    memory = check_disk(Disk(**where, free_bytes=10**12, bytes_per_s=1e9, kind="tmpfs"))
    assert memory.state == "warning" and "lost at the next reboot" in memory.what
    assert check_disk(Disk(**where, free_bytes=10**12, bytes_per_s=1e9, kind="ext4")).state == "ok"


def test_few_open_files_are_told_how_to_have_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert check_open_files(256, 4096).fix == "ulimit -n 4096"
    assert check_open_files(256, resource.RLIM_INFINITY).fix == "ulimit -n 65536"
    assert check_open_files(256, 256).fix == "sudo prlimit --pid $$ --nofile=65536:65536"
    assert check_open_files(1024, 1024).state == check_open_files(-1, -1).state == "ok"
    assert check_open_files(*read_open_files()).check == "open files"


def test_a_clock_of_another_year_fails_and_one_that_nobody_keeps_is_a_warning() -> None:
    now = 1_800_000_000.0
    assert check_clock(0.0, synchronised=True).state == "failed"
    assert check_clock(now, synchronised=False).state == "warning" and check_clock(now, synchronised=False).fix
    assert check_clock(now, synchronised=None).state == check_clock(now, synchronised=True).state == "ok"
    assert read_synchronised() in (True, False, None)
    assert check_clock(time.time(), synchronised=True).state == "ok"


def test_each_part_of_what_to_type_against_a_clock_is_typed_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    first, second = check_clock(0.0, synchronised=None).fix.split(" && ")
    assert first.startswith("sudo ") and first.endswith(" chrony") and second == "sudo chronyd"


def test_network_interfaces_are_shown_with_addresses_and_mtu() -> None:
    eth = Interface("eth1", ("10.0.0.5", "fe80::1"), 9000, True, 25000)
    others = (Interface("docker0", ("172.17.0.1",), 1500, True), Interface("lo", ("127.0.0.1",), 65536, True))
    (finding,) = check_interfaces([eth, *others], name="a", own_address="10.0.0.5")
    assert finding.state == "ok" and finding.what == "eth1 10.0.0.5, MTU 9000, 25 Gbit/s"
    (small,) = check_interfaces([Interface("eth1", ("10.0.0.5",), 576, True)], name="a", own_address=None)
    assert small.state == "warning" and small.fix.endswith("ip link set dev eth1 mtu 1500")
    (alone,) = check_interfaces(others, name="a", own_address="127.0.0.1")
    assert alone.state == "ok" and "alone" in alone.what


def test_a_host_name_that_stands_for_loopback_is_a_remark() -> None:
    for address in ("127.0.1.1", "::1"):
        _, finding = check_interfaces([Interface("eth1", ("10.0.0.5",), 1500, True)], name="a", own_address=address)
        assert finding.state == "ok" and address in finding.what and "export GLOO_SOCKET_IFNAME=eth1" in finding.what


def test_loopback_is_known_by_its_addresses_of_either_kind() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.0.1.1", "::1", "[::1]", "::ffff:127.0.0.1", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.5", "fe80::1", "fe80::1%eth0", "::", "127.example.org", "host-a", "")))


def test_infiniband_is_one_line_with_the_state_of_each_port(tmp_path: Path) -> None:
    ports = {
        "mlx5_0/ports/1": ("4: ACTIVE", "InfiniBand", "200 Gb/sec (4X HDR)"),
        "mlx5_1/ports/1": ("4: ACTIVE", "InfiniBand", "200 Gb/sec (4X HDR)"),
        "mlx5_2/ports/2": ("1: DOWN", "Ethernet", "40 Gb/sec (4X QDR)"),
    }
    for name, values in ports.items():
        (tmp_path / name).mkdir(parents=True)
        for file, value in zip(("state", "link_layer", "rate"), values, strict=True):
            (tmp_path / name / file).write_text(value + "\n")
    (finding,) = check_infiniband(find_infiniband(tmp_path), several_hosts=True)
    assert finding.state == "ok" and finding.check == "InfiniBand"
    assert finding.what == "mlx5_0, mlx5_1: InfiniBand active, 200 Gb/sec; mlx5_2:2: RoCE DOWN"
    assert check_infiniband(find_infiniband(tmp_path / "absent"), several_hosts=True) == []


def test_infiniband_without_an_active_port_is_a_warning_between_hosts() -> None:
    ports = [InfiniBandPort("mlx5_0", 1, "INIT", "InfiniBand", "200 Gb/sec")]
    (finding,) = check_infiniband(ports, several_hosts=True)
    assert finding.state == "warning" and "mlx5_0: InfiniBand INIT" in finding.what and finding.fix == "rdma link"
    (alone,) = check_infiniband(ports, several_hosts=False)
    assert alone.state == "ok" and alone.what == "mlx5_0: InfiniBand INIT"
