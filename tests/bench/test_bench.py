"""`drumline bench`: figures that hang together, batch sizes that fit, mistakes in two lines. No timing is judged."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers.launchers import wait_until_gone
from helpers.ranks import run_ranks
from helpers.warm import Warm
from matplotlib import image

from drumline.bench import bench, ceilings, workload
from drumline.bench import memory as bench_memory
from drumline.bench.config import BenchConfig
from drumline.bench.memory import find_batch_size, peak_memory, search_batch_size, try_out
from drumline.bench.plots import plot_bench
from drumline.bench.workload import PARTS
from drumline.cli.app import run_command
from drumline.config import ModelSettings, RunConfig, TrainConfig
from drumline.data.batches import BatchPlan
from drumline.errors import EXIT_INTERRUPTED, ConfigError
from drumline.model.gpt import GPT
from drumline.parallel.world import Place, World

GUIDE = Path(__file__).parents[2] / "docs" / "benchmarking.md"
ALONE = World(Place(), torch.device("cpu"))
TIMEOUT_S = 120


def small(**changed: str) -> list[str]:
    """Flags of a benchmark that takes no time, some of them changed; an empty one is left out."""
    flags = {"device": "cpu", "context": "8", "batch_size": "2", "steps": "2", "table_presets": "none", **changed}
    return [word for name, value in flags.items() if value for word in (f"--{name}", value)]


def start(*flags: str) -> subprocess.Popen[str]:
    """`drumline bench` as a process of its own."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    return Warm(
        [sys.executable, "-m", "drumline", "bench", *flags],
        env={**clean, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module", autouse=True)
def little_to_measure() -> Iterator[None]:
    """Figures are to hang together here, not to be exact: little is multiplied, copied and repeated for them."""
    with pytest.MonkeyPatch.context() as patch:
        _measure_little(patch)
        yield


def _measure_little(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(ceilings._PRODUCT_SIZES, "cpu", (32, 64))
    patch.setitem(ceilings._COPY_BYTES, "cpu", 1 << 20)
    patch.setattr(ceilings, "_TURN_S", 0.001)
    patch.setattr(bench, "_ROW_BUDGET_S", 0.1)


def _bench_as_a_rank(argv: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        _measure_little(patch)
        return run_command(argv)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with bench.json and bench.png of a small model on this process."""
    where = tmp_path_factory.mktemp("bench")
    files = {"json": str(where / "bench.json"), "plot": str(where / "bench.png")}
    assert run_command(["bench", *small(table_presets="tiny,modern-tiny", table_batch_sizes="1,2", **files)]) == 0
    return where


@pytest.fixture(scope="module")
def report(measured: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((measured / "bench.json").read_text())
    return content


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What --nproc 2 measured, and said."""
    path = tmp_path_factory.mktemp("ranks") / "bench.json"
    with start(*small(preset="tiny", nproc="2", json=str(path))) as process:
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    return json.loads(path.read_text()), out


def test_the_parts_of_a_step_add_up_to_it(report: dict[str, Any]) -> None:
    assert list(report["parts_s"]) == list(PARTS)
    assert sum(report["parts_s"].values()) == pytest.approx(report["step_s"])
    assert min(report["parts_s"].values()) >= 0 and report["parts_s"]["gradient_wait"] == 0  # nobody to wait for
    assert report["parts_s"]["forward"] > 0 and report["ranks"] == 1


def test_parts_are_never_negative_however_noisy_the_clock() -> None:
    parts_s = workload._differences({"data": 0.2, "forward": 0.1, "backward": 0.9, "alone": 0.5, "step": 0.8})
    assert parts_s == pytest.approx(
        {"data": 0.2, "forward": 0.0, "backward": 0.6, "gradient_wait": 0.0, "optimizer": 0.0}
    )


def test_speeds_follow_from_the_time_of_a_step(report: dict[str, Any]) -> None:
    assert report["tokens_per_step"] == report["global_batch_size"] * report["context"] == 2 * 8
    assert report["tokens_per_s"] == pytest.approx(report["steps_per_s"] * 16) == pytest.approx(16 / report["step_s"])
    assert report["flops_per_s"] == pytest.approx(report["tokens_per_s"] * report["flops_per_token"])
    assert report["mfu"] == pytest.approx(report["flops_per_s"] / report["ceilings"]["matmul_flops_per_s"])
    assert report["mfu_of"] == "measured matrix product"  # no data sheet for a CPU


def test_the_json_has_every_figure_and_the_guide_explains_each(report: dict[str, Any]) -> None:
    assert list(report) == [field.name for field in fields(bench.Report)]
    for name, value in report.items():
        assert value is not None or name == "search", name
        assert f"`{name}`" in GUIDE.read_text(encoding="utf-8"), name
    assert report["peak_memory_bytes"] > 1e6 and report["ceilings"]["copy_bytes_per_s"] > 0


def test_the_table_has_every_preset_with_every_batch_size(report: dict[str, Any]) -> None:
    rows = [(row["preset"], row["batch_size"]) for row in report["table"]]
    assert rows == [("tiny", 1), ("tiny", 2), ("modern-tiny", 1), ("modern-tiny", 2)]
    assert all(row["fits"] and row["tokens_per_s"] > 0 and row["peak_memory_bytes"] > 0 for row in report["table"])


@pytest.mark.parametrize(("sizes", "rows"), [("", 1), ("1,2", 4)])
def test_a_table_that_takes_too_long_is_cut_short_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sizes: str, rows: int
) -> None:
    monkeypatch.setattr(bench, "_TABLE_S", 0.0)
    assert run_command(["bench", *small(preset="tiny", table_presets="", table_batch_sizes=sizes)]) == 0
    shown = capsys.readouterr().out
    assert shown.count(" with batch_size ") == rows and ("--table_presets tiny,modern-tiny" in shown) == (rows == 1)


def test_what_does_not_fit_has_its_row_in_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = bench.try_out
    monkeypatch.setattr(bench, "try_out", lambda c, plan, w: tried(c, plan, w) if plan.micro_batch_size < 3 else None)
    assert run_command(["bench", *small(table_presets="tiny", table_batch_sizes="2,3")]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"tiny +2 +[\d.]+ ", shown) and re.search(r"tiny +3 +- +- +- +does not fit", shown)


def test_what_is_shown_fits_80_columns_and_says_what_goes_on(two_ranks: tuple[dict[str, Any], str]) -> None:
    lines = two_ranks[1].splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in two_ranks[1]
    assert lines[0].startswith("measuring ") and lines[1].startswith("timing steps of tiny: batch_size 2 x 2 ranks")
    rows = [line.rsplit(maxsplit=2) for line in lines if line.endswith("%")]
    assert [words[0].replace(" ", "_") for words in rows] == [*PARTS, "together"]
    *parts, whole = (float(words[1]) for words in rows)
    assert sum(parts) == pytest.approx(whole, abs=0.03)  # each is shown to a hundredth


def test_two_ranks_report_how_fast_they_add_up_by_size(two_ranks: tuple[dict[str, Any], str]) -> None:
    report, out = two_ranks
    assert report["ranks"] == 2 and report["global_batch_size"] == 4
    sizes = [each["bytes"] for each in report["all_reduce"]]
    assert len(sizes) >= 3 and sizes == sorted(sizes)
    for each in report["all_reduce"]:
        assert each["bytes_per_s"] == pytest.approx(each["bytes"] / each["seconds"])  # 2 (n - 1) / n is 1
    assert "all-reduce of" in out and "gradient wait" in out


def test_ranks_of_torchrun_measure_together_and_only_the_first_speaks(tmp_path: Path) -> None:
    flags = [*small(preset="tiny", batch_size="", global_batch_size="6"), "--find_batch_size"]
    argvs = [["bench", *flags, "--json", str(tmp_path / f"{rank}.json")] for rank in range(2)]
    outcomes = run_ranks(_bench_as_a_rank, [(argv,) for argv in argvs])
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].err
    assert "tokens/s" in outcomes[0].out and outcomes[1].out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]
    report = json.loads((tmp_path / "0.json").read_text())
    assert report["batch_size"] == 3 and report["micro_batches"] == 2  # 6 sequences would leave a rank with nothing


