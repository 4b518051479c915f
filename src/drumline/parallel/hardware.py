"""What a run computes on and with: device, number format, peak speed, memory in use, versions."""

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
    """The format of matrix products. On a CPU `auto` is float32: without AMX, bfloat16 is many times slower there."""
    if wanted == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if fast else torch.float32
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype


def allow_tf32() -> None:
    """TF32 for the products that stay float32, where the hardware has it: several times faster, 10 bits of mantissa."""
    torch.set_float32_matmul_precision("high")


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Dense peak in FLOP/s, None where it is not known."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    from drumline.parallel.gpus import peak_of

    return peak_of(torch.cuda.get_device_name(device))


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has held: on the GPU if it computes there, else resident in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions() -> dict[str, str]:
    """Written into checkpoints, and compared between ranks."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"  # type: ignore[no-untyped-call]
    return {
        "drumline": drumline.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "nccl": nccl,
    }
