"""Told to stop, a run ends soon and loses nothing, whatever it is doing at the moment and whichever signal tells it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from helpers.ranks import train_ranks
from helpers.small import small
from helpers.warm import Warm

from drumline.checkpoint.checkpoints import checkpoint_paths, open_checkpoint
from drumline.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from drumline.files.run_folder import RunFolder

TIMEOUT_S = 120
STEPS = 10

PHASES = '''
import os, signal, time
import drumline.train.pretraining, drumline.train.summary, drumline.checkpoint.in_memory, drumline.checkpoint.saver
from drumline.model.gpt import GPT

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
HOLD = os.environ.get("HOLD")
has_held = False

def hold(phase):
    """Say that this phase has come, and stay in it until a signal has."""
    global has_held
    if has_held or HOLD != phase or os.environ.get("RANK", "0") != "0":
        return
    has_held = True
    before = [signal.getsignal(signum) for signum in SIGNALS]
    print("HELD", flush=True)
    while [signal.getsignal(signum) for signum in SIGNALS] == before:  # the loop's handler takes itself off
        time.sleep(0.01)

def story():
    for n in range(30):
        yield f"once upon a time {n} " * 20
        if n == 20:
            hold("preparing text")

class Held(GPT):
    def forward(self, *args, **kwargs):
        if HOLD == ("first step" if self.training else "evaluating"):
            hold(HOLD)
        return super().forward(*args, **kwargs)

def held_in(phase, work):
    def wait_and_work(*args, **kwargs):
        hold(phase)
        return work(*args, **kwargs)
    return wait_and_work

drumline.checkpoint.saver.write_tensors = held_in("saving", drumline.checkpoint.saver.write_tensors)
drumline.checkpoint.in_memory.write_large = held_in("saving", drumline.checkpoint.in_memory.write_large)
drumline.train.summary.write_report = held_in("exiting", drumline.train.summary.write_report)
if HOLD == "compiling":
    from torch._dynamo.backends.debugging import aot_eager  # without g++, which would take half a minute
    from torch._inductor import compile_fx
    compile_fx.compile_fx = held_in("compiling", lambda graph, inputs, **more: aot_eager(graph, inputs))
'''


def flags(*more: str) -> list[str]:
    run = ["--train_data_path", "phases:story", "--model", "phases:Held", "--run_dir", "run", "--bitwise"]
    batch = ["--global_batch_size", "8", "--save_every", "3", "--eval_every", "3", "--total_steps", str(STEPS)]
    return small(*run, *batch, *more)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with the text prepared, and the fingerprint of an undisturbed run."""
    where = tmp_path_factory.mktemp("signals")
    (where / "phases.py").write_text(PHASES)
    with contextlib.chdir(where):
        return where / "data", finish()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "phases.py").write_text(PHASES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def finish() -> str:
    """Start the run here (again), with nothing that holds it; gives the fingerprint it ends with."""
    (outcome,) = train_ranks(1, *flags())
    assert outcome.code == 0, outcome.err
    status = RunFolder(Path("run")).read_status()
    assert status["state"] == "finished"
    return str(status["weights_sha256"])


@contextlib.contextmanager
def started(*more: str, nproc: int, hold: str) -> Iterator[subprocess.Popen[str]]:
    """`drumline train`; no process is left when this ends."""
    ranks = ["--nproc", str(nproc)] if nproc else []
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    process = Warm(
        [sys.executable, "-m", "drumline", "train", *flags(*more), *ranks],
        env={**clean, "HOLD": hold},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for each in [process, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.communicate()


def stopped_in(phase: str, signum: int, *more: str, nproc: int, all_at_once: bool = False) -> tuple[int, str]:
    """Exit code and output of a run that got a signal in a phase; it left no process, and no traceback.

    all_at_once: every process of the run gets it
    """
    with started(*more, nproc=nproc, hold=phase) as process:
        assert process.stdout is not None
        before = ""
        while "HELD" not in before:
            line = process.stdout.readline()
            assert line, before
            before += line
        family = psutil.Process(process.pid).children(recursive=True)
        for each in family if all_at_once else []:
            each.send_signal(signum)
        process.send_signal(signum)
        out, err = process.communicate(timeout=TIMEOUT_S)
    _, alive = psutil.wait_procs(family, timeout=TIMEOUT_S)
    assert alive == [] and "Traceback" not in err, err
    return process.returncode, before + out + err


def saved_step() -> int:
    """Of the newest checkpoint, which is whole and is where the run says it is."""
    folder = RunFolder(Path("run"))
    checkpoint = open_checkpoint(checkpoint_paths(folder.checkpoints)[-1])
    assert checkpoint.step == folder.read_status()["step"]
    return checkpoint.step


@pytest.mark.parametrize(
    ("phase", "signum", "nproc"),
    [
        ("preparing text", signal.SIGTERM, 0),
        ("preparing text", signal.SIGUSR1, 0),
        ("preparing text", signal.SIGINT, 0),
        ("preparing text", signal.SIGHUP, 0),
        ("preparing text", signal.SIGUSR1, 2),
    ],
)
def test_before_training_has_begun_there_is_nothing_to_save(
    here: Path, prepared: tuple[Path, str], phase: str, signum: int, nproc: int
) -> None:
    code, said = stopped_in(phase, signum, nproc=nproc)
    assert code == EXIT_INTERRUPTED, said
    assert nproc or "error: interrupted\n  fix: run the same command again" in said
    assert not list((here / "run").glob("checkpoints/step-*"))
    assert finish() == prepared[1]


@pytest.mark.parametrize(
    ("phase", "signum", "nproc", "step"),
    [
        ("first step", signal.SIGTERM, 0, 2),
        ("evaluating", signal.SIGINT, 0, 4),
        ("first step", signal.SIGHUP, 0, 2),
        ("saving", signal.SIGUSR1, 0, None),
        ("first step", signal.SIGINT, 2, 2),
        ("evaluating", signal.SIGUSR1, 2, 4),
        ("saving", signal.SIGTERM, 2, None),
    ],
)
def test_while_training_everything_is_saved_and_the_run_goes_on_to_the_same_bits(
    here: Path, prepared: tuple[Path, str], phase: str, signum: int, nproc: int, step: int | None
) -> None:
    shutil.copytree(prepared[0], here / "data")
    code, said = stopped_in(phase, signum, nproc=nproc)
    assert code == EXIT_STOPPED and "everything is saved; to resume:\n  drumline train --run_dir run" in said, said
    assert RunFolder(here / "run").read_status()["state"] == "stopped"
    saved = saved_step()
    assert saved == step or (step is None and 3 <= saved < STEPS)
    assert finish() == prepared[1]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_every_process_at_once_as_slurm_sends_it_saves_all_the_same(
    here: Path, prepared: tuple[Path, str], signum: int
) -> None:
    shutil.copytree(prepared[0], here / "data")
    code, said = stopped_in("first step", signum, nproc=2, all_at_once=True)
    assert code == EXIT_STOPPED and "everything is saved" in said, said
    assert 1 <= saved_step() <= 2 and finish() == prepared[1]


@pytest.mark.parametrize(("signum", "nproc"), [(signal.SIGTERM, 0), (signal.SIGUSR1, 2)])
def test_after_the_last_step_what_is_shown_at_the_end_is_cut_short(
    here: Path, prepared: tuple[Path, str], signum: int, nproc: int
) -> None:
    shutil.copytree(prepared[0], here / "data")
    code, said = stopped_in("exiting", signum, nproc=nproc)
    assert code == EXIT_STOPPED and "stopped after the last step, everything is saved" in said, said
    assert saved_step() == STEPS and not (here / "run" / "report.html").exists()
    assert finish() == prepared[1]
    assert (here / "run" / "report.html").exists()


@pytest.mark.needs("compiler")
@pytest.mark.parametrize(("signum", "nproc"), [(signal.SIGTERM, 0), (signal.SIGINT, 2)])
def test_while_compiling_too(here: Path, prepared: tuple[Path, str], signum: int, nproc: int) -> None:
    shutil.copytree(prepared[0], here / "data")
    code, said = stopped_in("compiling", signum, "--compile", nproc=nproc)
    assert code == EXIT_STOPPED and "everything is saved; to resume" in said, said
    assert saved_step() == 2  # the step that was being compiled for, and the one that the ranks agreed with
