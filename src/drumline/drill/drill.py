"""The drill: train a small model, inject faults repeatedly, and prove that no work was lost.

A seeded schedule of faults hits a real run: real processes, signals, files. The proof is that the run ends with exactly
the same weights as a reference run without faults. Two launchers on this machine act as two hosts.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from drumline.config import GPTConfig
from drumline.drill.faults import FAULTS, Fault, Outcome, inject
from drumline.drill.run import DrilledRun
from drumline.errors import ConfigError, TrainingError
from drumline.files import RunFolder
from drumline.model import GPT
from drumline.units import counted

Shard = Literal["none", "full"]
_WEIGHTS: dict[Fault, int] = {"kill": 7, "crash": 3, "stop": 3, "term": 1, "disk": 4, "corrupt": 4, "nan": 6, "host": 1}
"""Relative frequency of each fault: processes die more often than hosts."""

STEP_S = 0.1
"""Minimum duration of a step, so that faults hit steps of a realistic length."""
MICRO_BATCHES = 4
_GAP_S = 18.0
_QUIET_S = 4.0
"""Seconds between two faults, before the first and after the last."""
_STEPS_PER_FAULT = 60
_ENVIRONMENT = "DRUMLINE_DRILL"
REPORT = "drill.json"


@dataclass(frozen=True, kw_only=True)
class DrillConfig:
    faults: tuple[Fault, ...] = FAULTS
    minutes: float = 2.0
    ranks: int = 2
    shard: Shard = "none"
    seed: int = 0
    folder: Path

    def __post_init__(self) -> None:
        if not self.faults or self.minutes <= 0 or not 2 <= self.ranks <= MICRO_BATCHES:
            raise ConfigError(
                f"cannot run a drill with {counted(len(self.faults), 'fault')}, "
                f"{counted(self.minutes, 'minute')} and {counted(self.ranks, 'rank')}",
                fix=f"give at least one fault, more than 0 minutes and 2 to {MICRO_BATCHES} ranks",
            )
        if self.shard != "none" and MICRO_BATCHES % self.ranks:  # one that is computed in vain may have the NaN
            raise ConfigError(
                f"a sharded drill cannot divide its {MICRO_BATCHES} micro-batches among {counted(self.ranks, 'rank')}",
                fix=f"use --ranks 2 or {MICRO_BATCHES}",
            )


@dataclass
class DrillReport:
    outcomes: list[Outcome] = field(default_factory=list)
    steps: int = 0
    wall_s: float = 0.0
    step_s: float = 0.0
    """Median duration of a step without faults."""
    weights_sha256: str = ""
    undisturbed_sha256: str = ""

    @property
    def equal(self) -> bool:
        return bool(self.weights_sha256) and self.weights_sha256 == self.undisturbed_sha256

    @property
    def goodput(self) -> float:
        """Useful steps as a fraction of those that the elapsed time would have allowed."""
        return self.steps * self.step_s / self.wall_s if self.wall_s else 0.0

    @property
    def passed(self) -> bool:
        return self.equal and all(outcome.passed for outcome in self.outcomes)


def parse_faults(words: str) -> tuple[Fault, ...]:
    """ "kill,nan" -> ("kill", "nan")"""
    chosen = tuple(fault for fault in FAULTS if fault in words.split(","))
    unknown = [word for word in words.split(",") if word not in FAULTS]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is not a fault", fix=f"choose from {','.join(FAULTS)}")
    return chosen


def schedule(config: DrillConfig) -> list[tuple[float, Fault]]:
    """(seconds after the start, fault): determined by the seed; every kind at least once if time allows."""
    draw = random.Random(config.seed)
    span_s = max(1.0, config.minutes * 60 - 2 * _QUIET_S)
    number = max(len(config.faults), round(span_s / _GAP_S))
    rest = draw.choices(config.faults, weights=[_WEIGHTS[fault] for fault in config.faults], k=number)
    kinds = [*config.faults, *rest][:number]
    draw.shuffle(kinds)
    return [(_QUIET_S + span_s * index / number, kind) for index, kind in enumerate(kinds)]


def paced_gpt(shape: GPTConfig) -> GPT:
    """The drill's model: a GPT with slowed-down steps, which produces NaN when the drill asks for it."""
    return _PacedGPT(shape)


