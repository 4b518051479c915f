"""Environment variables that affect torch, NCCL, gloo and drumline: what each does, and which values are harmful."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from posixpath import commonprefix

from drumline.doctor.finding import VARIABLE, Finding, State
from drumline.network import Interface, free_port, is_free, is_loopback

Verdict = tuple[State, str, str]
"""State, reason, and the command that fixes it."""
_FINE: Verdict = ("ok", "", "")

_ON_GPUS = ("NCCL_", "TORCH_NCCL_", "CUDA_", "PYTORCH_CUDA_", "NVIDIA_")
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(?![A-Z])(?!_FILE$)", re.IGNORECASE)
_PROXY_USER = re.compile(r"//[^/@\s]*@")
_LONGEST_VALUE = 60
_SHORTEST_TYPO = 10
"""Shorter names are one letter away from too much."""

MEANINGS = {
    "CUDA_DEVICE_ORDER": "how GPUs are numbered",
    "CUDA_LAUNCH_BLOCKING": "makes kernel launches synchronous",
    "CUDA_VISIBLE_DEVICES": "the GPUs this process may use",
    "CUBLAS_WORKSPACE_CONFIG": "cuBLAS workspace; a fixed size makes results reproducible",
    "CXX": "C++ compiler for --compile",
    "DRUMLINE_SECRET": "the secret of a run, the same on all its hosts",
    "DRUMLINE_SECRET_FILE": "the file with the secret of a run",
    "GLOO_SOCKET_IFNAME": "network interface for gloo",
    "HF_DATASETS_OFFLINE": "no downloads by the datasets library",
    "HF_HOME": "cache folder of Hugging Face libraries",
    "HF_HUB_OFFLINE": "no downloads from Hugging Face",
    "HTTP_PROXY": "downloads go through this proxy",
    "HTTPS_PROXY": "downloads go through this proxy",
    "KMP_AFFINITY": "pins OpenMP threads to cores",
    "LD_LIBRARY_PATH": "libraries found here take precedence over torch's own",
    "LD_PRELOAD": "libraries loaded into every process",
    "LOCAL_RANK": "set by a launcher: rank on this host",
    "MASTER_ADDR": "rendezvous host",
    "MASTER_PORT": "rendezvous port",
    "MKL_NUM_THREADS": "MKL threads, instead of OMP_NUM_THREADS",
    "NCCL_ALGO": "forces an NCCL algorithm instead of the best one for each size",
    "NCCL_BUFFSIZE": "NCCL buffer size per channel",
    "NCCL_CUMEM_ENABLE": "whether NCCL allocates memory with the cuMem API",
    "NCCL_DEBUG": "NCCL log level",
    "NCCL_DEBUG_FILE": "NCCL log file",
    "NCCL_IB_DISABLE": "disables InfiniBand and RoCE in NCCL",
    "NCCL_IB_GID_INDEX": "GID index for RoCE",
    "NCCL_IB_HCA": "InfiniBand devices for NCCL",
    "NCCL_MAX_NCHANNELS": "maximum number of NCCL channels (thread blocks)",
    "NCCL_MIN_NCHANNELS": "minimum number of NCCL channels (thread blocks)",
    "NCCL_NET": "NCCL network plugin",
    "NCCL_NET_GDR_LEVEL": "how close a NIC must be to a GPU for GPUDirect RDMA",
    "NCCL_NSOCKS_PERTHREAD": "NCCL sockets per thread",
    "NCCL_P2P_DISABLE": "disables peer-to-peer copies between GPUs in NCCL",
    "NCCL_P2P_LEVEL": "how close GPUs must be for peer-to-peer copies",
    "NCCL_PROTO": "forces an NCCL protocol instead of the best one for each size",
    "NCCL_SHM_DISABLE": "disables shared memory in NCCL",
    "NCCL_SOCKET_IFNAME": "network interfaces for NCCL",
    "NCCL_SOCKET_NTHREADS": "NCCL threads per connection",
    "NO_PROXY": "hosts that bypass the proxy",
    "NVIDIA_VISIBLE_DEVICES": "the GPUs that the container can see",
    "OMP_NUM_THREADS": "CPU threads per process",
    "ONEDNN_MAX_CPU_ISA": "newest CPU instruction set that oneDNN may use",
    "PYTHONHASHSEED": "hash seed of Python; does not affect drumline runs",
    "PYTHONPATH": "modules found here take precedence over installed ones",
    "PYTORCH_ALLOC_CONF": "configures torch's CUDA memory allocator",
    "PYTORCH_CUDA_ALLOC_CONF": "configures torch's CUDA memory allocator",
    "RANK": "set by a launcher: this process is one of its ranks",
    "TOKENIZERS_PARALLELISM": "whether tokenizers use several threads",
    "TORCHDYNAMO_DISABLE": "disables torch.compile: --compile has no effect",
    "TORCHINDUCTOR_CACHE_DIR": "cache folder of torch.compile",
    "TORCH_COMPILE_DISABLE": "disables torch.compile: --compile has no effect",
    "TORCH_CPP_LOG_LEVEL": "log level of torch's C++ code",
    "TORCH_DISTRIBUTED_DEBUG": "debug checks in torch.distributed",
    "TORCH_LOGS": "log level of torch components",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "what a rank does when NCCL fails",
    "TORCH_NCCL_BLOCKING_WAIT": "makes collectives block",
    "WANDB_DISABLED": "disables Weights & Biases",
    "WANDB_MODE": "Weights & Biases mode",
    "WORLD_SIZE": "set by a launcher: the number of ranks",
}
_FAMILIES = {
    "NCCL_": "read by NCCL",
    "GLOO_": "read by gloo",
    "TORCH_NCCL_": "read by torch for NCCL",
    "ONEDNN_": "read by oneDNN, which does matmuls on the CPU",
}
"""By prefix, for variables not listed."""

_HURTING: dict[str, dict[str, str]] = {
    "CUDA_LAUNCH_BLOCKING": {"1": "kernel launches are synchronous, which makes steps much slower; only for debugging"},
    "NCCL_P2P_DISABLE": {"1": "GPUs copy through host memory, several times slower"},
    "NCCL_SHM_DISABLE": {"1": "ranks on one host communicate over the network, several times slower"},
    "TORCH_DISTRIBUTED_DEBUG": {"DETAIL": "collectives are checked across ranks, which is slow; only for debugging"},
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": {"0": "a rank whose peer died blocks forever, until it counts as hung"},
    "TORCH_NCCL_BLOCKING_WAIT": {"1": "collectives block, so communication no longer overlaps with computation"},
}
"""Values that work, but slowly."""
_NOT_COMPILING = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
BETWEEN_RANKS = ("GLOO_", "MASTER_", "NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_")
"""Prefixes of variables that a single process does not read."""


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):
        return False


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the values are judged against."""

    interfaces: Sequence[Interface]
    cores: int
    gpus: int | None
    """In the machine, visible or not; None: unknown."""
    infiniband: Sequence[str] = ()
    """Names of the InfiniBand and RoCE devices."""
    several_hosts: bool = False
    compiles: bool = True
    """Whether the run uses, or may use, torch.compile."""
    resolves: Callable[[str], bool] = _resolves
    port_is_free: Callable[[int], bool] = is_free


