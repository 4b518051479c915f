"""How a run stands, on a terminal: the loss as a curve, speed, memory, ranks, and the last checkpoint."""

import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from drumline.report.bars import TrainingBar, sparkline


@pytest.fixture
def bar(monkeypatch: pytest.MonkeyPatch) -> TrainingBar:
    monkeypatch.setattr("rich._console", None)  # rich's own is made once, and keeps what it was made for
    monkeypatch.setenv("COLUMNS", "140")
    return TrainingBar(100)


def shown(bar: TrainingBar) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(bar._bar.get_renderable())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    bar.stop()
    return str(text)


def test_the_line_below_the_bar_says_how_the_run_stands(bar: TrainingBar) -> None:
    bar.show({"event": "started", "step": 0, "world_size": 4, "hosts": ["a", "a", "b", "b"]})
    bar.show({"step": 10, "loss": 4.0, "tokens_per_s": 12_500.0, "mfu": 0.412, "peak_memory_bytes": 3 << 30})
    bar.show({"step": 20, "loss": 2.0, "tokens_per_s": 13_000.0, "mfu": 0.412, "peak_memory_bytes": 3 << 30})
    bar.show({"step": 20, "valid_loss": 2.5})
    bar.show({"event": "saved", "step": 20, "bytes": 1})
    bar.show({"event": "snapshot", "step": 30, "bytes": 1})
    bar.at(30)
    text = shown(bar)
    for part in ("30/100", "loss 2.0000 █▁", "validation 2.5000", "13.0k tok/s", "mfu 41.2%", "3.0 GiB", "saved at 20"):
        assert part in text, text
    assert "4 ranks on 2 hosts" in text and text.count("loss") == 1


def test_a_loss_that_is_none_leaves_the_curve_as_it_is(bar: TrainingBar) -> None:
    bar.show({"step": 1, "loss": 3.0})
    bar.show({"step": 2, "loss": float("nan")})
    bar.show({"event": "computed again", "step": 3, "loss": 9.0})
    assert "loss 3.0000 ▁" in shown(bar)


@example([0.0, 5e-324], 2)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=100), st.integers(1, 30))
def test_a_sparkline_is_no_wider_than_asked_for_and_has_its_extremes(values: list[float], width: int) -> None:
    line = sparkline(values, width=width)
    assert 1 <= len(line) <= width and set(line) <= set("▁▂▃▄▅▆▇█") and "▁" in line