class _PacedGPT(GPT):
    _due_s = 0.0

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, Tensor | None]:
        logits, loss = super().forward(*args, **kwargs)
        folder = os.environ.get(_ENVIRONMENT)
        if folder and self.training and loss is not None:
            time.sleep(max(0.0, self._due_s - time.monotonic()))
            self._due_s = time.monotonic() + STEP_S / MICRO_BATCHES * int(os.environ["WORLD_SIZE"])
            order = Path(folder) / f"nan-{os.environ['RANK']}"
            if order.exists():
                order.unlink()
                loss = loss * torch.nan
        return logits, loss


def run_drill(config: DrillConfig, *, say: Callable[[str], None]) -> DrillReport:
    """Train without faults, by one process, then with faults, and compare."""
    if config.folder.exists() and any(config.folder.iterdir()) and not (config.folder / REPORT).exists():
        raise ConfigError(f"{config.folder} exists and is not a drill folder", fix="choose another --folder")
    shutil.rmtree(config.folder, ignore_errors=True)
    try:
        config.folder.mkdir(parents=True)
        (config.folder / REPORT).write_text("{}\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{config.folder} cannot be made ({error.strerror})", fix="choose another --folder, where you may write"
        ) from None
    plan = schedule(config)
    report = DrillReport(steps=max(_STEPS_PER_FAULT * len(plan), round(config.minutes * 60 * 0.9 / STEP_S)))
    with drilled_run(config, steps=report.steps) as run:
        say(f"reference run: training {report.steps:,} steps without faults")
        report.undisturbed_sha256 = _undisturbed(config, report.steps)
        how_long = counted(config.minutes, "minute")
        say(f"training again with {counted(len(plan), 'fault')} on {config.ranks} ranks, {how_long}")
        run.start()
        if run.wait_for_steps(3) is None:
            raise TrainingError("the run to inject faults into does not start", fix=f"see {run.log}")
        began, draw = time.monotonic(), random.Random(config.seed + 1)
        for at_s, fault in plan:
            run.sleep(until=began + at_s)
            if run.wait_for_steps(1, ranks=config.ranks) is None:
                break  # it has ended, or does not recover, and then its exit code says so
            outcome = inject(fault, run, draw)
            report.outcomes.append(outcome)
            say(describe(outcome))
            run.sleep(until=time.monotonic() + 1.0)
        code = run.wait_for_the_end()
        report.wall_s = time.monotonic() - began
        report.step_s = statistics.median(run.step_times) if run.step_times else STEP_S
    status = RunFolder(config.folder / "disturbed").read_status()
    if code != 0:
        raise TrainingError(
            f"the faulty run exited with code {code} at step {status.get('step')}: {status.get('cause', 'no cause')}",
            fix=f"see {run.log}",
        )
    report.weights_sha256 = str(status.get("weights_sha256", ""))
    facts = {**asdict(report), "goodput": report.goodput, "held": report.passed, "seed": config.seed}
    (config.folder / REPORT).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return report


def drilled_run(config: DrillConfig, *, steps: int) -> DrilledRun:
    """The run to inject faults into, not started yet, in the drill's folder with its training text."""
    if not (config.folder / "text").exists():
        (config.folder / "text").mkdir(parents=True)
        _write_text(config.folder / "text")
    environ = {**os.environ, _ENVIRONMENT: str(config.folder)}
    hosts = 2 if "host" in config.faults else 1
    command = [*_command(config, "disturbed", steps), "--shard", config.shard]
    return DrilledRun(command, config.folder, environ, config.ranks, hosts)


