"""Builds the loop: creates its collaborators in one place and order on every rank, and closes them at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from drumline.checkpoint import Saver, find_snapshots
from drumline.errors import TrainingError
from drumline.files import Journal, RunFolder
from drumline.parallel import Pulse, World, own_pulse, versions
from drumline.report import Record, Records, Sparing
from drumline.signals import stopping
from drumline.train.guard import Guard, ReplicaDriftError
from drumline.train.history import History
from drumline.train.loop import Loop
from drumline.train.setup import Intervals, Setup

if TYPE_CHECKING:
    from drumline.snapshots import Snapshots


@contextmanager
def assembled(
    setup: Setup, intervals: Intervals, records: Records, *, evaluate: Callable[[Pulse], Record] | None = None
) -> Iterator[Loop]:
    """The loop of a run, ready to `run()`."""
    world, folder = setup.world, setup.folder
    with ExitStack() as open_parts:
        open_parts.enter_context(records.showing_progress(intervals.total_steps))
        pulse = own_pulse()
        stop = open_parts.enter_context(stopping(supervised=pulse.is_supervised))
        journal = Journal(folder, attempt=records.later, writes=world.is_rank0)
        open_parts.enter_context(_failures_named(journal, intervals))
        tell = partial(_tell, records, journal, intervals)
        guard = Guard(setup.guard_rules, world, setup.batches, setup.step.precision, tell=tell)
        snapshots = find_snapshots(folder, world, takes=intervals.snapshot_every != 0, copies=intervals.snapshot_copies)
        saver = open_parts.enter_context(_saving(setup, intervals, snapshots, pulse, tell))
        history = History(
            setup, intervals, guard=guard, saver=saver, snapshots=snapshots, records=records, journal=journal, tell=tell
        )
        pace, compare = None, None
        if world.size > 1:
            from drumline.train.ranks import comparison, measured_pace

            pace, compare = measured_pace(setup, pulse, tell), comparison(setup, history, tell)
        pulse.at("starting", 0)
        yield Loop(
            setup=setup,
            intervals=intervals,
            history=history,
            saver=saver,
            guard=guard,
            records=records,
            # A line about a thousand ranks is long: whatever their number, a day of them takes some 80 MB.
            lanes=Sparing(lambda *times: _lanes(folder, world, records, *times), pause_s=world.size / 16),
            pulse=pulse,
            pace=pace,
            stop=stop,
            compare_replicas=compare,
            evaluate=partial(evaluate, pulse) if evaluate else None,
        )


def _lanes(folder: RunFolder, world: World, records: Records, *times: Any) -> None:
    if world.is_rank0:
        from drumline.report import write_lanes

        write_lanes(folder, world, records, *times)


Tell = Callable[[str, dict[str, Any]], None]


def _tell(records: Records, journal: Journal, intervals: Intervals, message: str, event: dict[str, Any]) -> None:
    """To the user, if there is a message, and to events.jsonl; only on rank 0."""
    if message:
        records.say(message)
    journal.event(**event)
    records.show(event)
    if event["event"] == "saved" and event["step"] < intervals.total_steps:  # else the last status follows
        journal.status("running", step=event["step"], total_steps=intervals.total_steps)


@contextmanager
def _saving(
    setup: Setup, intervals: Intervals, snapshots: Snapshots | None, pulse: Pulse, tell: Tell
) -> Iterator[Saver]:
    device, dtype = setup.world.device, setup.step.precision.dtype
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    arithmetic = {"versions": versions(), "device": f"{device.type} {name}, {dtype}"}
    saver = Saver(
        setup.folder,
        setup.world,
        setup.step.model,
        setup.step.optimizer,
        retention=setup.retention,
        snapshots=snapshots,
        snapshot_every=intervals.snapshot_every,
        on_time=setup.guard_rules.may_go_back,
        about={"config_sha256": setup.config_sha256, **arithmetic},
        tell=tell,
        waiting=pulse.still_there,
    )
    try:
        yield saver
    except (TrainingError, ReplicaDriftError):
        saver.wait()  # all ranks raise these at the same step: what is being written is valid, and soon complete
        raise
    finally:
        saver.close()


@contextmanager
def _failures_named(journal: Journal, intervals: Intervals) -> Iterator[None]:
    """Record the cause of a failure in status.json; a run that was refused at the start stays unchanged."""
    try:
        yield
    except BaseException as error:
        if journal.step is not None:
            from drumline.train.trouble import how_it_ended

            ended = how_it_ended(error)
            journal.status(step=journal.step, total_steps=intervals.total_steps, **ended)
            if ended["state"] == "failed" and not own_pulse().is_supervised:  # else the supervisor tells
                journal.event("failed", step=journal.step, what=ended["cause"])
        raise
