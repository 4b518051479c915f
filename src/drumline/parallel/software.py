"""What a run computes with: written into checkpoints, and compared between ranks."""

from __future__ import annotations

import hashlib
import platform

import drumline


def versions() -> dict[str, str]:
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"  # type: ignore[no-untyped-call]
    return {
        "drumline": drumline.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "nccl": nccl,
    }


def digest(value: str | None) -> str:
    """A few letters that stand for something long."""
    return "none" if value is None else hashlib.sha256(value.encode()).hexdigest()[:12]
