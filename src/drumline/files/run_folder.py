"""What lies where in a run's folder. The only module that knows these paths."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from drumline.errors import ConfigError
from drumline.files.disk import locked, replace_text

CHECKPOINT_PREFIX = "step-"
_HOLD_WAIT_S = 5.0


@dataclass(frozen=True)
class RunFolder:
    """runs/NAME: everything about one run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "train.log"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def loss_plot(self) -> Path:
        return self.path / "loss.png"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    @property
    def events(self) -> Path:
        """What happened to the run beside its steps: saves, restarts, skipped data, disks in trouble."""
        return self.path / "events.jsonl"

    @staticmethod
    def checkpoint_name(step: int) -> str:
        return f"{CHECKPOINT_PREFIX}{step:08d}"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / self.checkpoint_name(step)

    @property
    def resumed(self) -> Path:
        """Is there when what --resume_from asked for has been done: ranks that are started again do not do it again."""
        return self.path / ".resumed"

    @property
    def identity(self) -> Path:
        return self.path / ".id"

    def run_id(self) -> str:
        """A name that no other run has, not even a later one in a folder of the same path."""
        path = self.identity
        with suppress(OSError):
            if not path.exists():
                replace_text(path, uuid.uuid4().hex)
            if name := path.read_text(encoding="utf-8").strip():
                return name
        return uuid.uuid4().hex  # on a disk that takes nothing the name lasts as long as the process

    @contextmanager
    def hold(self, *, wait_s: float = _HOLD_WAIT_S) -> Iterator[None]:
        """Keep every other process from training in this folder; ConfigError if one does.

        It waits a little first: a process that was told to stop, or was killed, may take a moment to be gone.
        """
        with ExitStack() as held:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                descriptor = held.enter_context(locked(self.lock, wait_s=wait_s))
            except BlockingIOError:
                raise ConfigError(
                    f"{self.path} is in use: {self._holder()} trains there",
                    fix="wait until it ends, stop it, or choose another --run_dir",
                ) from None
            except OSError as error:
                raise ConfigError(
                    f"{self.path} cannot be written ({error})",
                    fix="make room there or mend its permissions, or choose another --run_dir",
                ) from None
            with suppress(OSError):  # who holds it is for people to read: a full disk is no reason to stop
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)
            yield

    def _holder(self) -> str:
        try:
            holder = json.loads(self.lock.read_text(encoding="utf-8"))
            return f"process {holder['pid']} on {holder['host']}"
        except (OSError, ValueError, TypeError, KeyError):
            return "another process"

    def read_status(self) -> dict[str, Any]:
        """What the run last said of itself; {} when it never did."""
        try:
            status = json.loads(self.status.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return status if isinstance(status, dict) else {}

    def write_status(self, state: str, *, step: int, total_steps: int, **more: Any) -> None:
        """Replace status.json whole: a reader sees the old one or the new one, never half of one.

        OSError if the disk does not take it: `Records.attempt` keeps that from ending a run.
        """
        status = {
            "state": state,
            "step": step,
            "total_steps": total_steps,
            **more,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "updated": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        replace_text(self.status, json.dumps(status, indent=2) + "\n")

    def state(self) -> str:
        """finished, stopped, failed or running; lost when it says running and its process is gone from this host.

        A supervisor that starts the ranks again is running, too.
        """
        status = self.read_status()
        state = str(status.get("state", "new"))
        if (
            state in ("running", "restarting")
            and status.get("host") == socket.gethostname()
            and not psutil.pid_exists(int(status.get("pid", 0)))
        ):
            return "lost"
        return state
