"""Trains from a checkpoint to a step once more: in a temporary copy of the run, by the one training loop."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from drumline.checkpoint import Checkpoint
from drumline.config import RecordConfig, TrainConfig, to_toml
from drumline.errors import EXIT_STOPPED, TrainingError
from drumline.files import RunFolder, origin, replace_text
from drumline.reasons.runs import PureRun
from drumline.train import Loop, pretrain

AGAIN = "DRUMLINE_AGAIN"
"""Environment variable of every rank that computes a run again: its last step, and the data that rollbacks skip."""
_LINES_SHOWN = 12
_MAY_HAVE_CHANGED = ("skip_list", "seed", "batch_size", "global_batch_size")
"""Where a run went on with other settings (--allow_change), the checkpoint is still of those before."""


def end_early(loop: Loop) -> None:
    """Stop the loop after that step, as a signal would: with its state saved.

    Rollbacks are known from the start: the steps are those that the run ended up with, not those that it gave up.
    """
    about, history = json.loads(os.environ[AGAIN]), loop.history
    begin = history.begin

    def ask(step: int) -> None:
        if step + 1 >= about["last"]:  # the step during which a loop is asked to stop is its last one
            loop.stop.set()

    def begin_again() -> int:
        step = begin()
        history.detours = about["detours"]
        ask(step)
        return step

    setattr(history, "begin", begin_again)  # noqa: B010 - a method of this one object
    loop.setup.stepped = lambda step, result: ask(step)


def _about(run: PureRun, until: int) -> str:
    return json.dumps({"last": until, "detours": run.detours})


@contextmanager
def computed_again(
    run: PureRun, start: Checkpoint | None, *, until: int, ranks: int = 1, trusts: bool = False
) -> Iterator[RunFolder]:
    """A temporary run folder with a checkpoint of step `until`, and records of every step on the way there.

    start: a checkpoint before that step; None: the initial weights
    """
    with tempfile.TemporaryDirectory(prefix="drumline-again-") as folder:
        copy = RunFolder(Path(folder, "run"))
        config = _config(run, copy, ranks=ranks)
        _fill(copy, run, start, config)
        if ranks == 1:
            _train_here(config, _about(run, until))
        else:
            _launch(run, copy, until=until, ranks=ranks, trusts=trusts)
        if not copy.checkpoint(until).exists():
            raise KeyboardInterrupt  # the only other reason for a loop to end
        yield copy


def _config(run: PureRun, copy: RunFolder, *, ranks: int) -> TrainConfig:
    """The run's settings, without what does not change a step: evaluations, trackers, most saves."""
    was = run.config.run
    own = replace(
        was,
        run_dir=str(copy.path),
        resume_from="auto",
        allow_change=_MAY_HAVE_CHANGED,
        eval_every=run.total_steps + 1,
        eval_tasks=None,
        save_every=run.total_steps + 1,
        snapshot_every=0,
        spike_factor=None,  # what was rolled back is known
        on_nonfinite="halt" if was.on_nonfinite == "halt" else "skip",
        doctor="off",
    )
    shard = run.config.ranks.shard
    if ranks == 1 and was.offload == "none":
        shard = "none"
    elif shard == "host" or (isinstance(shard, int) and (ranks == 1 or ranks % shard)):
        shard = "full"  # the same bits, or the same up to rounding, as by groups that these ranks cannot form
    together = replace(
        run.config.ranks,
        nproc=ranks if ranks > 1 else None,
        nnodes="1",
        rdzv_endpoint=None,
        max_restarts=0,
        shard=shard,
    )
    return replace(run.config, run=own, ranks=together, records=RecordConfig(log_every=1))


def _fill(copy: RunFolder, run: PureRun, start: Checkpoint | None, config: TrainConfig) -> None:
    folder = run.folder
    copy.checkpoints.mkdir(parents=True)
    for path in (folder.data, folder.tokenizer, folder.status):
        if path.exists():
            shutil.copyfile(path, copy.path / path.name)
    if folder.pretrained.exists():
        shutil.copytree(folder.pretrained, copy.pretrained)
    replace_text(copy.config, to_toml(config))
    if start is not None:
        # A file of a checkpoint is never written to, so that a second name for it is as good as a copy.
        shutil.copytree(start.path, copy.checkpoint(start.step), copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copyfile(source, target)


def _train_here(config: TrainConfig, about: str) -> None:
    threads = torch.get_num_threads()
    os.environ[AGAIN] = about
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            pretrain(config)
    finally:
        torch.set_num_threads(threads)  # --bitwise takes one
        del os.environ[AGAIN]


def _launch(run: PureRun, copy: RunFolder, *, until: int, ranks: int, trusts: bool) -> None:
    words = ["train", "--run_dir", str(copy.path), "--nproc", str(ranks), *(["--trust"] if trusts else [])]
    environ = {**os.environ, AGAIN: _about(run, until)}
    cwd = origin(run.folder).get("cwd")
    if isinstance(cwd, str) and cwd in sys.path:  # where the run was started, if modules may come from there
        environ["PYTHONPATH"] = os.pathsep.join([cwd, *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        [sys.executable, "-m", "drumline", *words],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        output = process.communicate()[0]
    if process.returncode not in (0, EXIT_STOPPED):
        raise TrainingError(
            f"{run.folder.path} could not be computed again on {ranks} ranks, up to step {until:,}: "
            f"exit code {process.returncode}",
            fix="see the lines above; with --ranks 1 it needs one process only",
            details=output.strip().splitlines()[-_LINES_SHOWN:],
        )