@pytest.mark.parametrize("which", ["one", "two"])
def test_the_plot_is_a_picture_of_something(
    measured: Path, report: dict[str, Any], two_ranks: tuple[dict[str, Any], str], tmp_path: Path, which: str
) -> None:
    path = measured / "bench.png"
    if which == "two":
        path = tmp_path / "two.png"
        plot_bench(two_ranks[0], path)
        assert [each.name for each in tmp_path.iterdir()] == ["two.png"]
    assert path.read_bytes().startswith(b"\x89PNG")
    pixels = image.imread(path)
    assert pixels.shape[0] > 300 and pixels.shape[1] > 900  # two panels
    assert 0.005 < (pixels[..., :3].min(axis=2) < 0.9).mean() < 0.5


@pytest.mark.parametrize(("limit", "largest"), [(1000, 90), (110, 1), (1_000_000, 480), (99, None)])
@pytest.mark.parametrize("foreseeing", [False, True])
def test_the_largest_batch_size_under_a_memory_limit_is_found(
    limit: int, largest: int | None, foreseeing: bool
) -> None:
    sizes = [size for size in range(1, 481) if 1440 % size == 0]

    def measure(size: int) -> int | None:
        taken = 100 + 10 * size
        assert not foreseeing or taken <= 2 * limit, "tried what was bound to fail"
        return None if taken > limit else taken

    trials = find_batch_size(
        sizes, measure, limit_bytes=limit, foresee=(lambda size: 80 + 9 * size) if foreseeing else None
    )
    assert max((trial.batch_size for trial in trials if trial.fits), default=None) == largest
    assert len(trials) <= 14


