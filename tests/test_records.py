"""Records: the same one everywhere, and a tracker that fails never stops a run."""

import json
import math
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.errors import MissingExtraError
from drumline.plots import plot_loss
from drumline.records import JsonlSink, Record, Records, duration, forget_after, format_record, read_metrics
from drumline.trackers import TensorBoardSink, WandbSink, wandb_mode

Train = Callable[..., int]


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
    forget_after(file, 2)
    assert read_metrics(file) == [{"step": 1}, {"step": 2}]


def test_a_sink_that_fails_is_dropped_with_a_warning_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def write(self, record: Record) -> None:
            raise ConnectionError("tracker is down")

        def close(self) -> None:
            raise ConnectionError("still down")

    records = Records([Broken(), JsonlSink(tmp_path / "metrics.jsonl")], log=tmp_path / "train.log")
    records.start_progress(2)
    records.write({"step": 1, "loss": 2.0})
    records.write({"step": 2, "loss": 1.0})
    records.close()
    said = capsys.readouterr().out
    assert said.count("warning: Broken failed and gets no more records (ConnectionError: tracker is down)") == 1
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
    plot_loss(metrics, tmp_path / "loss.png", title="a run")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    plot_loss(tmp_path / "none.jsonl", tmp_path / "empty.png", title="no records")
    assert (tmp_path / "empty.png").exists()


def test_a_terminal_shows_a_progress_bar_and_a_pipe_plain_lines(tmp_path: Path) -> None:
    code = (
        "from drumline.records import Records\n"
        "records = Records([], log=None)\n"
        "records.start_progress(3)\n"
        "records.write({'step': 2, 'loss': 1.5})\n"
        "records.stop_progress()\n"
    )
    line = "step  2/3 | loss 1.5000"
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert piped.stdout == line + "\n"
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    ) as process:
        os.close(theirs)
        shown = b""
        while chunk := _read(ours):
            shown += chunk
    os.close(ours)
    assert process.returncode == 0
    assert line in shown.decode() and "training" in shown.decode() and "2/3" in shown.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the other side is closed
        return b""
