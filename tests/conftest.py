"""One thread per process: the machine's cores are shared by test workers and the processes they start."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "true"
os.environ.pop("WANDB_API_KEY", None)

import pytest

from drumline.cli.app import run_command

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell lets what it starts in the background ignore Ctrl-C, and so would all that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SMALL = (
    "--n_layers 1 --n_heads 2 --d_model 16 --d_ff 32 --context 16 --batch_size 4 --vocab_size 300 --total_steps 6 "
    "--log_every 1 --eval_windows 4 --device cpu"
).split()


def small(*flags: str) -> list[str]:
    """Flags of a model so small that a step takes no time, and more flags, which come before those."""
    given = {*flags, *(["--total_steps"] if "--epochs" in flags else [])}
    pairs = zip(_SMALL[::2], _SMALL[1::2], strict=True)
    return [word for name, value in pairs if name not in given for word in (name, value)] + list(flags)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A small folder of text with enough documents to hold some out."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"Document {number}. " + "All work and no play. " * 12)
    return folder


@pytest.fixture
def here(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder is one of the test's own, with the folder of text in it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def train(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`drumline train` with `small` flags on that text."""
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> int:
        source = [] if "--train_data_path" in flags else ["--train_data_path", str(text)]
        return run_command(["train", *small(*flags, *source)])

    return run
