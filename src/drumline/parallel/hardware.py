"""What a run uses: device, dtype, peak FLOP/s, memory, versions."""

from __future__ import annotations

import platform
import resource
import sys

import torch

import drumline
from drumline.config import Device, Dtype
from drumline.errors import ConfigError


def pick_device(wanted: Device) -> torch.device:
    has = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if wanted == "auto":
        return torch.device(next(name for name in ("cuda", "mps", "cpu") if has[name]))
    if not has[wanted]:
        here = ", ".join(name for name in has if has[name])
        raise ConfigError(
            f"there is no {wanted} device on this machine (found: {here})", fix="use --device auto or --device cpu"
        )
    return torch.device(wanted)


def pick_dtype(wanted: Dtype, device: torch.device) -> torch.dtype:
    """The autocast dtype. On a CPU, `auto` is float32: without AMX, bfloat16 is many times slower there."""
    if wanted == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if fast else torch.float32
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype


def allow_tf32() -> None:
    """Use TF32 for matmuls that stay float32, if supported: several times faster, with a 10-bit mantissa."""
    torch.set_float32_matmul_precision("high")


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Dense peak in FLOP/s, None if unknown."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    from drumline.parallel.gpus import peak_of

    return peak_of(torch.cuda.get_device_name(device))


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: on the GPU if it uses one, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def versions() -> dict[str, str]:
    """Stored in checkpoints, and compared between ranks."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"  # type: ignore[no-untyped-call]
    return {
        "drumline": drumline.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "nccl": nccl,
    }
