"""Loggers besides the run folder: TensorBoard, Weights & Biases, and the user's own."""

from __future__ import annotations

import os
import shlex
import socket
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from drumline.config import RecordConfig
from drumline.errors import MissingExtraError
from drumline.files import RunFolder
from drumline.plugins import load_plugin
from drumline.report.records import FORMATS, Formats, Record, Records, Sink

_REACH_TIMEOUT_S = 2.0


def with_epochs(epochs: float) -> Formats:
    """Records show the epoch first: epoch 2.50/10."""
    return {"epoch": lambda v: f"epoch {v:.2f}/{epochs:g}", **FORMATS}


def add_trackers(records: Records, config: RecordConfig, folder: RunFolder, *, settings: dict[str, Any]) -> None:
    """Let records go to the requested trackers too, and say where that is."""
    for sink in open_trackers(config, folder, settings=settings):
        records.sinks.append(sink)
        if note := getattr(sink, "note", ""):
            records.say(note)


def open_trackers(records: RecordConfig, folder: RunFolder, *, settings: dict[str, Any]) -> list[Sink]:
    """The requested trackers."""
    sinks: list[Sink] = []
    if records.tensorboard:
        sinks.append(TensorBoardSink(folder.tensorboard))
    if records.use_wandb:
        name = records.wandb_run_name or folder.path.name
        sinks.append(WandbSink(folder.path, project=records.wandb_project, name=name, settings=settings))
    if records.sink is not None:
        sinks.append(load_plugin(records.sink)(folder.path))
    return sinks


def numbers(record: Record) -> dict[str, float]:
    return {key: value for key, value in record.items() if key != "step" and isinstance(value, int | float)}


class TensorBoardSink:
    def __init__(self, path: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError("--tensorboard", extra="tensorboard") from None
        self._open = partial(SummaryWriter, str(path))
        self._writer: Any = None

    def write(self, record: Record) -> None:
        if self._writer is None:  # opened late: on a full disk this fails, which here only disables this sink
            self._writer = self._open()
        for key, value in numbers(record).items():
            self._writer.add_scalar(key, value, record["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbSink:
    def __init__(self, path: Path, *, project: str, name: str, settings: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtraError("--use_wandb", extra="wandb") from None
        # WANDB_MODE, if the user set it, is read by W&B itself.
        url, has_key = wandb.Settings().base_url, wandb.api.api_key is not None
        chosen = os.environ.get("WANDB_MODE")
        mode = None if chosen else wandb_mode(url, has_key=has_key)
        why = f"{url} cannot be reached" if has_key else "not logged in (to do that: wandb login)"
        why = {"offline": "WANDB_MODE is offline"}.get(chosen, "") if chosen else why if mode == "offline" else ""
        self._run = wandb.init(
            project=project,
            name=name,
            dir=str(path),
            mode=mode,
            config=settings,
            # No code, git info or command line (meta): W&B only gets the config above and the metrics.
            settings=wandb.Settings(
                silent=True, disable_code=True, disable_git=True, x_disable_meta=True, init_timeout=30
            ),
        )
        self.note = self._where(why)

    def _where(self, why_offline: str) -> str:
        """Where the metrics go, for users: W&B itself is silent. why_offline: empty if it is online"""
        url, files = getattr(self._run, "url", None), getattr(self._run, "dir", None)
        if url and not why_offline:
            return f"wandb  {url}"
        if not files or not why_offline:
            return ""  # WANDB_MODE=disabled
        folder = shlex.quote(str(Path(files).parent))
        return f"wandb  offline: {why_offline}; to upload the run later:\n  wandb sync {folder}"

    def write(self, record: Record) -> None:
        self._run.log(numbers(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


def wandb_mode(base_url: str, *, has_key: bool) -> Literal["online", "offline"]:
    """Online only with a key and a reachable server: with a key alone, W&B blocks and then kills the run."""
    if not has_key:
        return "offline"
    url = urlsplit(base_url)
    try:
        socket.create_connection((url.hostname or "", url.port or 443), timeout=_REACH_TIMEOUT_S).close()
    except OSError:
        return "offline"
    return "online"
