"""A run or a checkpoint in a store -> the run folder of this machine, verified before it has its name."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from drumline.checkpoint import (
    Checkpoint,
    checkpoint_paths,
    is_damage,
    is_part,
    newest_valid,
    open_checkpoint,
    set_aside,
)
from drumline.config import TrainConfig, differences, from_settings, with_stored_batch
from drumline.errors import CheckpointError, ConfigError, DataError
from drumline.files import RunFolder, flush, stored_config
from drumline.parallel import World, own_pulse
from drumline.report import to_stderr
from drumline.stores.client import PIECE_BYTES
from drumline.stores.of_run import MANIFEST, RUN, RunStore, check_writable, none_there, other_run, split_url
from drumline.stores.urls import is_store
from drumline.units import count

_THREADS = 8
"""So many pieces of a checkpoint are read at once, and are in memory."""


def fetched(config: TrainConfig, folder: RunFolder, world: World) -> TrainConfig:
    """The config to go on with, when rank 0 has what the store of the run, or of --resume_from, has and it has not.

    Rank 0 sends the state to the others, whether they see its disk or not.
    """
    resume_from = str(world.on_rank0(partial(_fetch, config, folder)))
    return replace(config, run=replace(config.run, resume_from=resume_from))


def _fetch(config: TrainConfig, folder: RunFolder) -> str:
    """What to resume from, once it is here."""
    url, resume_from = config.run.checkpoint_store, config.run.resume_from
    again = own_pulse().started_again and bool(checkpoint_paths(folder.checkpoints))
    if url and not again:
        check_writable(url)
        try:
            _fetch_run(RunStore(url), config, folder)
        except DataError as error:
            stored = stored_config(folder)
            if stored is None or stored.run.checkpoint_store != url:
                raise
            to_stderr(f"WARNING: {error.problem}; the run goes on with what is in {folder.path}")
    if not is_store(resume_from):
        return resume_from
    if again and folder.resumed.exists():
        return "auto"
    place, step = split_url(resume_from)
    with folder.hold():
        return str(_fetch_checkpoint(RunStore(place), folder, step=step))


def _fetch_run(run: RunStore, config: TrainConfig, folder: RunFolder) -> None:
    """Bring what a run in a store has and the folder has not: its files, and its newest checkpoint."""
    steps = list(run.complete())
    there, here = run.run_id(), folder.stored_id()
    if here and there and here != there:
        raise other_run(run.url)
    resume_from = config.run.resume_from
    if not there or (resume_from != "auto" and not resume_from.isdigit()):
        return
    if not here and folder.config.exists():
        raise other_run(run.url)
    if not here:
        _refuse_changes(run, config)
    wanted = int(resume_from) if resume_from.isdigit() else None
    if wanted is None and steps:
        newest = newest_valid(folder.checkpoints, warn=to_stderr)
        steps = [step for step in steps if newest is None or step > newest.step]
    elif wanted is not None and (wanted not in steps or folder.checkpoint(wanted).exists()):
        steps = []
    if here and not steps:
        return
    with folder.hold():
        if steps:
            _fetch_checkpoint(run, folder, step=wanted, newer_than=min(steps) - 1, is_own=True, or_none=bool(here))
        if not here:
            _fetch_files(run, folder)


def _refuse_changes(run: RunStore, config: TrainConfig) -> None:
    """Before anything is fetched: the settings must be those of the run in the store."""
    settings = run.settings()
    if settings is None:
        return
    stored = from_settings(settings)
    batch = with_stored_batch(config.batch, stored.batch)
    batch = replace(batch, batch_size=batch.batch_size or stored.batch.batch_size)
    changed = differences(stored, replace(config, batch=batch))
    refused = {name: values for name, values in changed.items() if name not in config.run.allow_change}
    if refused:
        listed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in refused.items())
        raise ConfigError(
            f"{run.url} has a run that was started with different settings: {listed}",
            fix="choose another --checkpoint_store for a new run, or drop those settings to go on with that run",
        )


def _fetch_files(run: RunStore, folder: RunFolder) -> None:
    """The run's files; the config last, since a folder with one is a run."""
    for name in sorted(run.run_files(), key=lambda name: name == folder.config.name):
        path = folder.path / name
        path.parent.mkdir(exist_ok=True)
        if path == folder.config:
            _write(folder.identity, run.run_id().encode())
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        with _disk(folder.path, 0):
            run.store.download(name, aside)
            flush(aside)
            aside.replace(path)
    if not folder.identity.exists():
        _write(folder.identity, run.run_id().encode())


