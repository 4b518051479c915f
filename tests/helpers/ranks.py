"""Real ranks for tests: processes that meet as torchrun's do, forked from a server that has torch."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import helpers.idle  # noqa: F401
from drumline.network import free_port
from drumline.signals import start_afresh

TIMEOUT_S = 120
RAISED = 99
_LOST = re.compile(
    r"DistNetworkError|DistStoreError|EADDRINUSE|port \d+ .* is in use|[Cc]onnection (closed|reset|refused)|Broken pipe"
)

# Forked from one server that has imported torch already, ranks start in milliseconds instead of seconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "hypothesis",
        "torch",
        "torch._dynamo",  # what any optimizer imports
        "torch.distributed",
        "torch.nn.parallel",
        "drumline.train.pretraining",
        "drumline.trainer.trainer",
        "drumline.cli.train",
        "matplotlib.figure",
    ]
)


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    code: int
    out: str
    err: str
    value: Any = None


def run_ranks(
    work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], *, environ: dict[str, str] | None = None
) -> list[Outcome]:
    """Call `work(*arguments[r])` on rank r of len(arguments); an int it returns is its exit code."""
    outcomes = _run_ranks(work, arguments, environ)
    if any(outcome.code == RAISED and _LOST.search(outcome.err) for outcome in outcomes):
        # Another test may have taken the port between its choice and its use: they did not meet each other.
        outcomes = _run_ranks(work, arguments, environ)
    return outcomes


def _run_ranks(
    work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], environ: dict[str, str] | None
) -> list[Outcome]:
    port, size = free_port(), len(arguments)
    processes, pipes = [], []
    for rank in range(size):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        variables = {
            **{name: str(value) for name, value in place.items()},
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(
            target=_rank, args=(theirs, Path.cwd(), {**variables, **(environ or {})}, work, arguments[rank])
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        return [_answer(rank, *each) for rank, each in enumerate(zip(processes, pipes, strict=True))]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()


def _answer(rank: int, process: BaseProcess, pipe: Connection) -> Outcome:
    if not pipe.poll(TIMEOUT_S):
        return Outcome(-1, "", f"rank {rank} gave no answer")
    try:
        answer: Outcome = pipe.recv()
    except EOFError:
        process.join()
        return Outcome(process.exitcode or RAISED, "", f"rank {rank} died without an answer")
    return answer


def train_ranks(
    size: int, *flags: str, last: Sequence[str] = (), environ: dict[str, str] | None = None
) -> list[Outcome]:
    """`drumline train` with these flags on every rank; `last` are more flags for the last rank alone."""
    arguments = [["train", *flags, *(last if rank == size - 1 else ())] for rank in range(size)]
    return run_ranks(_command, [(argv,) for argv in arguments], environ=environ)


def _command(argv: list[str]) -> int:
    from drumline.cli.app import run_command

    return run_command(argv)


def _rank(
    pipe: Connection, cwd: Path, environ: dict[str, str], work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    start_afresh()  # whoever started the server first may have blocked signals in it
    os.chdir(cwd)
    os.environ.update(environ)
    import torch

    torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    out, err, code, value = io.StringIO(), io.StringIO(), 0, None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            value = work(*arguments)
            code = value if isinstance(value, int) else 0
    except BaseException as error:
        code = RAISED
        err.write(f"{type(error).__name__}: {error}")
    from drumline.parallel.world import leave

    leave()  # as a process does at its exit, which one that multiprocessing started does not
    pipe.send(Outcome(code, out.getvalue(), err.getvalue(), value))
    sys.stdout.flush()
