"""When a snapshot is due: at its steps, or when the last one is complete; with auto as costs 1% of the time."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from drumline.snapshots.schedule import Schedule


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def steps(
    schedule: Schedule,
    clock: Clock,
    count: int,
    *,
    step_s: float,
    busy_s: float = 0.0,
    cost_s: float = 0.01,
    first: int = 1,
) -> list[int]:
    """The steps after which one was taken, each of which takes so long to complete."""
    taken, free_at = [], 0.0
    for step in range(first, first + count):
        due = schedule.is_due(step, free=clock.now_s >= free_at)  # decided before the step
        clock.now_s += step_s
        if due:
            taken.append(step)
            schedule.taken(step)
            schedule.measured(cost_s=cost_s, took_s=busy_s)
            free_at = clock.now_s + busy_s
    return taken


def test_fixed_intervals_are_kept() -> None:
    clock = Clock()
    schedule = Schedule(20, now=clock)
    assert steps(schedule, clock, 100, step_s=0.1) == [20, 40, 60, 80, 100]
    assert schedule.complaint() is None


@given(st.integers(2, 60), st.floats(0.01, 1.0), st.floats(0.0, 1.0))
def test_a_kill_at_any_step_costs_at_most_the_interval_and_two_steps(every: int, step_s: float, share: float) -> None:
    clock = Clock()
    schedule = Schedule(every, now=clock)
    busy_s = share * step_s * (every // 2 - 1)  # more would not fit: a new one begins when the last one is complete
    taken = steps(schedule, clock, 10 * every, step_s=step_s, busy_s=busy_s)
    settled = taken[1:]  # how long they take is measured with the first one
    for one, following in pairwise(settled):
        assert following + busy_s / step_s - one <= every + 2.001
    assert schedule.late == 0 and schedule.complaint() is None


def test_one_that_is_late_is_taken_when_the_last_one_is_complete_and_the_interval_that_fits_is_told() -> None:
    clock = Clock()
    schedule = Schedule(2, now=clock)
    assert steps(schedule, clock, 25, step_s=1.0, busy_s=4.5) == [2, 8, 14, 20]
    said = schedule.complaint()
    assert said is not None and "takes 4.5 s (5 steps)" in said
    assert "may cost 11 steps, more than --snapshot_every 2; use --snapshot_every auto or 11" in said
    assert schedule.complaint() is None  # once


def test_one_that_is_late_says_nothing_while_a_kill_costs_what_is_promised() -> None:
    clock = Clock()
    schedule = Schedule(1, now=clock)
    assert steps(schedule, clock, 20, step_s=1.0, busy_s=0.9) == list(range(1, 21, 2))
    assert schedule.late > 3 and schedule.complaint() is None  # 3 steps at most: the interval, and 2
    assert steps(schedule, clock, 20, step_s=1.0, busy_s=1.9, first=21) == list(range(21, 41, 3))
    assert "may cost 5 steps, more than --snapshot_every 1" in str(schedule.complaint())


def test_auto_takes_them_as_often_as_costs_one_percent_of_the_time() -> None:
    clock = Clock()
    assert steps(Schedule(None, now=clock), clock, 30, step_s=0.125) == [1, 10, 19, 28]


def test_auto_takes_at_most_four_in_a_second() -> None:
    clock = Clock()
    taken = steps(Schedule(None, now=clock), clock, 2000, step_s=0.001, busy_s=0.0001, cost_s=0.00001)
    assert len(taken) == 8


def test_auto_leaves_time_to_complete_each_and_begins_anywhere() -> None:
    clock = Clock()
    taken = steps(Schedule(None, now=clock), clock, 12, step_s=1.0, busy_s=3.0, first=5001)
    assert taken == [5001, 5006, 5011]
