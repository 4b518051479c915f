"""ranks.jsonl and what else is written only as often as it costs little."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.files import RunFolder
from drumline.parallel import PHASES, Place, World
from drumline.report import Records, Sparing, records, write_lanes


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def written(tmp_path: Path, size: int, work_s: list[float], own: list[float]) -> list[dict[str, Any]]:
    folder, out = RunFolder(tmp_path), Records([], log=None, silent=True)
    write_lanes(folder, World(Place(size=size), torch.device("cpu")), out, 7, work_s, own)
    assert out.flush()
    return lines(folder.ranks)


def test_a_line_has_the_phases_of_every_rank(tmp_path: Path) -> None:
    laps = [[float(10 * rank + place) for place in range(1, len(PHASES) + 1)] for rank in range(3)]
    (line,) = written(tmp_path, 3, [0.5, 0.6, 0.7, *laps[0], *laps[1], *laps[2]], laps[0])
    assert line["step"] == 7 and line["time"] > 1e9
    assert line["seconds"] == {name: [lap[place] for lap in laps] for place, name in enumerate(PHASES)}


def test_a_single_rank_has_its_own_lap(tmp_path: Path) -> None:
    (line,) = written(tmp_path, 1, [], [1.0, 2.0, 3.0, 0.0, 4.0, 0.0, 0.25])
    assert line["seconds"]["backward"] == [3.0] and line["seconds"]["other"] == [0.25]


def test_what_was_not_measured_yet_is_not_written(tmp_path: Path) -> None:
    assert written(tmp_path, 2, [], [1.0] * len(PHASES)) == []
    assert written(tmp_path, 2, [0.5, 0.5, *[0.0] * 2 * len(PHASES)], [1.0] * len(PHASES)) == []


def test_what_is_spared_is_not_done_in_the_first_second_and_then_takes_2_percent_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, done = [100.0], list[float]()

    def work(takes_s: float) -> None:
        done.append(now[0])
        now[0] += takes_s

    monkeypatch.setattr(records.time, "monotonic", lambda: now[0])
    spared = Sparing(work)
    for _ in range(4000):
        spared(0.2)
        now[0] += 0.125
    assert done[0] == 101.0
    calls = len(done)
    seldom = Sparing(work, pause_s=60.0)
    for _ in range(400):
        seldom(0.0)
        now[0] += 1.0
    assert len(done) - calls == 7  # after a second, and then once a minute
    del done[calls:]
    now[0] -= 400.0
    assert 0.018 < 0.2 * len(done) / (now[0] - 100.0) <= 0.021
