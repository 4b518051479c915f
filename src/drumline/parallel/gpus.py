"""This process's GPU: taken before anything else touches CUDA, and what its kind could compute at best."""

from __future__ import annotations

import os

import torch

# Dense bf16 peak in TFLOP/s from the makers' data sheets, by a part of the name that CUDA reports.
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
    """The GPU of a rank; a rank that starts on GPU 0 would leave a context of its own there."""
    _quicken_pinning()
    gpu = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(gpu)
    return gpu


def _quicken_pinning() -> None:
    """Let torch pin memory without holding up the GPU, unless somebody has settled how it allocates.

    The driver takes no launches while it finds and pins gigabytes for the first checkpoint, which cost a run 0.65 s in
    its first steps. Pages that are there already are pinned in a fraction of that. torch reads this when it first
    touches CUDA.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        wanted = "pinned_use_cuda_host_register:True,pinned_num_register_threads:4"
        os.environ.setdefault("PYTORCH_ALLOC_CONF", wanted)


def peak_of(name: str) -> float | None:
    """Dense peak in FLOP/s of the GPU that CUDA calls so, None where it is not known."""
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in name), None)


def is_hopper(device: torch.device) -> bool:
    """Whether a device is an H100, an H200 or their like, which some kernels are made for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
