"""ranks.jsonl: where the time of each rank's steps goes, one line per logged step."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.files import RunFolder
from drumline.parallel import PHASES, World
from drumline.report.records import Records


def write_lanes(
    folder: RunFolder, world: World, records: Records, step: int, work_s: Sequence[float], own: Sequence[float]
) -> None:
    """By rank 0, which has the times that all ranks sent along with their gradients.

    work_s: of all ranks, then their laps (`StepResult.work_s`). own: the lap of a single rank
    """
    size, phases = world.size, len(PHASES)
    laps = [own] if size == 1 else [work_s[at : at + phases] for at in range(size, len(work_s), phases)]
    if not laps or not all(map(any, laps)):  # none was measured yet
        return
    seconds = {name: [lap[place] for lap in laps] for place, name in enumerate(PHASES)}
    if world.device.type == "cuda":
        from drumline.parallel import by_device

        seconds = by_device(seconds, work_s[:size])
    rounded = {name: [round(each, 6) for each in row] for name, row in seconds.items()}
    records.line(folder.ranks, {"step": step, "seconds": rounded})
