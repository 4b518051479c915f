"""Start the ranks of a run on this machine, through torch's elastic agent."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from drumline.cluster import find_place
from drumline.config import TrainConfig
from drumline.config_file import to_toml
from drumline.errors import EXIT_CODES, EXIT_FAILED, EXIT_STOPPED, DrumlineError, RunLostError
from drumline.records import tell

_MONITOR_S = 0.1


def ranks_to_start(config: TrainConfig) -> int:
    """How many ranks this process should start: none if it is one itself, or if one process is all there is to do."""
    if "RANK" in os.environ or find_place(os.environ).size > 1:
        return 0
    on_gpus = config.run.device in ("auto", "cuda") and torch.cuda.is_available()
    wanted = config.ranks.nproc or (torch.cuda.device_count() if on_gpus else 1)
    return wanted if wanted > 1 else 0


def launch_training(config: TrainConfig, *, nproc: int) -> int:
    """Train with `nproc` ranks here; gives the exit code that a single process would."""
    with tempfile.TemporaryDirectory(prefix="drumline-") as folder:
        file = Path(folder) / "config.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        command = ("-m", "drumline", "train", "--config", str(file))
        return start_ranks(sys.executable, command, nproc=nproc, max_restarts=config.ranks.max_restarts)


def start_ranks(entry: str | Callable[..., Any], args: tuple[Any, ...], *, nproc: int, max_restarts: int = 0) -> int:
    """Run a command or a function as ranks 0 to nproc - 1 of one run; gives the exit code of the first that failed."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say ourselves what went wrong
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (psutil.cpu_count(logical=False) or 1) // nproc)))
    # Without this a restarted rank may meet the store of the attempt before, and wait for ever.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if callable(entry):
        entry, args = _outspoken, (entry, *args)
    try:
        with tempfile.TemporaryDirectory(prefix="drumline-") as logs:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=nproc,
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint=f"localhost:{meeting_port(os.environ.get('MASTER_PORT'))}",
                max_restarts=max_restarts,
                monitor_interval=_MONITOR_S,
                start_method="spawn",
                local_addr="localhost",
                logs_specs=DefaultLogsSpecs(log_dir=logs),
            )
            elastic_launch(config, entry)(*args)
    except SignalException:
        return EXIT_STOPPED
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode in EXIT_CODES:
            return failure.exitcode  # the rank has said what was wrong
        raise RunLostError(
            f"rank {rank} (process {failure.pid}) {_how(failure.exitcode)}", fix="start the same command again to go on"
        ) from None
    return 0


def _outspoken(work: Callable[..., Any], *args: Any) -> None:
    """Call a user's function as a rank, and say what went wrong: torch keeps it for the parent, which is silent."""
    try:
        work(*args)
    except DrumlineError as error:
        tell(error)
        sys.exit(error.exit_code)
    except Exception:
        traceback.print_exc()
        sys.exit(EXIT_FAILED)


def meeting_port(wanted: str | None) -> int:
    """The port the ranks meet at: MASTER_PORT if it is set and free, else any free one."""
    if not wanted:
        return 0
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(wanted)))
        except OSError as error:
            logging.getLogger(__name__).warning("MASTER_PORT %s: %s; using another port", wanted, error.strerror)
            return 0
    return int(wanted)


def _how(exitcode: int) -> str:
    return f"was ended by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"ended with exit code {exitcode}"
