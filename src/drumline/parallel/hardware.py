"""What this machine computes on: device, number format, peak speed, memory in use."""

from __future__ import annotations

import os
import resource
import sys

import torch

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


def is_hopper(device: torch.device) -> bool:
    """Whether a device is an H100, an H200 or their like, which some kernels are made for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def fix_arithmetic(device: torch.device) -> None:
    """Make results independent of the threads a launcher gave us, and of the order in which a GPU's threads add."""
    torch.set_num_threads(1)  # a matrix product cut over another number of threads rounds differently
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def quicken_pinning() -> None:
    """Let torch pin memory without holding up the GPU, unless somebody has settled how it allocates.

    The driver takes no launches while it finds and pins gigabytes for the first checkpoint, which cost a run 0.65 s in
    its first steps. Pages that are there already are pinned in a fraction of that. torch reads this when it first
    touches CUDA.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        wanted = "pinned_use_cuda_host_register:True,pinned_num_register_threads:4"
        os.environ.setdefault("PYTORCH_ALLOC_CONF", wanted)


def allow_tf32() -> None:
    """TF32 for the products that stay float32, where the hardware has it: several times faster, 10 bits of mantissa."""
    torch.set_float32_matmul_precision("high")


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Dense peak in FLOP/s, None where it is not known."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    from drumline.parallel.peaks import PEAK_TFLOPS

    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in name), None)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has held: on the GPU if it computes there, else resident in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
