"""Records: the same one everywhere, and a tracker that fails never stops a run."""

import json
import math
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.small import small
from helpers.terminal import on_terminal
from helpers.warm import Warm

from drumline.errors import MissingExtraError
from drumline.files.run_folder import RunFolder
from drumline.report.plots import plot_curves
from drumline.report.records import JsonlSink, Record, Records, format_record, read_metrics
from drumline.report.rewinding import forget_after
from drumline.report.trackers import TensorBoardSink, WandbSink, wandb_mode
from drumline.units import counted, duration

Train = Callable[..., int]


def fill(disk: Path) -> Path:
    """Take all the room there is; removing the file that is returned gives it back."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            return filler
    raise AssertionError("a disk without end")


def test_a_record_reads_as_one_line() -> None:
    record = {
        "step": 1200,
        "loss": 3.28141,
        "lr": 5.99e-4,
        "grad_norm": 0.412,
        "tokens_per_s": 182_400,
        "mfu": 0.412,
        "eta_s": 4321,
        "unknown": 1,
    }
    line = "step   1,200/10,000 | loss 3.2814 | lr 5.99e-04 | grad 0.41 | 182.4k tok/s | mfu 41.2% | eta 1h12m"
    assert format_record(record, total_steps=10_000) == line
    assert [duration(seconds) for seconds in (0.4, 59.6, 185, 7260)] == ["0s", "1m00s", "3m05s", "2h01m"]


def test_every_line_of_metrics_is_strict_json_even_for_nan(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write({"step": 1, "loss": math.nan})
    sink.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": null}\n'


def test_records_past_the_resumed_step_and_half_lines_are_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    forget_after(file, 2, warn=print)
    assert read_metrics(file) == [{"step": 1}, {"step": 2}]


@pytest.mark.needs("disks")
def test_forgetting_keeps_the_file_whole_at_every_moment_and_needs_no_room(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = small_disk / "metrics.jsonl"
    file.write_text(
        "".join(json.dumps({"step": step}) + "\n" for step in range(100)) + "not JSON\n" + '{"step": 100}\n'
    )
    inode = file.stat().st_ino
    fill(small_disk)
    forget_after(file, 100, warn=print)
    assert [record["step"] for record in read_metrics(file)] == [*range(101)]
    assert capsys.readouterr().out == f"warning: line 101 of {file} is damaged and was ignored\n"
    forget_after(file, 41, warn=print)
    assert [record["step"] for record in read_metrics(file)] == [*range(42)]
    assert file.stat().st_ino == inode  # cut off, which a kill cannot find half done
    forget_after(small_disk / "none.jsonl", 3, warn=print)
    assert not (small_disk / "none.jsonl").exists()


@pytest.mark.needs("disks")
def test_a_full_disk_ends_no_run_and_once_it_has_room_every_record_is_there_once_and_in_order(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(small_disk)
    records = Records([JsonlSink(folder.metrics)], log=folder.log)
    for round_start in (1, 61):  # it happens twice, and the second is told as the first
        for step in range(round_start, round_start + 60):
            if step == round_start + 10:
                filler = fill(small_disk)
            if step == round_start + 50:
                filler.unlink()
            records.write({"step": step, "loss": 1.0, "text": "x" * 200})
            records.say("a longer line " * 20)
            records.later("status.json", partial(folder.write_status, "running", step=step, total_steps=120))
            records.flush()
            for line in folder.metrics.read_text().splitlines():
                assert json.loads(line)["text"] == "x" * 200  # no half line, however full the disk
    records.close()
    said = capsys.readouterr().out
    assert [record["step"] for record in read_metrics(folder.metrics)] == [*range(1, 121)]
    assert folder.log.read_text() == said
    for name in (str(folder.metrics), str(folder.log), "status.json"):
        assert said.count(f"warning: cannot write to {name} (No space left on device)") == 2, said
        assert said.count(f"{name} is writable again") == 2, said
    assert {path.name for path in small_disk.iterdir()} == {"metrics.jsonl", "train.log", "status.json"}
    assert folder.read_status()["step"] == 120


@pytest.mark.needs("disks")
def test_records_a_full_disk_never_took_are_counted_at_the_end(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(small_disk)
    fill(small_disk)
    records = Records([JsonlSink(folder.metrics)], log=folder.log)
    for step in range(1, 4):
        records.write({"step": step, "loss": 1.0})
    records.close()
    said = capsys.readouterr().out
    assert f"warning: {folder.metrics} lacks 3 lines that could not be written" in said
    assert f"warning: {folder.log} lacks" in said


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # its threads die of it
@pytest.mark.needs("disks")
def test_tensorboard_on_a_full_disk_ends_no_run(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    fill(small_disk)
    before = threading.enumerate()
    records = Records([TensorBoardSink(small_disk / "tensorboard")], log=None)
    for step in range(1, 20):
        records.write({"step": step, "loss": 1.0})
    records.close()
    for thread in set(threading.enumerate()) - set(before):
        thread.join(10)  # or it may die while another test runs
    assert capsys.readouterr().out.count("warning: TensorBoardSink failed and is disabled") == 1


def test_a_line_cut_in_half_by_a_limit_on_file_size_is_taken_back(tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from drumline.report.records import JsonlSink, Records
records = Records([JsonlSink(Path("metrics.jsonl"))], log=Path("train.log"))
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
for step in range(1, 41):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if step < 40 else soft, hard))
    records.write({"step": step, "loss": 1.0, "lr": 1e-3, "grad_norm": 1.0})
    records.flush()
    text = Path("metrics.jsonl").read_text()
    assert text.endswith("}\\n") and len(text) <= 1000 or step == 40, text[-80:]
records.close()
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [*range(1, 41)]
    assert done.stdout.count("warning: cannot write to metrics.jsonl (File too large)") == 1
    log = (tmp_path / "train.log").read_text()
    assert [step for step in range(1, 41) if f"step {step:>2}/0 |" not in log] == []
    assert "train.log is writable again" in log


@pytest.mark.parametrize("console", ["a reader that has gone", "a full device", "a closed stdout"])
def test_a_console_that_takes_no_more_ends_no_run_and_is_told_elsewhere(tmp_path: Path, console: str) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from drumline.report.records import JsonlSink, Records\n"
        "if 'closed' in sys.argv[1]: sys.stdout.close()\n"
        "records = Records([JsonlSink(Path('metrics.jsonl'))], log=Path('train.log'))\n"
        "for step in range(1, 2001): records.write({'step': step, 'loss': 1.0})\n"
        "records.close()\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, console],
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # or Python would have nothing left to write at its end
            stdout=writer if "reader" in console else full,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(writer)
        os.close(full)
    warning = "warning: cannot write to the console"
    assert done.returncode == 0 and done.stderr.count("\n") == 1 and done.stderr.startswith(warning), done.stderr
    assert (tmp_path / "train.log").read_text().count(warning) == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2000


def test_a_terminal_that_closes_ends_no_run(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from drumline.report.records import JsonlSink, Records\n"
        "records = Records([JsonlSink(Path('metrics.jsonl'))], log=Path('train.log'))\n"
        "with records.showing_progress(9):\n"
        "    records.write({'step': 1, 'loss': 1.5})\n"
        "    sys.stdin.read()\n"
        "    for step in range(2, 10): records.write({'step': step, 'loss': 1.5})\n"
        "records.close()\n"
    )
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdin=subprocess.PIPE, stdout=theirs) as process:
        os.close(theirs)
        while b"loss 1.5" not in os.read(ours, 1 << 16):
            pass
        os.close(ours)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0
    assert "warning: cannot write to the console" in (tmp_path / "train.log").read_text()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 9


def test_a_sink_that_fails_is_dropped_with_a_warning_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def write(self, record: Record) -> None:
            raise ConnectionError("tracker is down")

        def close(self) -> None:
            raise ConnectionError("still down")

    records = Records([Broken(), JsonlSink(tmp_path / "metrics.jsonl")], log=tmp_path / "train.log")
    with records.showing_progress(2):
        records.write({"step": 1, "loss": 2.0})
        records.write({"step": 2, "loss": 1.0})
    records.close()
    said = capsys.readouterr().out
    assert said.count("warning: Broken failed and is disabled (ConnectionError: tracker is down)") == 1
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert (tmp_path / "train.log").read_text() == said


def test_tensorboard_and_wandb_get_every_number(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    flags = ["--tensorboard", "--use_wandb", "--wandb_project", "p", "--wandb_run_name", "n", "--run_dir", "run"]
    assert train(*flags) == 0
    events = loading.EventAccumulator("run/tensorboard")
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert {"valid_loss", "bits_per_byte", "lr", "grad_norm"} <= set(events.Tags()["scalars"])
    (offline,) = Path("run/wandb").glob("offline-run-*")
    assert any(file.suffix == ".wandb" and file.stat().st_size > 0 for file in offline.iterdir())


@pytest.mark.parametrize(
    ("key", "mode", "said"),
    [
        (None, "offline", "offline: not logged in (to do that: wandb login); to upload the run later:"),
        ("secret", "offline", "offline: https://tracker cannot be reached; to upload the run later:"),
        ("secret", "online", "https://tracker/me/drumline/runs/1"),
    ],
)
def test_wandb_says_where_it_logs_and_how_to_upload_later(
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    key: str | None,
    mode: str,
    said: str,
) -> None:
    logged: list[Any] = []

    def init(**given: Any) -> Any:
        assert given["mode"] == mode
        url = "https://tracker/me/drumline/runs/1" if mode == "online" else None
        files = f"{given['dir']}/wandb/{mode}-run-1/files"
        return SimpleNamespace(url=url, dir=files, log=lambda *_, **__: logged.append(1), finish=lambda: None)

    def settings(**given: Any) -> Any:
        return SimpleNamespace(base_url="https://tracker")

    fake = SimpleNamespace(init=init, Settings=settings, api=SimpleNamespace(api_key=key))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("drumline.report.trackers.wandb_mode", lambda url, has_key: mode if has_key else "offline")
    assert train("--use_wandb", "--run_dir", "my run") == 0
    shown = capsys.readouterr().out
    assert f"wandb  {said}\n" in shown and logged
    assert ("  wandb sync 'my run/wandb/offline-run-1'\n" in shown) is (mode == "offline")
    assert said in Path("my run/train.log").read_text()


def test_wandb_goes_offline_when_it_cannot_be_reached() -> None:
    assert wandb_mode("http://127.0.0.1:9", has_key=True) == "offline"
    assert wandb_mode("http://127.0.0.1:9", has_key=False) == "offline"


def test_a_missing_tracker_package_is_answered_with_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'drumline\[wandb\]'"):
        WandbSink(tmp_path, project="p", name="n", settings={})
    with pytest.raises(MissingExtraError, match=r"pip install 'drumline\[tensorboard\]'"):
        TensorBoardSink(tmp_path)


def test_loss_png_is_drawn_from_metrics(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"step": n, "loss": 3 / n, "valid_loss": 4 / n}) + "\n" for n in range(1, 5)))
    plot_curves(metrics, tmp_path / "loss.png", title="a run")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    plot_curves(tmp_path / "none.jsonl", tmp_path / "empty.png", title="no records")
    assert (tmp_path / "empty.png").exists()


def test_a_terminal_shows_a_progress_bar_and_a_pipe_plain_lines(tmp_path: Path) -> None:
    code = (
        "from drumline.report.records import Records\n"
        "records = Records([], log=None)\n"
        "with records.showing_progress(3):\n"
        "    records.write({'step': 2, 'loss': 1.5})\n"
        "records.close()\n"
    )
    line = "step  2/3 | loss 1.5000"
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert piped.stdout == line + "\n"
    shown, _ = on_terminal([sys.executable, "-c", code])
    assert line in shown and "training" in shown and "2/3" in shown


def test_the_bar_moves_with_every_step_and_those_of_preparing_are_gone_before(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("All work and no play makes Jack a dull boy. " * 400)
    words = small("--train_data_path", str(text), "--total_steps", "9", "--log_every", "9", "--eval_every", "9")
    code = (
        "import rich.progress, sys\n"
        "update = rich.progress.Progress.update\n"
        "def always(self, *ids, **values):\n"
        "    update(self, *ids, **values, refresh=True)\n"
        "rich.progress.Progress.update = always\n"
        "import drumline.report.records\n"
        "drumline.report.records._SPARED_S = 0.0\n"  # text that is read in a moment has no bar
        "from drumline.cli.app import run_command\n"
        "sys.exit(run_command(sys.argv[1:]))\n"
    )
    shown, _ = on_terminal([sys.executable, "-c", code, "train", *words], start=Warm, cwd=tmp_path)
    before, after = re.sub(r"\x1b\[[0-9;?]*m", "", shown).split("run    runs/modern-tiny", 1)
    assert "reading text" in before and "encoding" in before and before.endswith("\x1b[2K")
    assert "reading text" not in after and "encoding" not in after
    assert all(f"{step}/9" in after for step in range(1, 10))


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "rank", "1 rank"),
        (1.0, "epoch", "1 epoch"),
        (0, "step", "0 steps"),
        (0.5, "minute", "0.5 minutes"),
        (1024, "micro-batch", "1,024 micro-batches"),
    ],
)
def test_one_of_something_is_not_called_several(number: float, noun: str, text: str) -> None:
    assert counted(number, noun) == text
