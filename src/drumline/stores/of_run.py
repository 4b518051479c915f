"""A run in a store, laid out as its folder is: config.toml, ..., checkpoints/step-00005000/manifest.json.

A checkpoint is complete if it has its manifest, which is written last and removed first. `.id` is the run that the
place belongs to, `.writer` the process that uploads to it: the last one that began.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from drumline.errors import CheckpointError, ConfigError, DataError, DrumlineError
from drumline.files import CHECKPOINT_PREFIX, RunFolder, stored_settings
from drumline.stores.client import MissingObjectError, open_store
from drumline.stores.urls import check_url, is_store, without_secrets

MANIFEST, RUN = "manifest.json", "run.json"
DAMAGED = f"{MANIFEST}.damaged"
"""The manifest of a checkpoint that was found damaged, which is not complete without it."""
_FOLDER = RunFolder(Path())
_CHECKPOINTS = _FOLDER.checkpoints.name
ID, WRITER = _FOLDER.identity.name, ".writer"
_RUN_FILE = re.compile(r"[a-z_]+\.(?:toml|json|jsonl)|pretrained/\w[\w.-]*")
"""What a machine that goes on with the run needs besides checkpoints. None of it can be outside of its folder."""
_OF_THE_MACHINE = [path.name for path in (_FOLDER.status, _FOLDER.events, _FOLDER.ranks, _FOLDER.trainer)]
_STEP = re.compile(rf"(?P<run>.+?)(?:/{_CHECKPOINTS})?/{re.escape(CHECKPOINT_PREFIX)}(?P<step>\d+)")
_is_run_id = re.compile("[0-9a-f]{32}").fullmatch
WRITABLE = {**{each: f"{each}://BUCKET/RUN" for each in ("s3", "gs", "az")}, "hf": "hf://OWNER/NAME/RUN"}


def is_run_file(name: str) -> bool:
    return _RUN_FILE.fullmatch(name) is not None and name not in _OF_THE_MACHINE


def split_url(url: str) -> tuple[str, int | None]:
    """The run of s3://bucket/run, s3://bucket/run/step-20 or s3://bucket/run/checkpoints/step-20, and the step."""
    match = _STEP.fullmatch(url.rstrip("/"))
    return (match["run"], int(match["step"])) if match else (url.rstrip("/"), None)


def check_writable(url: str) -> None:
    """ConfigError for a --checkpoint_store that nothing can be uploaded to."""
    if not is_store(url) or url.partition("://")[0] not in WRITABLE:
        raise ConfigError(
            f"--checkpoint_store {without_secrets(url)} is not a place that checkpoints can be uploaded to",
            fix=f"use one of {', '.join(WRITABLE.values())}",
        )
    check_url(url)
    if split_url(url)[1] is not None:
        raise ConfigError(
            f"--checkpoint_store {url} is a checkpoint, not a run", fix=f"use --checkpoint_store {split_url(url)[0]}"
        )