def check_variables(environ: Mapping[str, str], facts: Facts) -> list[Finding]:
    """A finding for each relevant variable that is set, sorted by name."""
    findings = []
    for name, value in sorted(environ.items()):
        meant, meaning = _meant(name), _meaning(name)
        if meant is not None:
            why, fix = f"nothing reads it; {meant} is what exists", f"export {meant}=${name}; unset {name}"
            findings.append(Finding(name, "warning", f"{_shown(name, value)}: {why}", fix, code=VARIABLE))
        if meant is not None or meaning is None:
            continue
        idle = facts.gpus == 0 and name.startswith(_ON_GPUS)
        state, why, fix = _FINE if idle else _judge(name, value, facts)
        what = f"{_shown(name, value)}: {why or meaning}{', no effect without a GPU' if idle else ''}"
        findings.append(Finding(name, state, what, fix, code=VARIABLE))
    return findings


def _meaning(name: str) -> str | None:
    known = MEANINGS.get(name) or MEANINGS.get(name.upper() if name.lower().endswith("proxy") else "")
    return known or next((what for prefix, what in _FAMILIES.items() if name.startswith(prefix)), None)


def _meant(name: str) -> str | None:
    """The variable that a misspelled name is one letter away from; None where it is not misspelled."""
    if name in MEANINGS or len(name) < _SHORTEST_TYPO:
        return None
    return next((known for known in MEANINGS if _one_typo_apart(name, known)), None)


