"""What lies where in a run's folder. The only module that knows these paths."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from drumline.disk import replace_text

CHECKPOINT_PREFIX = "step-"


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

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"{CHECKPOINT_PREFIX}{step:08d}"

    def read_status(self) -> dict[str, Any]:
        """What the run last said of itself; {} when it never did."""
        try:
            status = json.loads(self.status.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return status if isinstance(status, dict) else {}

    def write_status(self, state: str, *, step: int, total_steps: int, **more: Any) -> None:
        """Replace status.json whole: a reader sees the old one or the new one, never half of one."""
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
        """finished, stopped, failed or running; lost when it says running and its process is gone from this host."""
        status = self.read_status()
        state = str(status.get("state", "new"))
        if (
            state == "running"
            and status.get("host") == socket.gethostname()
            and not psutil.pid_exists(int(status.get("pid", 0)))
        ):
            return "lost"
        return state