class RunStore:
    """Nothing is asked of the store before a method is called; DataError if it does not answer."""

    def __init__(self, url: str, *, patience_s: float | None = None) -> None:
        """patience_s: how long a request is tried again; by default, minutes"""
        self.store = open_store(url, patience_s=patience_s)
        self.url = self.store.url

    def text(self, name: str) -> str:
        """A small object; empty if there is none."""
        try:
            return self.store.get(name).decode("utf-8", errors="replace").strip()
        except MissingObjectError:
            return ""

    def run_id(self) -> str:
        """Of the run that this place belongs to; empty if it is free."""
        found = self.text(ID)
        if found and not _is_run_id(found):
            raise DataError(
                f"{self.url}/{ID} is not the id of a run", fix="choose another URL, or remove what is there"
            )
        return found

    def claim(self, run_id: str) -> None:
        """Make this place the run's own; ConfigError if it is another's."""
        found = self.run_id()
        if not found:
            self.store.put(ID, run_id.encode())
            found = self.run_id()  # of two that claim it at the same time, one reads the other's
        if found != run_id:
            raise other_run(self.url)

    def checkpoints(self) -> dict[int, dict[str, int]]:
        """Files and their sizes by step, oldest first; without a manifest, one is not complete."""
        found: dict[int, dict[str, int]] = {}
        for name, size_bytes in self.store.list(_CHECKPOINTS).items():
            _, folder, *rest = PurePosixPath(name).parts
            number = folder.removeprefix(CHECKPOINT_PREFIX)
            if len(rest) == 1 and number.isdecimal() and folder == RunFolder.checkpoint_name(int(number)):
                found.setdefault(int(number), {})[rest[0]] = size_bytes
        return dict(sorted(found.items()))

    def complete(self) -> dict[int, dict[str, int]]:
        """The same, of those that are complete."""
        return {step: files for step, files in self.checkpoints().items() if MANIFEST in files}

    def name(self, step: int, file: str) -> str:
        return f"{_CHECKPOINTS}/{RunFolder.checkpoint_name(step)}/{file}"

    def place(self, step: int) -> str:
        """For the user."""
        return f"{self.url}/{_CHECKPOINTS}/{RunFolder.checkpoint_name(step)}"

    def delete(self, step: int, files: Sequence[str]) -> None:
        """Remove a checkpoint, what completes it first."""
        for file in sorted(files, key=lambda file: file != MANIFEST):
            self.store.delete(self.name(step, file))

    def set_aside(self, step: int) -> None:
        """Keep a damaged checkpoint from being used or counted again, without deleting anything of it."""
        self.store.put(self.name(step, DAMAGED), self.store.get(self.name(step, MANIFEST)))
        self.store.delete(self.name(step, MANIFEST))

    def run_files(self) -> list[str]:
        """Names of the run's files besides checkpoints."""
        names = [name for name in self.store.list() if not name.startswith(f"{_CHECKPOINTS}/")]
        return [name for name in names if is_run_file(name)]

    def settings(self) -> dict[str, Any] | None:
        """Of the run's config.toml; None if there is none."""
        with tempfile.TemporaryDirectory(prefix="drumline-") as place:
            folder = RunFolder(Path(place))
            try:
                folder.config.write_bytes(self.store.get(folder.config.name))
                folder.data.write_bytes(self.text(folder.data.name).encode())
            except MissingObjectError:
                return None
            try:
                return stored_settings(folder)
            except ConfigError as error:
                raise type(error)(error.problem.replace(place, self.url), fix=error.fix) from None


def stored_in(url: str) -> dict[str, Any] | None:
    """The settings of the run in a store; None if there is none.

    Read by another process: obstore, once used, does not survive a fork, and ranks may be forked from this one.
    """
    check_url(url)
    words = [sys.executable, "-P", "-m", __name__, split_url(url)[0]]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    answer = json_of(done.stdout)
    if "problem" in answer:
        raise DataError(answer["problem"], fix=answer["fix"])
    if done.returncode != 0 or "settings" not in answer:
        raise DataError(f"the config of {url} cannot be read (exit code {done.returncode})", fix="start again")
    settings: dict[str, Any] | None = answer["settings"]
    return settings


def other_run(url: str) -> ConfigError:
    return ConfigError(
        f"{url} belongs to another run, which would be overwritten",
        fix="choose another --checkpoint_store; to go on with that run, choose a --run_dir that does not exist",
    )


def none_there(run: RunStore, step: int | None, steps: Sequence[int]) -> CheckpointError:
    what = "complete checkpoint" if step is None else f"complete checkpoint of step {step:,}"
    there = f" (steps there: {', '.join(map(str, steps))})" if steps else ""
    return CheckpointError(
        f"{run.url} has no {what}{there}", fix=f"see what is there: drumline checkpoint list {run.url}"
    )


def json_of(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _main(url: str) -> None:
    try:
        answer: dict[str, Any] = {"settings": RunStore(url).settings()}
    except DrumlineError as error:
        answer = {"problem": error.problem, "fix": error.fix}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    _main(sys.argv[1])
