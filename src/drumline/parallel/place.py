"""The rank of a process, from torchrun's variables, which every launcher sets, or from SLURM's."""

from __future__ import annotations

import re
from collections.abc import Mapping

from drumline.errors import ConfigError
from drumline.parallel.world import Place

_SLURM_PORTS = range(20000, 30000)


def find_place(environ: Mapping[str, str]) -> Place:
    """This process's rank from its launcher's variables; a single process if there are none."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return Place(
            rank=_number(environ, "RANK"),
            size=_number(environ, "WORLD_SIZE"),
            local_rank=_number(environ, "LOCAL_RANK", environ["RANK"]),
            master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_number(environ, "MASTER_PORT", "29500"),
        )
    # Only srun sets the number of tasks of a step; a batch script has other variables, but is not a rank.
    size = _number(environ, "SLURM_STEP_NUM_TASKS", "1")
    if size > 1:
        hosts = slurm_hosts(environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", "localhost")))
        job = _number(environ, "SLURM_JOB_ID", "0") * 7 + _number(environ, "SLURM_STEP_ID", "0")
        return Place(
            rank=_number(environ, "SLURM_PROCID"),
            size=size,
            local_rank=_number(environ, "SLURM_LOCALID", "0"),
            master_addr=environ.get("MASTER_ADDR", hosts[0]),
            master_port=_number(environ, "MASTER_PORT", str(_SLURM_PORTS[job % len(_SLURM_PORTS)])),
        )
    return Place()


def slurm_hosts(names: str) -> list[str]:
    """Expand SLURM's compact host list: "a[1-2,07],b" -> a1 a2 a07 b."""
    hosts = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", names):
        stem, _, inside = part.partition("[")
        for piece in inside.rstrip("]").split(",") if inside else [""]:
            first, _, last = piece.partition("-")
            numbers = range(int(first), int(last) + 1) if last else [first]
            hosts += [f"{stem}{number:0{len(first)}d}" if last else f"{stem}{number}" for number in numbers]
    return hosts


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    value = environ.get(name, default)
    try:
        return int(value)
    except ValueError:
        raise ConfigError(
            f"the environment variable {name} is {value!r}, not a number",
            fix=f"unset {name}, or let torchrun or srun set it",
        ) from None
