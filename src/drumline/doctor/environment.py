"""Environment variables that change how torch, NCCL, gloo and drumline behave: what each does, and values that hurt."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from drumline.doctor.finding import VARIABLE, Finding, State
from drumline.network import Interface, free_port, is_free, is_loopback

Verdict = tuple[State, str, str]
"""Whether a value hurts, why, and the line to type against it."""
_FINE: Verdict = ("ok", "", "")

_ON_GPUS = ("NCCL_", "TORCH_NCCL_", "CUDA_", "PYTORCH_CUDA_", "NVIDIA_")
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(?![A-Z])", re.IGNORECASE)
_PROXY_USER = re.compile(r"//[^/@\s]*@")
_LONGEST_VALUE = 60

MEANINGS = {
    "CUDA_DEVICE_ORDER": "how GPUs are numbered",
    "CUDA_LAUNCH_BLOCKING": "wait for every GPU kernel",
    "CUDA_VISIBLE_DEVICES": "the GPUs this process may use",
    "CUBLAS_WORKSPACE_CONFIG": "cuBLAS's memory; fixed sizes make its results repeatable",
    "CXX": "the C++ compiler of --compile",
    "GLOO_SOCKET_IFNAME": "the network interface that ranks on CPUs use",
    "HF_DATASETS_OFFLINE": "no downloads by datasets",
    "HF_HOME": "where Hugging Face's downloads are kept",
    "HF_HUB_OFFLINE": "no downloads from Hugging Face",
    "HTTP_PROXY": "downloads go through this proxy",
    "HTTPS_PROXY": "downloads go through this proxy",
    "KMP_AFFINITY": "which cores threads stay on",
    "LD_LIBRARY_PATH": "libraries found here come before torch's own",
    "LD_PRELOAD": "libraries loaded into every process",
    "LOCAL_RANK": "set by a launcher: the number of this process on its host",
    "MASTER_ADDR": "the host where ranks meet",
    "MASTER_PORT": "the port where ranks meet",
    "MKL_NUM_THREADS": "threads of MKL, instead of OMP_NUM_THREADS",
    "NCCL_ALGO": "which algorithm NCCL sums with, instead of the best for each size",
    "NCCL_BUFFSIZE": "NCCL's buffer per channel",
    "NCCL_CUMEM_ENABLE": "how NCCL gets its memory",
    "NCCL_DEBUG": "how much NCCL says",
    "NCCL_DEBUG_FILE": "where NCCL says it",
    "NCCL_IB_DISABLE": "NCCL without InfiniBand and RoCE",
    "NCCL_IB_GID_INDEX": "which address of a RoCE device NCCL uses",
    "NCCL_IB_HCA": "which InfiniBand devices NCCL uses",
    "NCCL_MAX_NCHANNELS": "at most so many channels, each with a thread block of its own",
    "NCCL_MIN_NCHANNELS": "at least so many channels, each with a thread block of its own",
    "NCCL_NET": "which network plug-in NCCL uses",
    "NCCL_NET_GDR_LEVEL": "how near a network device must be for GPUs to send from their own memory",
    "NCCL_NSOCKS_PERTHREAD": "NCCL's TCP connections per thread",
    "NCCL_P2P_DISABLE": "NCCL without direct copies between GPUs",
    "NCCL_P2P_LEVEL": "how near GPUs must be to copy directly",
    "NCCL_PROTO": "which protocol NCCL sends with, instead of the best for each size",
    "NCCL_SHM_DISABLE": "NCCL without shared memory",
    "NCCL_SOCKET_IFNAME": "the network interfaces that NCCL uses",
    "NCCL_SOCKET_NTHREADS": "NCCL's threads per TCP connection",
    "NO_PROXY": "hosts that are reached without the proxy",
    "NVIDIA_VISIBLE_DEVICES": "the GPUs that a container is given",
    "OMP_NUM_THREADS": "threads of each process for work on the CPU",
    "ONEDNN_MAX_CPU_ISA": "the newest CPU instructions that matrix products use",
    "PYTHONHASHSEED": "Python's order of sets; drumline's runs do not depend on it",
    "PYTHONPATH": "modules found here come before those installed",
    "PYTORCH_ALLOC_CONF": "how torch keeps memory of GPUs",
    "PYTORCH_CUDA_ALLOC_CONF": "how torch keeps memory of GPUs",
    "RANK": "set by a launcher: this process is one of its ranks",
    "TOKENIZERS_PARALLELISM": "whether tokenizing takes all cores",
    "TORCHDYNAMO_DISABLE": "no compilation: --compile has no effect",
    "TORCHINDUCTOR_CACHE_DIR": "where compiled models are kept",
    "TORCH_COMPILE_DISABLE": "no compilation: --compile has no effect",
    "TORCH_CPP_LOG_LEVEL": "how much torch's own parts say",
    "TORCH_DISTRIBUTED_DEBUG": "what torch checks while ranks talk",
    "TORCH_LOGS": "how much torch's compiler says",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "what happens to a rank whose NCCL fails",
    "TORCH_NCCL_BLOCKING_WAIT": "a rank waits for every sum",
    "WANDB_DISABLED": "no reports to Weights & Biases",
    "WANDB_MODE": "how runs are reported to Weights & Biases",
    "WORLD_SIZE": "set by a launcher: the number of ranks",
}
_FAMILIES = {
    "NCCL_": "read by NCCL",
    "GLOO_": "read by gloo",
    "TORCH_NCCL_": "read by torch for NCCL",
    "ONEDNN_": "read by oneDNN, which computes matrix products on the CPU",
}
"""By how the name begins, for those not listed."""

_HURTING: dict[str, dict[str, str]] = {
    "CUDA_LAUNCH_BLOCKING": {"1": "every kernel is waited for, steps take far longer; it is for finding bugs"},
    "NCCL_P2P_DISABLE": {"1": "GPUs copy through the host's memory, several times slower"},
    "NCCL_SHM_DISABLE": {"1": "ranks of one host talk over the network interface, several times slower"},
    "TORCH_DISTRIBUTED_DEBUG": {"DETAIL": "every sum is compared between ranks first, which is slow; it is for bugs"},
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": {"0": "a rank whose peer died waits for ever, and is found only as hung"},
    "TORCH_NCCL_BLOCKING_WAIT": {"1": "steps wait for every sum instead of computing meanwhile"},
}
"""Values with which a run works, but badly."""
_NOT_COMPILING = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
BETWEEN_RANKS = ("GLOO_", "MASTER_", "NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_")
"""How the names begin of what a process that trains alone does not read."""


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):
        return False


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What values are judged by."""

    interfaces: Sequence[Interface]
    cores: int
    gpus: int | None
    """In the machine, whoever may use them; None: not known."""
    infiniband: Sequence[str] = ()
    """The names of the devices for InfiniBand and RoCE."""
    several_hosts: bool = False
    compiles: bool = True
    """Whether a run is to compile, or may."""
    resolves: Callable[[str], bool] = _resolves
    port_is_free: Callable[[int], bool] = is_free