def describe(outcome: Outcome) -> str:
    def seconds(value: float | None) -> str:
        return "never" if value is None else f"{value:.2f} s"

    return (
        f"{outcome.fault:<8} at step {outcome.at_step:>6,}: detected {seconds(outcome.noticed_s)}, training again "
        f"{seconds(outcome.again_s)}, steps lost {outcome.lost_steps}, cause {'correct' if outcome.named else 'WRONG'}"
        + (f" ({outcome.note})" if outcome.note else "")
    )


COLUMNS = ("fault", "times", "detected, s (worst)", "training again, s (worst)", "lost", "named")


def fault_rows(report: DrillReport) -> list[tuple[str, ...]]:
    """One row per kind of fault, for COLUMNS."""
    rows: list[tuple[str, ...]] = []
    for fault in dict.fromkeys(outcome.fault for outcome in report.outcomes):
        of_kind = [outcome for outcome in report.outcomes if outcome.fault == fault]
        rows.append(
            (
                fault,
                str(len(of_kind)),
                _spread([outcome.noticed_s for outcome in of_kind]),
                _spread([outcome.again_s for outcome in of_kind]),
                f"{max((outcome.lost_steps or 0) for outcome in of_kind)}",
                f"{sum(outcome.named for outcome in of_kind)}/{len(of_kind)}",
            )
        )
    return rows


def conclusion(report: DrillReport) -> list[str]:
    """The verdict of the drill."""
    equal = "equal to" if report.equal else "DIFFERENT from"
    return [
        f"final weights {equal} the reference run's: {report.weights_sha256[:16]}, {report.undisturbed_sha256[:16]}",
        f"goodput {report.goodput:.1%}: {report.steps:,} useful steps of {report.step_s * 1e3:.0f} ms in "
        f"{report.wall_s:.0f} s with {len(report.outcomes)} faults",
        "passed: no work was lost" if report.passed else "FAILED",
    ]


def _spread(values: list[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    if len(known) < len(values):
        return f"{len(values) - len(known)} never"
    return f"{statistics.median(known):.2f} ({known[-1]:.2f})"


def _undisturbed(config: DrillConfig, steps: int) -> str:
    done = subprocess.run(
        _command(config, "undisturbed", steps), capture_output=True, text=True, check=False, env=_plain(os.environ)
    )
    if done.returncode != 0:
        raise TrainingError(
            f"the reference run exited with code {done.returncode}: {done.stderr.strip()[-300:]}",
            fix="fix this first: `drumline train` does not work here",
        )
    return str(RunFolder(config.folder / "undisturbed").read_status()["weights_sha256"])


def _plain(environ: Any) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name != _ENVIRONMENT}


def _command(config: DrillConfig, name: str, steps: int) -> Sequence[str]:
    flags = {
        "model": "drumline.drill.drill:paced_gpt",
        "train_data_path": config.folder / "text",
        "data_dir": config.folder / "data",
        "run_dir": config.folder / name,
        "total_steps": steps,
        "n_layers": 2,
        "n_heads": 2,
        "d_model": 32,
        "d_ff": 64,
        "context": 32,
        "vocab_size": 300,
        "batch_size": 2,
        "global_batch_size": 2 * MICRO_BATCHES,
        "dropout": 0.1,
        "save_every": 10,
        "snapshot_every": 5,
        "eval_every": 200,
        "eval_windows": 4,
        "log_every": 20,
        "hang_timeout": 2.0,
    }
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    return [sys.executable, "-m", "drumline", "train", "--bitwise", *words]


def _write_text(folder: Path) -> None:
    """Random sentences, enough of them that no two steps see the same text."""
    draw = random.Random(0)
    words = "the drum beats on and every rank keeps time while one falls out of step and comes back in".split()
    for number in range(200):
        text = " ".join(draw.choice(words) for _ in range(300))
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
