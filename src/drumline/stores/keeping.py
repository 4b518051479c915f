"""Which checkpoints of a store are kept, and the list of them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from drumline.checkpoint import Listed, Retention, reasons, step_of, valid_loss
from drumline.config import from_settings
from drumline.errors import CheckpointError, ConfigError
from drumline.files import RunFolder
from drumline.stores.client import MissingObjectError
from drumline.stores.of_run import DAMAGED, MANIFEST, RUN, WRITABLE, RunStore, none_there, split_url
from drumline.stores.urls import check_url


class Judge:
    """Which checkpoints of a store are kept, by the rules for those on disk; reads each one's losses once."""

    def __init__(self, run: RunStore, retention: Retention) -> None:
        self._run, self._retention = run, retention
        self._known: dict[int, bytes] = {}

    def forget(self, step: int) -> None:
        self._known.pop(step, None)

    def reasons(self, steps: Sequence[int]) -> dict[int, list[str]]:
        """Why each (oldest first) is kept; empty if it need not be."""
        self._known = {step: self._known[step] if step in self._known else self._read(step) for step in steps}
        with tempfile.TemporaryDirectory(prefix="drumline-") as place:  # only run.json, for the validation loss
            folder = RunFolder(Path(place))
            for step, text in self._known.items():
                folder.checkpoint(step).mkdir(parents=True)
                (folder.checkpoint(step) / RUN).write_bytes(text)
            kept = reasons([folder.checkpoint(step) for step in steps], self._retention)
        return {step_of(path): why for path, why in kept.items()}

    def _read(self, step: int) -> bytes:
        try:
            return self._run.store.get(self._run.name(step, RUN))
        except MissingObjectError:
            return b""

    def losses(self) -> dict[int, float | None]:
        """The validation loss of each checkpoint that was judged."""
        with tempfile.TemporaryDirectory(prefix="drumline-") as place:
            found = {}
            for step, text in self._known.items():
                Path(place, RUN).write_bytes(text)
                found[step] = valid_loss(Path(place))
        return found


def stored_checkpoints(url: str) -> list[Listed]:
    """All checkpoints of a run in a store, or the one that the URL names, oldest first."""
    check_url(url)
    if url.partition("://")[0] not in WRITABLE:
        raise ConfigError(
            f"{url} is no place that a run uploads checkpoints to",
            fix=f"give the --checkpoint_store of a run: {', '.join(WRITABLE.values())}",
        )
    place, wanted = split_url(url)
    run = RunStore(place)
    there = run.checkpoints()
    if not there and not run.run_id():
        raise CheckpointError(
            f"{place} is not a run: nothing of one is there", fix="check bucket and folder of the URL"
        )
    judge = Judge(run, _retention(run))
    whole = [step for step, files in there.items() if MANIFEST in files]
    kept = judge.reasons(whole)
    losses = judge.losses()
    why = {step: ", ".join(kept[step]) or "deleted at the next upload" for step in whole}
    rows = [
        Listed(
            step=step,
            saved=run.store.modified(run.name(step, MANIFEST if step in why else max(files))),
            bytes=sum(files.values()),
            valid_loss=losses.get(step),
            kept=why.get(step, "not used: " + ("damaged" if DAMAGED in files else "not complete")),
        )
        for step, files in there.items()
        if wanted in (None, step)
    ]
    if not rows:
        raise none_there(run, wanted, whole)
    return rows


def _retention(run: RunStore) -> Retention:
    settings = run.settings()
    if settings is None:
        return Retention()
    own = from_settings(settings).run
    return Retention(last=own.keep_checkpoints, every=own.keep_every, best=own.keep_best)