def check_variables(environ: Mapping[str, str], facts: Facts) -> list[Finding]:
    """A finding for each variable that is set and matters, by name."""
    findings = []
    for name, value in sorted(environ.items()):
        meaning = _meaning(name)
        if meaning is None:
            continue
        idle = facts.gpus == 0 and name.startswith(_ON_GPUS)
        state, why, fix = _FINE if idle else _judge(name, value, facts)
        what = f"{_shown(name, value)}: {why or meaning}{', of no effect without a GPU' if idle else ''}"
        findings.append(Finding(name, state, what, fix, code=VARIABLE))
    return findings


def _meaning(name: str) -> str | None:
    known = MEANINGS.get(name) or MEANINGS.get(name.upper() if name.lower().endswith("proxy") else "")
    return known or next((what for prefix, what in _FAMILIES.items() if name.startswith(prefix)), None)


def is_secret(name: str) -> bool:
    """Whether a variable of this name is likely to hold what nobody should read."""
    return _SECRET.search(name) is not None


def masked(name: str, value: str) -> str:
    """A value without what others should not see: all of a secret, and the user and password of a proxy."""
    return "***" if is_secret(name) else _PROXY_USER.sub("//***@", value)


def _shown(name: str, value: str) -> str:
    """The value, without what others should not see."""
    if is_secret(name):
        return "is set, its value not shown"
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
        if not value or value.startswith("^"):  # NCCL: all but these
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
            return "warning", "no other host can be reached through loopback", f"export {name}={best}"
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
            why = f"more threads than the {facts.cores} cores, which slows each of them"
            return "warning", why, f"export {name}={facts.cores}"
        return _FINE

    return judge


def _address_rule(value: str, facts: Facts) -> Verdict:
    if not facts.resolves(value):
        fix = "export MASTER_ADDR=ADDRESS_OF_RANK_0" if facts.several_hosts else "unset MASTER_ADDR"
        return "failed", "this name has no address", fix
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
        return "warning", "NCCL writes many lines from every rank", "unset NCCL_DEBUG"
    return _FINE


def _no_infiniband_rule(value: str, facts: Facts) -> Verdict:
    if value == "1" and facts.infiniband:
        why = f"NCCL leaves {', '.join(facts.infiniband)} alone and goes over TCP, many times slower between hosts"
        return "warning", why, "unset NCCL_IB_DISABLE"
    return _FINE


def _infiniband_rule(value: str, facts: Facts) -> Verdict:
    if not value or value.startswith("^"):  # all but these
        return _FINE
    wanted = tuple(entry.split(":")[0] for entry in value.lstrip("=").split(",") if entry)
    exact = value.startswith("=")
    if any(device in wanted or (not exact and device.startswith(wanted)) for device in facts.infiniband):
        return _FINE
    there = f"has no such InfiniBand device (it has {', '.join(facts.infiniband)})"
    why = f"this machine {there if facts.infiniband else 'has no InfiniBand'}: NCCL goes over TCP"
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
