"""Where a rank's time goes: what the clock counts, and what a GPU's phases are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.parallel import heartbeat
from drumline.parallel.gpus import by_device
from drumline.parallel.heartbeat import PHASES, Clock, Pulse


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the test sets."""
    seconds = [10.0]
    monkeypatch.setattr(heartbeat.time, "perf_counter", lambda: seconds[0])
    return seconds


def spend(clock: Clock, now: list[float], *phases: tuple[str, float]) -> None:
    for phase, seconds in phases:
        clock.enter(phase)
        now[0] += seconds


def test_a_lap_has_the_mean_of_each_phase_per_step_and_the_next_begins_at_zero(now: list[float]) -> None:
    clock = Clock()
    step = (("data", 1.0), ("forward", 2.0), ("backward", 4.0), ("wait", 8.0), ("optimizer", 16.0), ("other", 0.5))
    spend(clock, now, *step, *step, ("save", 3.0), ("other", 0.0))
    assert dict(zip(PHASES, clock.lap(), strict=True)) == {
        "data": 1.0,
        "forward": 2.0,
        "backward": 4.0,
        "wait": 8.0,
        "optimizer": 16.0,
        "save": 1.5,
        "other": 0.5,
    }
    assert not any(clock.lap())


def test_what_is_no_phase_of_a_step_is_not_counted(now: list[float]) -> None:
    clock = Clock()
    spend(clock, now, ("evaluate", 100.0), ("optimizer", 1.0), ("other", 0.0))
    assert sum(clock.lap()) == 1.0


def test_a_phase_that_lasts_beyond_a_lap_counts_in_both(now: list[float]) -> None:
    clock = Clock()
    spend(clock, now, ("optimizer", 2.0))
    assert sum(clock.lap()) == 2.0
    now[0] += 3.0
    assert sum(clock.lap()) == 3.0


def test_what_a_rank_tells_its_supervisor_is_what_its_clock_counts(now: list[float]) -> None:
    pulse = Pulse()
    for phase in ("data", "compute", "exchange", "compiling", "save"):
        pulse.at(phase, 0)
        now[0] += 1.0
    pulse.at("ending", 0)
    lap = dict(zip(PHASES, pulse.clock.lap(), strict=True))
    assert lap == {**dict.fromkeys(PHASES, 0.0), "data": 1.0, "forward": 2.0, "wait": 1.0, "save": 1.0}


seconds = st.floats(0.0, 10.0)


@given(st.lists(st.tuples(*[seconds] * len(PHASES), seconds), min_size=1, max_size=4))
def test_the_phases_of_gpus_add_up_to_what_their_hosts_measured(ranks: list[tuple[float, ...]]) -> None:
    host = {name: [rank[place] for rank in ranks] for place, name in enumerate(PHASES)}
    device = by_device(host, [rank[-1] for rank in ranks])
    for number, rank in enumerate(ranks):
        assert sum(row[number] for row in device.values()) == pytest.approx(sum(rank[:-1]))
        assert min(row[number] for row in device.values()) >= 0.0
    if len(ranks) == 1:
        assert device["wait"] == [0.0]