def test_find_batch_size_measures_with_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_memory, "limit_bytes", lambda world: 2**40)
    monkeypatch.setattr(bench_memory, "measure_peak", lambda config, world, sequences, batch_size: batch_size * 2**37)
    flags = small(batch_size="", global_batch_size="24", json=str(tmp_path / "bench.json"))
    assert run_command(["bench", *flags, "--find_batch_size"]) == 0
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["batch_size"] == report["search"]["batch_size"] == 8 and report["micro_batches"] == 3
    assert "drumline train --preset modern-tiny --batch_size 8 --global_batch_size 24" in capsys.readouterr().out


def test_what_an_estimate_forbids_is_tried_once_smaller_batches_prove_it_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    config, tried = BenchConfig(preset="tiny").as_training("tiny"), []

    def measure(config: Any, world: World, sequences: int, batch_size: int) -> int:
        tried.append(batch_size)
        return 100 + 10 * batch_size

    monkeypatch.setattr(bench_memory, "measure_peak", measure)
    monkeypatch.setattr(bench_memory, "estimated_bytes", lambda config, world, batch_size: 100 + 20 * batch_size)
    answers = []
    for limit in (2000, 1000, 700, 150):
        tried.clear()
        fits = bench_memory.may_be_tried(config, BatchPlan(64, 1), ALONE, limit_bytes=limit)
        answers.append((fits, list(tried)))
    assert answers == [(True, []), (True, [4, 8, 64]), (False, [4, 8]), (False, [])]


def test_a_real_step_is_measured_and_a_larger_batch_takes_more_memory() -> None:
    config = BenchConfig(preset="tiny").as_training("tiny")
    peaks = [bench_memory.measure_peak(config, ALONE, size, size) for size in (1, 32)]
    assert peaks[0] is not None and peaks[1] is not None and peaks[1] - peaks[0] > 50e6


def test_a_micro_batch_is_measured_with_the_gradient_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    monkeypatch.setattr(bench_memory, "try_out", lambda config, plan, world: plans.append(plan))
    config, two = BenchConfig(preset="tiny").as_training("tiny"), World(Place(size=2), torch.device("cpu"))
    for world, sequences in ((ALONE, 8), (ALONE, 16), (ALONE, 64), (two, 16), (two, 64)):
        assert bench_memory.measure_peak(config, world, sequences, 8) is None
    assert [plan.micro_batches for plan in plans] == [1, 2, 2, 2, 4]


