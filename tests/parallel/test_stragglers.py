"""A rank that is slower than the others again and again is named with what it costs; ranks that are alike never are."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.steps import make_step, train_step
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from drumline.data.batches import BatchPlan
from drumline.parallel.group import Group
from drumline.parallel.heartbeat import Pulse
from drumline.parallel.stragglers import WINDOW, Pace, Stopwatch, find_stragglers
from drumline.parallel.strategies import make_strategy
from drumline.parallel.world import Place, World, join
from drumline.trainer.trainer import Trainer

NOISE = st.floats(0.95, 1.05)


def rows(ranks: int) -> st.SearchStrategy[list[list[float]]]:
    """Seconds of work, (steps, ranks), alike up to noise."""
    return st.lists(st.lists(NOISE, min_size=ranks, max_size=ranks), min_size=WINDOW, max_size=WINDOW)


def stragglers(works_s: list[list[float]], micro_batches: list[int] | None = None, known: tuple[int, ...] = ()) -> Any:
    counts = micro_batches or [1] * len(works_s[0])
    return find_stragglers(works_s, [max(row) for row in works_s], micro_batches=counts, known=known)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 6).flatmap(rows))
def test_ranks_that_are_alike_are_never_named(works_s: list[list[float]]) -> None:
    assert stragglers(works_s) == {}


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 6).flatmap(rows), st.integers(0, 5))
def test_a_rank_half_as_fast_again_is_always_the_one_that_is_named(works_s: list[list[float]], number: int) -> None:
    slow = number % len(works_s[0])
    for row in works_s:
        row[slow] *= 1.5
    assert list(stragglers(works_s)) == [slow]


def test_what_is_lost_is_how_long_the_median_rank_waits_for_it() -> None:
    (two,) = stragglers([[1.0, 1.5]] * WINDOW).values()
    assert (two.times_median, two.lost_share) == (1.5, pytest.approx(1 / 3))
    both = stragglers([[1.0, 2.0, 1.0, 1.9]] * WINDOW)  # as the two ranks of one host
    assert [(rank, each.lost_share) for rank, each in both.items()] == [
        (1, pytest.approx(0.5)),
        (3, pytest.approx(0.45)),
    ]


def test_a_rank_that_has_more_micro_batches_is_not_blamed_for_it() -> None:
    assert stragglers([[3.0, 2.0, 2.0]] * WINDOW, [3, 2, 2]) == {}
    assert list(stragglers([[3.0, 2.0, 4.0]] * WINDOW, [3, 2, 2])) == [2]
    assert stragglers([[3.0, 2.0, 2.6]] * WINDOW, [3, 2, 2]) == {}  # slow, but nobody waits for it


def test_a_rank_that_is_slow_now_and_then_is_no_straggler() -> None:
    assert stragglers([[1.0, 1.0, 9.0], *[[1.0, 1.0, 1.0]] * 2] * (WINDOW // 3)) == {}


def test_one_that_was_named_stays_one_until_it_is_clearly_better() -> None:
    assert stragglers([[1.0, 1.12]] * WINDOW) == {}
    assert list(stragglers([[1.0, 1.12]] * WINDOW, known=(1,))) == [1]
    assert stragglers([[1.0, 1.08]] * WINDOW, known=(1,)) == {}


def a_pace(events: list[dict[str, Any]]) -> Pace:
    """Of rank 0 of three, two of which are on another host."""
    store = HashStore()
    for rank in (1, 2):
        store.set(f"drumline/0/{rank}", '"host-b"')
    world = Group(Place(rank=0, size=3), torch.device("cpu"), store)
    return Pace(
        world, BatchPlan(1, 3), Pulse(), tell=lambda message, event: events.append({**event, "message": message})
    )


def test_a_straggler_is_told_once_again_when_it_changes_and_when_it_is_over() -> None:
    events: list[dict[str, Any]] = []
    pace, step = a_pace(events), 0

    def train(*work_s: float, steps: int = WINDOW) -> list[dict[str, Any]]:
        nonlocal step
        events.clear()
        for _ in range(steps):
            step += 1
            pace.begin(step)
            pace._began_s -= max(work_s)
            pace.compare(step, work_s)
        return list(events)

    assert train(1.0, 1.0, 9.0, steps=2) == []  # what is compiled at its first use
    assert train(1.0, 1.0, 1.0) == []
    (named,) = train(1.0, 1.0, 1.3)
    assert {name: named[name] for name in ("event", "step", "rank", "host")} == {
        "event": "straggler",
        "step": step,
        "rank": 2,
        "host": "host-b",
    }
    assert named["times_median"] == 1.3 and named["lost_share"] == pytest.approx(0.3 / 1.3, abs=0.01)
    assert named["message"].startswith("warning: rank 2 on host-b is a straggler") and "23%" in named["message"]
    assert train(1.0, 1.0, 1.35) == []
    assert [each["times_median"] for each in train(1.0, 1.0, 4.0)] == [4.0]
    assert [(each["event"], each["rank"]) for each in train(1.0, 1.0, 1.0)] == [("straggler over", 2)]
    assert train(1.0, 1.0, 1.0) == []


def test_a_single_rank_measures_and_says_nothing() -> None:
    messages: list[Any] = []
    pace = Pace(World(Place(), torch.device("cpu")), BatchPlan(1, 1), Pulse(), tell=lambda *said: messages.append(said))
    assert pace.begin(0) is None
    for step in range(3 * WINDOW):
        pace.compare(step, ())
    assert messages == []


class Slow(nn.Module):
    """Sleeps in forward on the last rank."""

    def __init__(self, sleep_s: float) -> None:
        super().__init__()
        self.layer, self._sleep_s = nn.Linear(4, 1), sleep_s

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            time.sleep(self._sleep_s)
        out: torch.Tensor = self.layer(inputs)
        return out


class FakeEvent:
    """A mark in a GPU's work that the GPU comes to when `now_s` says so."""

    now_s = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        self._at_s: float | None = None

    def record(self) -> None:
        self._at_s = FakeEvent.now_s

    def query(self) -> bool:
        return self._at_s is not None

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self._at_s is not None and later._at_s is not None
        return 1000 * (later._at_s - self._at_s)


