"""What saves and snapshots have cost a run, by its events."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from drumline.checkpoint.in_memory import InMemory
from drumline.cli.app import run_command
from drumline.files import stalls
from drumline.files.run_folder import RunFolder
from drumline.parallel.world import Place, World


def event(kind: str, at_s: float, stall_s: float = 0.0) -> str:
    when = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(1_800_000_000 + at_s))
    return json.dumps({"event": kind, "step": 1, "stall_s": stall_s, "time": when}) + "\n"


def run_with(lines: list[str], name: str = "tiny") -> RunFolder:
    folder = RunFolder(Path("runs", name))
    folder.path.mkdir(parents=True)
    folder.config.write_text("")
    folder.events.write_text("".join(lines))
    return folder


def test_the_time_between_two_processes_of_a_run_is_no_time_of_training(here: Path) -> None:
    first = [event("saved", 0, 9.0), event("snapshot", 20, 1.0), event("saved", 40, 1.0)]
    second = [event("resumed", 9_000), event("saved", 9_010, 1.0), "torn {", event("skipped", 9_999)]
    # What the very first event cost is unknown, as is when training began.
    assert stalls.stalled_share(run_with([*first, *second]).events) == pytest.approx(3 / 50)


@pytest.mark.parametrize("lines", [[], [event("saved", 0, 1.0)], [event("saved", 0, 1.0), event("saved", 5, 1.0)]])
def test_of_a_run_that_is_too_short_nothing_is_claimed(here: Path, lines: list[str]) -> None:
    assert stalls.stalled_share(run_with(lines).events) is None


def test_of_a_long_file_the_end_is_read_and_of_no_file_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    early = [event("saved", second, 1.0) for second in range(0, 1000, 20)]
    late = [event("saved", second, 2.0) for second in range(1000, 2000, 20)]
    folder = run_with([*early, *late])
    monkeypatch.setattr(stalls, "_READ_BYTES", len("".join(late[-20:])) + 5)
    assert stalls.stalled_share(folder.events) == pytest.approx(0.1)
    folder.events.unlink()
    assert stalls.stalled_share(folder.events) is None
    os.mkfifo(folder.events)
    assert stalls.stalled_share(folder.events) is None


def test_runs_shows_how_much_of_its_time_each_run_stood_still(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_with([event("saved", 0), event("saved", 100, 2.5)])
    run_with([], "tiny-2")
    assert run_command(["runs"]) == 0
    header, long, short = (line.split() for line in capsys.readouterr().out.splitlines())
    assert long[header.index("stalled")] == "2.5%" and short[header.index("stalled")] == "-"
    assert run_command(["runs", "--json"]) == 0
    assert [row["stalled"] for row in json.loads(capsys.readouterr().out)] == [0.025, None]


@pytest.mark.parametrize(("stall_s", "noted"), [(0.5, False), (2.5, True)])
def test_the_end_of_a_run_says_what_saves_and_snapshots_have_cost_if_it_is_much(
    here: Path, stall_s: float, noted: bool
) -> None:
    import torch

    folder, told = run_with([event("saved", 0), event("saved", 100, stall_s)]), list[tuple[str, dict[str, Any]]]()
    world = World(Place(), torch.device("cpu"))
    memory = InMemory(world, None, torch.nn.Linear(1, 1), every=0, token="0", tell=lambda *said: told.append(said))
    memory.forget(folder)
    memory.close()
    says = "note: saves and snapshots held up training for 2.5% of its time; "
    assert [message.startswith(says) for message, _ in told] == [True] * noted
