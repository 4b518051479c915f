"""Whole runs that wait at chosen steps, so that a test does to them what it wants when it wants."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from drumline.signals import start_afresh
from helpers.ranks import _CONTEXT, TIMEOUT_S


class Gated:
    """`drumline train` in a process of its own, which stops before each of some steps until it is told to go on."""

    def __init__(self, scratch: Path, argv: Sequence[str], *, gates: Sequence[int], retry_s: float) -> None:
        scratch.mkdir()
        self._scratch, self.log = scratch, scratch / "log"
        self._process: Any = _CONTEXT.Process(
            target=_train, args=(list(argv), list(gates), scratch, retry_s, Path.cwd())
        )
        self._process.start()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""

    def wait_at(self, step: int) -> None:
        """Until it has done so many steps."""
        self.wait_until((self._scratch / f"at-{step}").exists)

    def go(self, step: int) -> None:
        (self._scratch / f"go-{step}").touch()

    def wait_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self._process.is_alive() and time.monotonic() < deadline, self.said
            time.sleep(0.01)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def end(self) -> int:
        """Its exit code."""
        self._process.join(TIMEOUT_S)
        return int(self._process.exitcode)


@contextlib.contextmanager
def gated(scratch: Path, argv: Sequence[str], *, gates: Sequence[int] = (), retry_s: float = 0.05) -> Iterator[Gated]:
    """retry_s: the pause before a save that failed is tried again"""
    run = Gated(scratch, argv, gates=gates, retry_s=retry_s)
    try:
        yield run
    finally:
        run.kill()


def _train(argv: list[str], gates: list[int], scratch: Path, retry_s: float, cwd: Path) -> None:
    start_afresh()
    os.chdir(cwd)
    import torch

    from drumline.checkpoint import saver
    from drumline.cli.app import run_command
    from drumline.train.loop import Loop

    torch.set_num_threads(1)
    step_of_the_loop, polled = Loop._step, saver.Saver.poll
    savers: list[saver.Saver] = []

    def poll(its: saver.Saver) -> None:
        savers[:] = [its]
        polled(its)

    def gated_step(loop: Loop, step: int) -> Any:
        if step in gates:
            gates.remove(step)
            (scratch / f"at-{step}").touch()
            while not (scratch / f"go-{step}").exists():
                for its in savers:
                    polled(its)  # a save ends when the loop looks at it, which may be after this step
                time.sleep(0.005)
        return step_of_the_loop(loop, step)

    Loop._step = gated_step  # type: ignore[method-assign,assignment]
    saver.Saver.poll = poll  # type: ignore[method-assign]
    saver._RETRY_S = (retry_s, retry_s)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((scratch / "log").open("w", encoding="utf-8"))
        stack.enter_context(contextlib.redirect_stdout(log))
        stack.enter_context(contextlib.redirect_stderr(log))
        code = run_command(["train", *argv])
    os._exit(code)
