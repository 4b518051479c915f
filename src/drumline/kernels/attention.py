"""Which of torch's attention kernels is used on Hopper."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from drumline.parallel import is_hopper

# The first that can do what is asked: cuDNN's is the fastest, and stands back where bits must repeat.
_IN_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def fastest_attention(device: torch.device) -> AbstractContextManager[None]:
    """Inside, attention is computed by the fastest kernel that can; elsewhere than on Hopper torch itself knows it."""
    return sdpa_kernel(_IN_ORDER, set_priority=True) if is_hopper(device) else nullcontext()
