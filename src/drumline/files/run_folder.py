"""The layout of a run folder. The only module that knows these paths."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.files.disk import Lock, replace_text

if TYPE_CHECKING:
    from drumline.config import TrainConfig

CHECKPOINT_PREFIX = "step-"
_HOLD_WAIT_S = 5.0
_is_run_id = re.compile("[0-9a-f]{32}").fullmatch
"""Whether a text is the name of a run. Anything else is not used: it could be a path, such as ../../home."""


class RunFolder:
    """runs/NAME: everything about one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.tokenizer = path / "tokenizer.json"
        self.pretrained = path / "pretrained"
        """Small files of the Hugging Face model that the run began from, which an export gives back."""
        self.data = path / "data.json"
        """Where the data are, and which: to find them again from another folder or on another machine."""
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.ranks = path / "ranks.jsonl"
        """Where the time of each rank's steps went."""
        self.samples = path / "samples.jsonl"
        """What the model wrote at each evaluation."""
        self.log = path / "train.log"
        self.events = path / "events.jsonl"
        """Events besides steps: saves, restarts, skipped data, disk problems."""
        self.status = path / "status.json"
        self.evals = path / "evals"
        """Results of tasks, by step."""
        self.report = path / "report.html"
        self.tensorboard = path / "tensorboard"
        self.trainer = path / "trainer.json"
        """What a run of `Trainer` is: by this a script that is started again knows its own run."""
        self.lock = path / ".lock"
        self.leader = path / ".leader"
        """The leader's lease, if several hosts train together."""
        self.resumed = path / ".resumed"
        """Exists once --resume_from was followed, so that restarted ranks do not follow it again."""
        self.identity = path / ".id"
        self._run_id = ""
        self.held: Lock | None = None
        self.began = False
        """Whether training has begun here; until then, an error leaves the folder as it was (`hold`)."""

    @staticmethod
    def checkpoint_name(step: int) -> str:
        return f"{CHECKPOINT_PREFIX}{step:08d}"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / self.checkpoint_name(step)

    def run_id(self) -> str:
        """A unique name: no other run has it, not even a later one at the same path."""
        if not self._run_id:
            self._run_id = self.stored_id()
            if not _is_run_id(self._run_id):
                if self._run_id:
                    logging.getLogger(__name__).warning("%s is no id of a run; it gets a new one", self.identity)
                self._run_id = uuid.uuid4().hex  # if it cannot be written, it lives as long as the process
                with suppress(OSError):
                    replace_text(self.identity, self._run_id)
        return self._run_id

    def stored_id(self) -> str:
        """The name of the run that is in this folder now; empty if there is none."""
        with suppress(OSError, ValueError):
            return self.identity.read_text(encoding="utf-8").strip()
        return ""

    @contextmanager
    def hold(self, *, wait_s: float = _HOLD_WAIT_S) -> Iterator[None]:
        """Keep other processes from training in this folder; ConfigError if one does.

        Waits a little first: a process that was stopped or killed may take a moment to exit.
        """
        missing, before = [path for path in (self.path, *self.path.parents) if not path.exists()], {}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = Lock(self.lock)
        except OSError as error:
            from drumline.files.runs import not_writable

            raise not_writable(self, error) from None
        with closing(lock):
            if not lock.take(wait_s=wait_s):
                from drumline.files.runs import in_use

                raise in_use(self)
            self.held = lock
            if not missing:
                from drumline.files.undoing import contents

                before = contents(self)
            with suppress(OSError):  # the holder is only informative: a full disk is no reason to stop
                os.ftruncate(lock.descriptor, 0)
                os.pwrite(lock.descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)
            try:
                yield
            except BaseException:
                if not self.began:
                    from drumline.files.undoing import undo

                    undo(self, before, missing)
                raise

    def read_status(self) -> dict[str, Any]:
        """The last status of the run, without numbers that are none; {} if there is no status."""
        from drumline.files.runs import read_status

        return read_status(self)

    def write_status(self, state: str, *, step: int, total_steps: int, **more: Any) -> None:
        """Replace status.json atomically.

        OSError if it cannot be written: a Journal keeps that from ending a run.
        """
        status = {"state": state, "step": step, "total_steps": total_steps, **more}
        status |= {"pid": os.getpid(), "host": socket.gethostname(), "updated": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        replace_text(self.status, json.dumps(status, indent=2) + "\n")


def choose_folder(config: TrainConfig) -> RunFolder:
    """The folder asked for; else runs/PRESET, runs/PRESET-2, ...: the first that is free, or this config unfinished."""
    if config.run.run_dir is None or os.path.exists(config.run.run_dir):
        from drumline.files.runs import existing_or_free

        return existing_or_free(config)
    return RunFolder(Path(config.run.run_dir))
