"""Whether others use the cores that a run on a CPU needs."""

from __future__ import annotations

import os
from collections.abc import Mapping

from drumline.doctor.finding import Finding
from drumline.units import counted

RANKS_PER_CORE = 8


def read_load() -> float:
    """Processes that want to run, over the last minute."""
    return os.getloadavg()[0]


def check_load(load: float, cores: int, environ: Mapping[str, str]) -> Finding:
    """Threads that wait for each other keep their cores busy, unless told not to, which costs most beside others."""
    if load <= cores:
        return Finding("load", "ok", f"{load:.1f} of {counted(cores, 'core')} in use over the last minute")
    fix = "stop other programs, or wait for them"
    if environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
        fix += "; OMP_WAIT_POLICY=passive drumline train ... may be several times as fast beside them"
    return Finding(
        "load", "warning", f"{load:.1f} for {counted(cores, 'core')}: others use them, so a CPU trains slowly", fix
    )


def too_many_ranks(ranks: int, cores: int) -> Finding:
    """More ranks than RANKS_PER_CORE get nowhere on CPUs, and time out in the end."""
    what = f"{ranks} are too many for {counted(cores, 'core')}: at most {RANKS_PER_CORE * cores} can train on CPUs here"
    return Finding("ranks", "failed", what, f"use --nproc {cores}, or more hosts")