def test_running_out_of_memory_is_an_answer_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    config = BenchConfig(preset="tiny").as_training("tiny")
    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("x: can't allocate memory: y")):
        monkeypatch.setattr(workload.Workload, "alone", _raiser(error))
        before = _models()
        assert try_out(config, BatchPlan(1, 1), ALONE) is None
        assert _models() == before  # nothing holds its memory any more
    monkeypatch.setattr(workload.Workload, "alone", _raiser(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        try_out(config, BatchPlan(1, 1), ALONE)


def _models() -> int:
    return sum(issubclass(type(each), GPT) for each in gc.get_objects())


def _raiser(error: Exception) -> Callable[[Any], None]:
    def work(self: Any) -> None:
        raise type(error)(*error.args)  # a new one: what is raised remembers where, and holds on to it

    return work


def test_the_peak_is_seen_although_the_memory_is_free_again() -> None:
    gc.collect()  # what other tests left must not go while this one looks
    before = psutil.Process().memory_info().rss
    with peak_memory(torch.device("cpu")) as peak_bytes:
        tensor = torch.ones(50_000_000)
        tensor.mul_(2).sum().item()
        del tensor
        assert peak_bytes() > before + 150e6


def test_a_container_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    own = psutil.Process().memory_info().rss
    monkeypatch.setattr(bench_memory, "room_in_container", lambda: 1000)
    assert bench_memory.limit_bytes(ALONE) < own + (64 << 20)


def test_compile_compiles_the_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    compiled: list[Any] = []

    def note(function: Any) -> Any:
        compiled.append(function)
        return function

    monkeypatch.setattr(torch, "compile", note)
    assert run_command(["bench", *small(dtype="float32"), "--compile"]) == 0
    assert compiled and "float32, compiled" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--preset", "modrn"], "did you mean --preset modern?"),
        (["--device", "cuda"], "there is no cuda device"),
        (["--preset", "gpt2-xl", "--batch_size", "100000"], "gpt2-xl does not fit with batch_size 100000"),
        (["--batch_size", "4", "--find_batch_size"], "drop --batch_size or --find_batch_size"),
        (["--batch_size", "3", "--global_batch_size", "8"], "not a whole number of micro-batches"),
        (["--table_presets", "tiny,huge"], "there is no preset 'huge'"),
        (["--table_batch_sizes", "4,x"], "--table_batch_sizes 8,16,32"),
        (["--steps", "0"], "give --steps a value of 1 or more"),
        (["--batch_size", "0"], "give --batch_size a value of 1 or more"),
        (["--json", "/nowhere/bench.json"], "mkdir -p /nowhere"),
        (["--plot", "/"], "is a folder"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and memory for more")
def test_mistakes_are_two_lines(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", *flags]) == (2 if "no preset" in said or "--preset modern?" in said else 1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("error: ") and lines[1].startswith("  fix: ")
    assert said in "\n".join(lines)


def test_a_mistake_under_several_ranks_is_told_once() -> None:
    argv = ["bench", *small(preset="tiny", batch_size="3", global_batch_size="8")]
    outcomes = run_ranks(run_command, [(argv,), (argv,)])
    assert [outcome.code for outcome in outcomes] == [1, 1]
    assert outcomes[0].err.count("error:") == 1 and outcomes[1].err == ""


def test_a_file_that_cannot_be_written_is_said_after_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("drumline.files.replace_text", full)
    assert run_command(["bench", *small(preset="tiny", json=str(tmp_path / "bench.json"))]) == 1
    shown = capsys.readouterr()
    assert "tokens/s" in shown.out and shown.err.startswith(f"error: cannot write {tmp_path}/bench.json: No space left")


@pytest.mark.parametrize("ranks", [[], ["--nproc", "2"]], ids=["alone", "two ranks"])
def test_ctrl_c_ends_all_of_it_at_once_and_in_order(ranks: list[str], tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    with start(*small(steps="100000", preset="tiny", json=str(path)), *ranks) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.startswith("timing steps"):
                break
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        err = process.stderr.read()
        process.wait(TIMEOUT_S)
    assert process.returncode == EXIT_INTERRUPTED
    assert err == "error: interrupted\n  fix: run the same command again\n"
    assert list(tmp_path.iterdir()) == []
    wait_until_gone(children)


@pytest.mark.parametrize(
    ("how", "end"),
    [
        ("none", "a shorter --context; `drumline train` needs less with --activation_checkpointing block"),
        ("block", "a shorter --context"),
    ],
)
def test_a_preset_of_which_no_sequence_fits_is_refused_with_the_flags_that_are_left(
    monkeypatch: pytest.MonkeyPatch, how: Any, end: str
) -> None:
    monkeypatch.setattr(bench_memory, "find_batch_size", lambda *sizes, **more: [])
    config = TrainConfig(model=ModelSettings(preset="tiny"), run=RunConfig(activation_checkpointing=how))
    with pytest.raises(ConfigError, match="tiny does not fit with a single sequence") as raised:
        search_batch_size(config, World(Place(), torch.device("cpu")), global_batch_size=4, say=print)
    assert raised.value.fix.endswith(end), raised.value.fix
