"""Check this machine for training: everything in a few seconds, or the quick checks before every run."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from drumline.config import Device, Dtype, TrainConfig
from drumline.doctor import gpus, machine
from drumline.doctor.environment import BETWEEN_RANKS, Facts, check_variables
from drumline.doctor.finding import Finding
from drumline.doctor.load import RANKS_PER_CORE, check_load, read_load, too_many_ranks
from drumline.files import CHECKPOINT_PREFIX, RunFolder, read_limits
from drumline.network import find_infiniband, find_interfaces, gloo_address

if TYPE_CHECKING:  # imports torch, and the doctor must also report a torch that cannot be imported
    from drumline.parallel import Place

_ENDING = frozenset({"GLOO_SOCKET_IFNAME", "MASTER_PORT", "OMP_NUM_THREADS"})
"""Variables that, with a wrong value, keep every rank from its first step."""


def all_findings(folder: Path, environ: Mapping[str, str], *, several_hosts: bool = False) -> list[Finding]:
    """All findings about this machine, and about a folder for runs."""
    limits = read_limits()
    cores, interfaces, ports = machine.read_cores(), find_interfaces(), find_infiniband()
    smis, installed = gpus.read_smi(), gpus.installed_gpus()
    compiler = machine.find_compiler(environ.get("CXX"))
    threads = environ.get("OMP_NUM_THREADS", "")
    facts = Facts(
        interfaces=interfaces,
        cores=cores,
        gpus=len(smis) or installed,
        infiniband=sorted({port.device for port in ports}),
        several_hosts=several_hosts,
    )
    if "RANK" in environ:  # the launcher of this rank listens on MASTER_PORT itself
        facts = replace(facts, port_is_free=lambda port: True)
    return [
        machine.check_system(
            cores=psutil.cpu_count() or cores,
            allowed_cores=min(cores, limits[0]),
            threads=int(threads) if threads.isdigit() else None,
            memory_bytes=psutil.virtual_memory().total,
            limit_bytes=limits[1],
        ),
        check_load(read_load(), cores, environ),
        Finding("Python", "ok", f"{platform.python_version()}, {sys.executable}"),
        *_torch(environ, smis, installed=len(smis) or installed),
        machine.check_compiler(compiler, machine.read_compiler(compiler), wanted=environ.get("CXX")),
        machine.check_disk(
            machine.measure_disk(folder, speed=True),
            needed_bytes=2 * machine.EXAMPLE_CHECKPOINT_BYTES,
            what_for="two checkpoints of GPT-2 124M take",
        ),
        *_shared_memory(machine.SHARED_BYTES),
        machine.check_open_files(*machine.read_open_files()),
        machine.check_clock(time.time(), synchronised=machine.read_synchronised()),
        *machine.check_interfaces(interfaces, name=socket.gethostname(), own_address=gloo_address({}, interfaces)),
        *machine.check_infiniband(ports, several_hosts=several_hosts),
        *check_variables(environ, facts),
    ]


def _torch(environ: Mapping[str, str], smis: list[gpus.Smi], *, installed: int) -> list[Finding]:
    """torch and its devices; only the import error if torch cannot be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:
        why = " ".join(str(error).split())
        return [Finding("torch", "failed", f"cannot be imported: {why}", "pip install --force-reinstall torch")]
    cuda = torch.version.cuda
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda and torch.distributed.is_nccl_available() else "none"  # type: ignore[no-untyped-call]
    on_cpu = gpus.check_cpu_products(gpus.cpu_products())  # first: it forks, which must not happen after CUDA is in use
    trouble = gpus.cuda_trouble() if cuda else ""
    findings = [
        machine.check_torch(str(torch.__version__), cuda=cuda, nccl=nccl),
        gpus.check_cuda(built_for=cuda, trouble=trouble, installed=installed, environ=environ),
        *(gpus.look_at_gpus(environ, smis) if cuda and not trouble else []),
        on_cpu,
    ]
    if torch.backends.mps.is_available():
        findings.append(Finding("MPS", "ok", "available; --device auto uses it"))
    return findings


