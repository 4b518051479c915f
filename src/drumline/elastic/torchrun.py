"""Workarounds for torchrun."""

from __future__ import annotations

import os
from collections.abc import Mapping

from drumline.elastic.lifetime import die_with_parent
from drumline.parallel import ATTEMPT


def under_torchrun(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Apply workarounds for torchrun where possible; returns warnings for the rest."""
    if ATTEMPT in environ or "TORCHELASTIC_RUN_ID" not in environ:
        return []
    die_with_parent()
    lines = []
    restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        lines.append(
            f"torchrun --max_restarts={restarts} may hang after a restart, because ranks reuse the old store: "
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 first, or use `drumline train --nproc`"
        )
    if "SLURM_JOB_ID" in environ and "SIGUSR1" not in environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", ""):
        lines.append(
            "SIGUSR1, which sbatch --signal may send, would kill torchrun: start it with "
            "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
        )
    return lines