def test_on_a_gpu_the_work_of_a_step_is_told_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    watch = Stopwatch(World(Place(rank=1, size=3), torch.device("cuda")))
    loss, slots, waits = torch.ones((), requires_grad=True), [], []
    for work_s in (2.0, 3.0, 4.0):
        watch.start(lambda: waits.append(FakeEvent.now_s))
        scaled = loss * 1.0
        watch.watch(scaled)
        FakeEvent.now_s += work_s
        scaled.backward()  # type: ignore[no-untyped-call]
        slots.append(watch.slots(scaled.detach()).tolist())
    assert slots == [[0, 0, 0], [0, 2, 0], [0, 3, 0]] and waits == [2.0, 5.0, 9.0]


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().sum()
    return loss


def steps(*, watched: bool, bitwise: bool) -> tuple[list[tuple[float, ...]], list[float]]:
    """What each rank's work took in three steps of five micro-batches, and the weights after them."""
    world = join(device="cpu")
    torch.manual_seed(0)
    plan, model = BatchPlan(2, 5), Slow(0.03 if watched else 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    strategy, watch, works = make_strategy(model, plan, world, bitwise=bitwise), Stopwatch(world), []
    whole = make_step(model, optimizer, squares, strategy, weight=plan.sequences, grad_clip=1.0)
    for step in range(3):
        batches = (torch.full((2, 4), index / 7 + step) for index in plan.share(world.rank, world.size))
        result = train_step(whole, batches, lr=None, watch=watch.start(lambda: None) if watched else None)
        works.append(result.work_s)
    return works, torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def compared(bitwise: bool) -> dict[str, Any]:
    (works, weights), (none, same) = steps(watched=True, bitwise=bitwise), steps(watched=False, bitwise=bitwise)
    return {"works": works, "none": none, "same": weights == same}


@pytest.mark.parametrize("bitwise", [False, True])
def test_work_is_measured_without_the_wait_for_others_and_changes_no_bit(bitwise: bool) -> None:
    by_rank = [each.value for each in run_ranks(compared, [(bitwise,)] * 2)]
    assert by_rank[0] == by_rank[1] and by_rank[0]["same"] and by_rank[0]["none"] == [()] * 3
    fast, slow = zip(*by_rank[0]["works"], strict=True)
    assert min(slow) >= 0.06  # it sleeps in each of its two micro-batches, while the other has done its three
    assert min(fast) < min(slow)


def fit(run: str) -> None:
    model = Slow(0.03)
    data = [(torch.full((4,), number / 64), torch.ones(1)) for number in range(64)]
    Trainer(
        model, data, torch.optim.SGD(model.parameters(), lr=0.01), loss=nn.MSELoss(), batch_size=1, run_dir=run
    ).fit(total_steps=WINDOW + 5, log_every=100)


@pytest.mark.parametrize("size", [2, 3])
def test_a_slow_rank_of_a_real_run_is_named_with_what_it_costs(tmp_path: Path, size: int) -> None:
    ended = run_ranks(fit, [(str(tmp_path / "run"),)] * size)
    assert [each.code for each in ended] == [0] * size, ended
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (named,) = [event for event in events if event["event"].startswith("straggler")]
    assert named["event"] == "straggler" and named["rank"] == size - 1 and named["host"] == os.uname().nodename
    assert named["times_median"] > 1.15 and 0 < named["lost_share"] <= 1
    assert f"warning: rank {size - 1} on " in (tmp_path / "run" / "train.log").read_text()