def quick_findings(
    environ: Mapping[str, str],
    *,
    folder: Path | None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    compiles: bool = False,
    ranks: int = 1,
    several_hosts: bool = False,
    needed_bytes: int = 0,
) -> list[Finding]:
    """The checks that take no time. Only what would make every run of this kind fail is a failure.

    folder:       the run folder; None if another host writes it
    ranks:        number of ranks to start here; 0 if this process trains itself
    needed_bytes: disk space that the run will use; 0: unknown
    """
    installed = 0 if device == "cpu" else gpus.installed_gpus()
    facts = Facts(
        interfaces=find_interfaces(),
        cores=machine.read_cores(),
        gpus=installed,
        infiniband=sorted({port.device for port in find_infiniband()}),
        several_hosts=several_hosts,
        compiles=compiles,
        resolves=lambda host: True,  # may be slow; a rank that cannot resolve rank 0's host reports it later
        port_is_free=lambda port: True,  # the launcher picks another
    )
    findings = [machine.check_open_files(*machine.read_open_files())]
    if folder is not None:
        findings.append(_room(folder, needed_bytes, several_hosts=several_hosts))
    if ranks > 0:  # without GPUs, only snapshots use shared memory, and the run itself checks that they fit
        findings += _shared_memory(machine.SHARED_BYTES if installed else 0)
    if ranks > RANKS_PER_CORE * facts.cores and _on_cpu(device):
        findings.append(too_many_ranks(ranks, facts.cores))
    if device == "cuda":
        findings.append(_cuda(environ, installed))
    if dtype == "bfloat16" and _on_cpu(device):
        findings.append(gpus.check_cpu_products(gpus.cpu_products(), needed=True))
    if compiles:
        wanted = environ.get("CXX")
        findings.append(machine.check_compiler(machine.find_compiler(wanted), wanted=wanted, needed=True))
    for finding in check_variables(environ, facts):
        ends = finding.check in _ENDING and ranks > 0
        findings.append(finding if ends or finding.state != "failed" else replace(finding, state="warning"))
    return findings


def _room(folder: Path, needed_bytes: int, *, several_hosts: bool) -> Finding:
    finding = machine.check_disk(
        machine.measure_disk(folder, speed=False),
        needed_bytes=max(0, needed_bytes - _held_bytes(folder)),
        what_for="the run's checkpoints will take about",
    )
    # An existing run continues even if it cannot save, and with several hosts only one keeps the run folder.
    survives = several_hosts or RunFolder(folder).lock.exists()
    return replace(finding, state="warning") if finding.state == "failed" and survives else finding


def _held_bytes(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in RunFolder(folder).checkpoints.glob(f"{CHECKPOINT_PREFIX}*/*"))
    except OSError:
        return 0


def _cuda(environ: Mapping[str, str], installed: int) -> Finding:
    import torch

    return gpus.check_cuda(
        built_for=torch.version.cuda,
        trouble=gpus.cuda_trouble() if torch.version.cuda else "",
        installed=installed,
        environ=environ,
        needed=True,
    )


def _on_cpu(device: Device) -> bool:
    import torch

    return device == "cpu" or (
        device == "auto" and not torch.cuda.is_available() and not torch.backends.mps.is_available()
    )


def _shared_memory(needed_bytes: int) -> list[Finding]:
    if sys.platform != "linux":
        return []
    return [machine.check_shared_memory(*machine.read_shared_memory(), needed_bytes=needed_bytes)]


def findings_before(config: TrainConfig, place: Place, *, ranks: int) -> list[Finding]:
    """The quick checks for a run that is about to start.

    place: rank and world size from the launcher
    ranks: number of ranks to start here; 0 if this process trains itself
    """
    from drumline.optim import checkpoints_bytes

    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return []
    alone = ranks == 0 and place.size == 1
    return quick_findings(
        {name: value for name, value in os.environ.items() if not (alone and name.startswith(BETWEEN_RANKS))},
        folder=Path(config.run.run_dir or "runs") if place.rank == 0 else None,
        device=config.run.device,
        dtype=config.run.dtype,
        compiles=config.run.compile,
        ranks=ranks,
        several_hosts=config.ranks.hosts != (1, 1),
        needed_bytes=checkpoints_bytes(config),
    )
