"""The page of a run that is being started: a process of its own, which ends with the one that trains or supervises."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from drumline.watch.server import WatchConfig, serve_page

_CODE = "import sys; from drumline.watch import serve_beside; serve_beside(sys.argv[1])"


def start_page(run_dir: str | None) -> subprocess.Popen[bytes] | None:
    """Serve the folder of a run, or of all runs if the run has yet to choose one; rank 0 of a launcher does so."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0":
        return None
    # Ctrl-C is for the run, which goes on until it has saved. The pipe closes with this process, however it ends.
    command = [sys.executable, "-c", _CODE, run_dir or "runs"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def serve_beside(where: str) -> None:
    """Serve until the process that has started this one is gone."""
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    serve_page(Path(where), WatchConfig(), say=_say)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _end_with_stdin() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
