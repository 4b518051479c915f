"""`drumline train` in a process of its own, watched from outside; for benchmarks of what users run."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from drumline.elastic.scratch import newest_attempt
from drumline.elastic.watch import Beat, read_pulse
from drumline.report.records import read_metrics

_IDS = 50257
_PATIENCE_S = 600.0


def random_tokens(path: Path, *, tokens: int = 1 << 20, ids: int = _IDS) -> Path:
    """A file of tokens, as nanoGPT has them: what is trained on makes no difference to any time."""
    draw = random.Random(0)
    path.write_bytes(struct.pack(f"<{tokens}H", *(draw.randrange(ids) for _ in range(tokens))))
    return path


class Training:
    """One rank under a supervisor, or as many as the flags say, until the block ends."""

    def __init__(self, run: Path, data: Path, flags: Sequence[str]) -> None:
        self.run = run
        words = ["--train_data_path", str(data), "--vocab_size", "50304", "--run_dir", str(run), "--nproc", "1"]
        once = ["--eval_every", "100000000", "--eval_windows", "1", "--total_steps", "10000000", "--doctor", "off"]
        self._log = (run.parent / f"{run.name}.log").open("w")
        self._launcher = subprocess.Popen(
            [sys.executable, "-m", "drumline", "train", *words, *once, *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Training:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._launcher.kill()
        self._launcher.wait()
        self._log.close()

    @property
    def launcher_pid(self) -> int:
        return self._launcher.pid

    def beat(self, rank: int = 0) -> Beat | None:
        attempt = newest_attempt(self._launcher.pid)
        return read_pulse(attempt, rank) if attempt else None

    def wait_for_step(self, step: int, *, but: int = 0) -> tuple[float, Beat]:
        """When a rank (other than the process `but`) had done so many steps."""
        return self.wait_for(lambda beat: beat.step >= step and beat.phase not in ("starting", "ending"), but=but)

    def wait_for(self, condition: Callable[[Beat], bool], *, but: int = 0) -> tuple[float, Beat]:
        """When the heartbeat of a rank (other than the process `but`) first meets a condition."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            beat = self.beat()
            if beat and beat.pid != but and condition(beat):
                return time.monotonic(), beat
            if self._launcher.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"training ended, or stands still:\n{Path(self._log.name).read_text()[-3000:]}")
            time.sleep(0.002)

    def follow(self, last: int) -> list[float]:
        """Seconds of each step until one is done; those that came too fast to be seen share their time."""
        began, beat = self.wait_for_step(1)
        took: list[float] = []
        while beat.step < last:
            now, following = self.wait_for_step(beat.step + 1)
            took += [(now - began) / (following.step - beat.step)] * (following.step - beat.step)
            began, beat = now, following
        return took

    def kill(self) -> Beat:
        """kill -9 the rank; gives its last sign of life."""
        _, beat = self.wait_for_step(1)
        os.kill(beat.pid, signal.SIGKILL)
        return self.beat() or beat

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.run / "events.jsonl"
        return [event for event in read_metrics(path) if event["event"] == name] if path.exists() else []