def _one_typo_apart(one: str, other: str) -> bool:
    """Whether a letter that is missing, too much or wrong, or two that are swapped, make the difference."""
    start = len(commonprefix([one, other]))
    end = len(commonprefix([one[start:][::-1], other[start:][::-1]]))
    parts = one[start : len(one) - end], other[start : len(other) - end]
    swapped = len(parts[0]) == 2 and parts[0] == parts[1][::-1]
    return one != other and (max(map(len, parts)) <= 1 or swapped)


def is_secret(name: str) -> bool:
    """Whether a variable of this name probably contains a secret."""
    return _SECRET.search(name) is not None


def masked(name: str, value: str) -> str:
    """A value that is safe to print: secrets are hidden, and so are the user and password of a proxy."""
    return "***" if is_secret(name) else _PROXY_USER.sub("//***@", value)


def _shown(name: str, value: str) -> str:
    """The value, safe to print."""
    if is_secret(name):
        return "is set (value hidden)"
    value = "".join(letter if letter.isprintable() else "?" for letter in masked(name, value))
    return (
        f"is {value if len(value) <= _LONGEST_VALUE else value[: _LONGEST_VALUE - 3] + '...'}" if value else "is empty"
    )


def _judge(name: str, value: str, facts: Facts) -> Verdict:
    rule = _RULES.get(name)
    if rule is not None:
        return rule(value.strip(), facts)
    why = _HURTING.get(name, {}).get(value.strip().upper())
    if name in _NOT_COMPILING and value.strip() == "1" and facts.compiles:
        why = "--compile has no effect"
    return ("warning", why, f"unset {name}") if why else _FINE


def _interfaces_rule(name: str) -> Callable[[str, Facts], Verdict]:
    def judge(value: str, facts: Facts) -> Verdict:
        if not value or value.startswith("^"):  # NCCL: all except these
            return _FINE
        wanted = tuple(value.lstrip("=").split(","))
        exact = name.startswith("GLOO") or value.startswith("=")
        named = [
            interface
            for interface in facts.interfaces
            if interface.name in wanted or (not exact and interface.name.startswith(wanted))
        ]
        lead_out = [interface for interface in facts.interfaces if interface.addresses and not interface.is_loopback]
        best = next((interface.name for interface in lead_out), "lo")
        if not named:
            there = ", ".join(interface.name for interface in facts.interfaces if interface.addresses)
            return "failed", f"this machine has no such network interface (it has {there})", f"export {name}={best}"
        if not any(interface.addresses for interface in named):
            return "failed", "this network interface has no address", f"export {name}={best}"
        if facts.several_hosts and all(interface.is_loopback for interface in named):
            return "warning", "other hosts cannot be reached through loopback", f"export {name}={best}"
        return _FINE

    return judge


