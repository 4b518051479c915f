"""One thread per process: the machine's cores are shared by test workers and the processes they start."""

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "true"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # or Triton warns that its default will change
os.environ.pop("WANDB_API_KEY", None)
if shutil.which("drumline") is None:  # as in a .venv that is activated, so that printed commands are the usual ones
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])

if "PYTEST_DEBUG_TEMPROOT" not in os.environ:
    # What killed processes leave in the folder for temporary files goes with that folder; pytest's own stays.
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.gettempdir()
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="drumline-tests-")
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)

os.environ["XDG_STATE_HOME"] = os.path.join(tempfile.gettempdir(), "state")  # tests are not what the user has used

import helpers.idle  # noqa: F401
import pytest
from helpers.needs import missing
from helpers.small import small

from drumline.cli.app import run_command
from drumline.signals import STOP_SIGNALS

for _signum, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    # A shell lets what it starts in the background ignore Ctrl-C, and nohup a closed terminal; so would all that a test
    # starts and interrupts.
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, _usual)


with contextlib.suppress(ImportError):  # on a machine that only runs the kernels' tests
    from hypothesis import settings

    # A machine that has other work to do is slow at times, and that is no fault of what is tested. With the same
    # examples each time, a change is not refused for what it has not touched; `search` looks for others.
    settings.register_profile("search", deadline=None)
    settings.register_profile("same examples", deadline=None, derandomize=True)
    settings.load_profile("same examples")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests do little but wait for the processes that they have started."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs something that this machine has not, and begin with what takes long."""
    items[:] = long_first(items, workers=int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    for item in items:
        wanted = dict.fromkeys(need for mark in item.iter_markers("needs") for need in mark.args)
        if item.get_closest_marker("needs_shm"):
            wanted["shm"] = None
        if wanted and (reason := missing(*wanted)):
            item.add_marker(pytest.mark.skip(reason=reason))


def long_first(items: list[pytest.Item], *, workers: int) -> list[pytest.Item]:
    """Tests marked as long at the beginning of each worker's share, or the last of them would keep one alone busy."""
    long = [item for item in items if item.get_closest_marker("long")]
    others = iter([item for item in items if not item.get_closest_marker("long")])
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        share = (len(items) - len(ordered)) // (workers - worker)  # as xdist deals them out
        first = long[worker::workers]
        ordered += [*first, *(item for _, item in zip(range(share - len(first)), others, strict=False))]
    return [*ordered, *others]


@pytest.fixture(scope="session", autouse=True)
def nothing_left_in_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Snapshots outlive a run that is killed; those of runs that tests have killed are removed at the end."""
    yield
    from drumline.checkpoint import resuming
    from drumline.snapshots import folder

    of_user = resuming.snapshot_folder("any").parent
    for owner in of_user.glob(f"*/{folder._OWNER}"):
        with contextlib.suppress(OSError):  # another process may be done with it just now
            if Path(owner.read_text()).is_relative_to(tmp_path_factory.getbasetemp()):
                shutil.rmtree(owner.parent)
    with contextlib.suppress(OSError):
        of_user.rmdir()


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """As they were: the command that a test calls leaves its own behind, as a process of its own may."""
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 kB that a test can fill."""
    where = tmp_path / "disk"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(where)], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


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
