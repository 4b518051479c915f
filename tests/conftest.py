"""One thread per process: the machine's cores are shared by test workers and the processes they start."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "true"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # or Triton warns that its default will change
os.environ.pop("WANDB_API_KEY", None)

import pytest
from helpers.needs import missing
from helpers.small import small

from drumline.cli.app import run_command

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell lets what it starts in the background ignore Ctrl-C, and so would all that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs something that this machine has not."""
    for item in items:
        wanted = dict.fromkeys(need for mark in item.iter_markers("needs") for need in mark.args)
        if wanted and (reason := missing(*wanted)):
            item.add_marker(pytest.mark.skip(reason=reason))


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
