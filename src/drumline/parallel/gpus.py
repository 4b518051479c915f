"""This process's GPU, selected before anything else uses CUDA, and its peak FLOP/s."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

# Dense bf16 peak in TFLOP/s from the vendors' data sheets, by a part of the name that CUDA reports.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
    "V100": 125.0,
    "T4": 65.0,
}
"""For MFU. To add a GPU, add a line."""


def take_gpu(local_rank: int) -> torch.device:
    """Select the GPU of a rank; otherwise every rank would leave a context on GPU 0."""
    _quicken_pinning()
    gpu = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(gpu)
    return gpu


def _quicken_pinning() -> None:
    """Let torch pin memory without blocking the GPU, unless the user has configured the allocator.

    The driver blocks kernel launches while it allocates and pins gigabytes for the first checkpoint, which cost 0.65 s
    in the first steps of a run. Pinning pages that already exist takes a fraction of that. torch reads this when it
    initializes CUDA.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        wanted = "pinned_use_cuda_host_register:True,pinned_num_register_threads:4"
        os.environ.setdefault("PYTORCH_ALLOC_CONF", wanted)


def peak_of(name: str) -> float | None:
    """Dense peak in FLOP/s of a GPU, by its CUDA name; None if unknown."""
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in name), None)


def is_hopper(device: torch.device) -> bool:
    """Whether a device is a Hopper GPU (H100, H200), which some kernels need."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def by_device(seconds: dict[str, list[float]], work_s: Sequence[float]) -> dict[str, list[float]]:
    """The phases of ranks on GPUs, whose work the host only launches, from what their hosts measured (`Clock`).

    work_s: (ranks,) until the end of backward, by the device's clock; of a single rank it is not measured
    """
    host = zip(*(seconds[name] for name in ("forward", "backward", "wait", "optimizer")), strict=True)
    busy = [sum(each) for each in host]
    data, save, other = seconds["data"], seconds["save"], seconds["other"]
    own = [max(0.0, work - each) for work, each in zip(work_s, data, strict=True)] if len(work_s) > 1 else busy
    compute = [min(each) for each in zip(busy, own, strict=True)]
    wait = [all_s - each for all_s, each in zip(busy, compute, strict=True)]
    return {"data": data, "compute": compute, "wait": wait, "save": save, "other": other}
