"""Whether others use the cores that a run on a CPU needs."""

from __future__ import annotations

import os
from collections.abc import Mapping

from drumline.doctor.finding import Finding


def read_load() -> float:
    """Processes that want to run, over the last minute."""
    return os.getloadavg()[0]


def check_load(load: float, cores: int, environ: Mapping[str, str]) -> Finding:
    """Threads that wait for each other keep their cores busy, unless told not to, which costs most beside others."""
    if load <= cores:
        return Finding("load", "ok", f"{load:.1f} of {cores} cores in use over the last minute")
    fix = "stop other programs, or wait for them"
    if environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
        fix += "; OMP_WAIT_POLICY=passive drumline train ... may be several times as fast beside them"
    return Finding("load", "warning", f"{load:.1f} for {cores} cores: others use them, so a CPU trains slowly", fix)