def _visible_rule(value: str, facts: Facts) -> Verdict:
    name, gpus = "CUDA_VISIBLE_DEVICES", facts.gpus
    if value in ("", "-1", "NoDevFiles"):
        hidden = "all GPUs" if gpus is None else f"all {gpus} GPUs" if gpus > 1 else "the GPU"
        return "warning", f"hides {hidden}: training runs on the CPU", f"unset {name}"
    wanted = [entry.strip() for entry in value.split(",")]
    beyond = [entry for entry in wanted if gpus is not None and entry.isdigit() and int(entry) >= gpus]
    if beyond:
        kept = ",".join(entry for entry in wanted if entry not in beyond)
        there = f"there {'is' if gpus == 1 else 'are'} {gpus}, counted from 0"
        return "failed", f"there is no GPU {', '.join(beyond)} ({there})", f"export {name}={kept or 0}"
    return _FINE


def _threads_rule(name: str) -> Callable[[str, Facts], Verdict]:
    def judge(value: str, facts: Facts) -> Verdict:
        first = value.split(",", maxsplit=1)[0]
        if not first.isdigit() or int(first) < 1:
            return "failed", "not a number of threads", f"unset {name}"
        if int(first) > facts.cores:
            why = f"more threads than the {facts.cores} cores, which slows them down"
            return "warning", why, f"export {name}={facts.cores}"
        return _FINE

    return judge


def _address_rule(value: str, facts: Facts) -> Verdict:
    if not facts.resolves(value):
        fix = "export MASTER_ADDR=ADDRESS_OF_RANK_0" if facts.several_hosts else "unset MASTER_ADDR"
        return "failed", "this name does not resolve", fix
    if facts.several_hosts and is_loopback(value):
        return "warning", "each host would wait for itself", "export MASTER_ADDR=ADDRESS_OF_RANK_0"
    return _FINE


def _port_rule(value: str, facts: Facts) -> Verdict:
    if not value.isdigit() or not 0 < int(value) < 65536:
        return "failed", "not a port from 1 to 65535", f"export MASTER_PORT={free_port()}"
    if not facts.port_is_free(int(value)):
        return "warning", "this port is in use by another process", f"export MASTER_PORT={free_port()}"
    return _FINE


def _debug_rule(value: str, facts: Facts) -> Verdict:
    if value.upper() in ("INFO", "TRACE"):
        return "warning", "NCCL logs many lines on every rank", "unset NCCL_DEBUG"
    return _FINE


def _no_infiniband_rule(value: str, facts: Facts) -> Verdict:
    if value == "1" and facts.infiniband:
        why = f"NCCL ignores {', '.join(facts.infiniband)} and uses TCP, many times slower between hosts"
        return "warning", why, "unset NCCL_IB_DISABLE"
    return _FINE


def _infiniband_rule(value: str, facts: Facts) -> Verdict:
    if not value or value.startswith("^"):  # all except these
        return _FINE
    wanted = tuple(entry.split(":")[0] for entry in value.lstrip("=").split(",") if entry)
    exact = value.startswith("=")
    if any(device in wanted or (not exact and device.startswith(wanted)) for device in facts.infiniband):
        return _FINE
    there = f"has no such InfiniBand device (it has {', '.join(facts.infiniband)})"
    why = f"this machine {there if facts.infiniband else 'has no InfiniBand'}: NCCL uses TCP"
    return "warning", why, "unset NCCL_IB_HCA"


_RULES: dict[str, Callable[[str, Facts], Verdict]] = {
    "CUDA_VISIBLE_DEVICES": _visible_rule,
    "GLOO_SOCKET_IFNAME": _interfaces_rule("GLOO_SOCKET_IFNAME"),
    "MASTER_ADDR": _address_rule,
    "MASTER_PORT": _port_rule,
    "MKL_NUM_THREADS": _threads_rule("MKL_NUM_THREADS"),
    "NCCL_DEBUG": _debug_rule,
    "NCCL_IB_DISABLE": _no_infiniband_rule,
    "NCCL_IB_HCA": _infiniband_rule,
    "NCCL_SOCKET_IFNAME": _interfaces_rule("NCCL_SOCKET_IFNAME"),
    "OMP_NUM_THREADS": _threads_rule("OMP_NUM_THREADS"),
}