def _write(path: Path, content: bytes) -> None:
    with _disk(path.parent, len(content)):
        path.write_bytes(content)
        flush(path)


def _fetch_checkpoint(
    run: RunStore,
    folder: RunFolder,
    *,
    step: int | None,
    newer_than: int = -1,
    is_own: bool = False,
    or_none: bool = False,
) -> int | None:
    """Bring the checkpoint of a step, or the newest one that is valid; damaged ones on the way are named.

    is_own:  the store is this run's, where a damaged one is set aside
    or_none: there is something to go on with if none is valid
    """
    complete = run.complete()
    steps = [each for each in reversed(complete) if each > newer_than and step in (None, each)]
    for each in steps:
        if is_here(run, folder, each):
            return each
        try:
            bring(run, folder, each, complete[each])
            return each
        except CheckpointError as error:
            if not is_damage(error) or (each == steps[-1] and not or_none):
                raise
            if is_own:
                with suppress(DataError):  # one that may only be read
                    run.set_aside(each)
            to_stderr(f"warning: {error.problem}; trying the one before")
    if or_none:
        return None
    raise none_there(run, step, list(complete))


def is_here(run: RunStore, folder: RunFolder, step: int) -> bool:
    """Whether the folder has this very checkpoint; it is verified when it is opened."""
    try:
        return (folder.checkpoint(step) / MANIFEST).read_bytes() == run.store.get(run.name(step, MANIFEST))
    except OSError:
        return False


def bring(run: RunStore, folder: RunFolder, step: int, files: dict[str, int]) -> None:
    """A checkpoint, written aside, verified by the hashes in its manifest, and renamed."""
    final = folder.checkpoint(step)
    aside = folder.checkpoints / f".{final.name}.partial-{uuid.uuid4().hex[:12]}"
    needed = sum(files.values())
    with _disk(folder.path, needed):
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder.checkpoints).free < needed:
            raise OSError(28, os.strerror(28))
        try:
            aside.mkdir()
            outline(run, aside, step, files)
            to_stderr(f"fetching {run.place(step)} ({count(needed)}B)")
            fill(run, aside, step, files)
            for path in (*aside.iterdir(), aside):
                flush(path)
            checked(run, aside, step, read=None)
            if final.exists():
                set_aside(final, "superseded")
            aside.rename(final)
            flush(final.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def outline(run: RunStore, aside: Path, step: int, files: dict[str, int]) -> None:
    """The manifest and what it says, beside empty files of the sizes in the store: what is wrong is known at once."""
    for name, size_bytes in files.items():
        if name in (MANIFEST, RUN):
            (aside / name).write_bytes(run.store.get(run.name(step, name)))
        elif is_part(name):
            with (aside / name).open("xb") as file:
                file.truncate(size_bytes)
    checked(run, aside, step, read=(RUN,))


def fill(run: RunStore, aside: Path, step: int, files: dict[str, int]) -> None:
    """The content of all files, many pieces at once."""
    pieces = [
        (name, start, min(start + PIECE_BYTES, size_bytes))
        for name, size_bytes in files.items()
        if is_part(name) and name != RUN
        for start in range(0, size_bytes, PIECE_BYTES)
    ]

    def fetch(name: str, start: int, stop: int) -> None:
        content = run.store.get_range(run.name(step, name), start, stop)
        descriptor = os.open(aside / name, os.O_WRONLY)
        try:
            while content:
                written = os.pwrite(descriptor, content, start)
                content, start = content[written:], start + written
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(_THREADS) as threads:
        try:
            list(threads.map(lambda piece: fetch(*piece), pieces))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def checked(run: RunStore, aside: Path, step: int, *, read: Any) -> Checkpoint:
    """As `open_checkpoint`, whose errors name the place in the store."""
    try:
        found = open_checkpoint(aside, read=read)
    except CheckpointError as error:
        raise type(error)(error.problem.replace(str(aside), run.place(step)), fix=error.fix) from None
    if found.step != step:
        raise CheckpointError(
            f"the checkpoint {run.place(step)} is damaged: it is of step {found.step}, not of the step in its name",
            fix="resume from another checkpoint of the run",
        )
    return found


@contextmanager
def _disk(folder: Path, needed_bytes: int) -> Iterator[None]:
    """A disk that is full, or fails, is a problem of this machine, and not of the checkpoint."""
    try:
        yield
    except OSError as error:
        place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free = count(shutil.disk_usage(place).free)
        raise ConfigError(
            f"the run cannot be fetched to {folder}: {error.strerror or error} ({count(needed_bytes)}B needed, {free}B "
            "free)",
            fix="free up space, or choose another --run_dir",
        ) from None
