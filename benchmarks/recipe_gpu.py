"""How much sooner than nanoGPT's recipe does `drumline train --recipe modern` reach the loss of nanoGPT's epoch?

    python benchmarks/recipe_gpu.py --data FOLDER                   # 124M: about 8 minutes on an H200
    python benchmarks/recipe_gpu.py --data FOLDER --shape medium --baseline 6e-4:16 --baseline 1e-3:16
    python benchmarks/recipe_gpu.py --data FOLDER --ablate          # ours, with one part left out at a time
    python benchmarks/recipe_gpu.py --miniature                     # every line of it on a CPU, to see that it works

FOLDER holds gutenberg-train.jsonl.xz and gutenberg-valid.jsonl.xz, and a tokenizer.json if there is one; or tokens that
`drumline prepare` made. Tokens that are made here are kept in FOLDER/tokens for the next time.

Ours is the command itself, a process for each seed, one after the other and in turns with nanoGPT. The seed decides
first weights and the order of the text. nanoGPT (nanogpt.py) is compiled whole, with fused AdamW, autocast to bfloat16,
a cosine to a tenth after 100 steps of warmup, decay 0.1, clipping at 1; one epoch for each learning rate and batch, of
which the lowest loss is what ours has to reach.

Both are judged by drumline's `evaluate`: nats a token over the whole validation file, in windows of the same context.

Both clocks count whole training steps and nothing else:
- nanoGPT's runs from the first step to the last, synchronised at both ends, with all text on the GPU already and no
  loss read. Before it 5 steps are made and undone, so that compiling and other first-time costs are not in it.
- Ours adds up what each step took by metrics.jsonl: from record to record, so that fetching the batch, reading the loss
  and writing the record itself are in it, and evaluating and saving are not (the loop takes those out). A first short
  run fills the caches of compiled kernels. The first 5 steps of each context length, which load kernels and take
  memory for the first time, count as much as the median of the other steps of that length; what they really took is
  in the column `as recorded`. In the first seconds a thread pins the memory that a checkpoint will be copied to:
  whatever that costs is counted, and shows as slow steps.
"""

import argparse
import itertools
import json
import math
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from header import header
from nanogpt import WARM_STEPS, Baseline
from recipe_cpu import PARTS

import drumline
from drumline.config.presets import MEDIUM, SMALL
from drumline.config.toml_file import read_settings
from drumline.data.opening import open_tokens
from drumline.data.tokens import is_tokens
from drumline.report.records import read_metrics

VOCAB = 32768
LAST_STEPS = 50
LIMIT_S = 400.0
"""A command that takes longer hangs."""
BASELINES = ("6e-4:16", "1e-3:16", "6e-4:32", "1.5e-3:32")
SHAPES = {"small": ("modern", SMALL, 8.0), "medium": ("modern-medium", MEDIUM, 5.0)}
"""The preset, its shape, and how many times sooner is wanted."""
MINIATURE = {"n_layers": 2, "n_heads": 2, "d_model": 64, "d_ff": 256}
WITHOUT = {
    "nothing": "",
    "Muon (AdamW at 0.002 instead)": "--optimizer adamw --lr 0.002",
    **PARTS,
    "short contexts in the first half": "--short_contexts 0",
}
# Whatever looks up from training happens once, after the last step.
ONCE = "--eval_every 1000000 --eval_windows 1000000 --save_every 1000000 --snapshot_every 0 --keep_checkpoints 1"


@dataclass(frozen=True, kw_only=True)
class Trained:
    run: str
    steps: int
    tokens: int
    seconds: float
    valid_loss: float
    """Over all validation text, nats a token."""
    recorded_s: float = math.nan
    """With first-time costs."""
    train_loss: float = math.nan
    """Mean of the last 50 steps."""
    slow_steps: int = 0
    slow_s: float = 0.0
    """Steps that took half again as long as the median, first ones aside, and what they took beyond it."""
    trouble: list[str] = field(default_factory=list)
    """What events.jsonl tells beside saves: a step that was computed again is not in the clock."""
    laps_s: list[float] = field(default_factory=list)

    @property
    def row(self) -> str:
        recorded = "" if math.isnan(self.recorded_s) else f"{self.recorded_s:.2f}"
        figures = f"{self.steps} | {self.tokens:,} | {self.seconds:.2f} | {recorded} | {self.valid_loss:.4f}"
        return f"| {self.run} | {figures} |"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all runs share."""

    tokens: Path
    work: Path
    device: torch.device
    context: int
    flags: str
    """Of every run of ours."""


def drumline_command(*words: object) -> bool:
    """Run the command; where it fails, show the end of what it said."""
    command = [sys.executable, "-m", "drumline", *map(str, words)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        print(f"FAILED: not done after {LIMIT_S:.0f} s: {shlex.join(command)}", flush=True)
        return False
    if done.returncode:
        said = (done.stdout + done.stderr)[-3000:]
        print(f"FAILED with {done.returncode}: {shlex.join(command)}\n{said}", flush=True)
    return done.returncode == 0


def train(bench: Bench, name: str, flags: str, *, steps: int) -> Trained | None:
    """One run of the product; None if it did not come to its end."""
    folder = bench.work / "run"
    where = ("--train_data_path", bench.tokens, "--run_dir", folder, "--total_steps", steps)
    drumline_command("train", *where, *f"{ONCE} {bench.flags} {flags}".split())
    try:
        # Where only what follows the last step failed, such as the plot, the figures are all there.
        return read_run(name, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a checkpoint has gigabytes


def read_run(name: str, folder: Path) -> Trained | None:
    records = read_metrics(folder / "metrics.jsonl")
    judged = [record["valid_loss"] for record in records if record.get("valid_loss") is not None]
    if not judged:
        return None
    settings = read_settings(folder / "config.toml")
    tokens = settings["global_batch_size"] * settings["context"]
    steps = [record for record in records if "tokens_per_s" in record]
    laps = [tokens / record["tokens_per_s"] for record in steps]
    # The first step of another length is started, and its kernels loaded, within the lap of the step before it.
    short = max(0, round(settings["short_contexts"] * settings["total_steps"]) - 1)
    parts = [part for part in (laps[:short], laps[short:]) if part]
    usual = [statistics.median(part[WARM_STEPS:] or part) for part in parts]
    later = [[lap - each for lap in part[WARM_STEPS:]] for part, each in zip(parts, usual, strict=True)]
    slow = [more for part, each in zip(later, usual, strict=True) for more in part if more > each / 2]
    events = (folder / "events.jsonl").read_text().splitlines() if (folder / "events.jsonl").exists() else []
    return Trained(
        run=name,
        steps=len(steps),
        tokens=len(steps) * tokens,
        seconds=sum(len(part) * each + sum(more) for part, each, more in zip(parts, usual, later, strict=True)),
        recorded_s=sum(laps),
        valid_loss=judged[-1],
        train_loss=statistics.fmean(record["loss"] or math.nan for record in steps[-LAST_STEPS:]),
        slow_steps=len(slow),
        slow_s=sum(slow),
        trouble=[line for line in events if json.loads(line).get("event") != "saved"],
        laps_s=laps,
    )


def epoch(baseline: Baseline, lr: float, batch: int) -> Trained:
    """One run of nanoGPT's recipe."""
    return Trained(run=f"nanoGPT, {lr:g}, {batch} a step", **asdict(baseline.epoch(lr, batch)))


def prepared(data: Path, work: Path, *, miniature: bool) -> Path:
    """The folder of tokens, made if need be."""
    more: list[object]
    if miniature:
        source, out, more = Path(drumline.__file__).parent, work / "tokens", ["--vocab_size", 512]
    elif is_tokens(data):
        return data
    else:
        source, out = data / "gutenberg-train.jsonl.xz", data / "tokens"
        more = ["--vocab_size", VOCAB, "--valid", data / "gutenberg-valid.jsonl.xz"]
        if (data / "tokenizer.json").exists():
            more += ["--tokenizer", data / "tokenizer.json"]
    began = time.perf_counter()
    if not drumline_command("prepare", source, "--out", out, *more):
        raise SystemExit(1)
    sizes = [len(open_tokens(out, split=split)) for split in ("train", "valid")]
    took_s = time.perf_counter() - began
    print(f"tokens    {sizes[0]:,} to train on, {sizes[1]:,} for validation; {took_s:.0f} s to prepare")
    return out


class Report:
    """The table, and the JSON file as far as it is: a machine that is taken away leaves what was measured."""

    def __init__(self, path: Path | None, arguments: argparse.Namespace) -> None:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        self._path = path
        self._content: dict[str, Any] = {"gpu": gpu, "torch": torch.__version__, "settings": vars(arguments)}
        self._content |= {"runs": [], "verdict": ""}
        print("| run | steps | tokens | seconds | as recorded | validation loss |\n" + "| --- " * 6 + "|", flush=True)

    def add(self, trained: Trained | None) -> None:
        if trained is None:
            return
        print(trained.row, flush=True)
        if trained.slow_steps:
            print(f"  {trained.slow_steps} slow steps took {trained.slow_s:.2f} s more than usual", flush=True)
        for line in trained.trouble:
            print(f"  {line}", flush=True)
        self._content["runs"].append(asdict(trained))
        self._write()

    def conclude(self, verdict: str) -> None:
        print(verdict, flush=True)
        self._content["verdict"] = verdict
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(self._content, indent=1, default=str) + "\n")


def attempt(run: Callable[[], Trained | None]) -> Trained | None:
    """A run that fails must not cost the others."""
    try:
        return run()
    except Exception:
        traceback.print_exc()
        return None


def verdict(ours: Sequence[Trained], baselines: Sequence[Trained], *, target: float) -> str:
    """How much sooner the runs that reach the best baseline's loss were there."""
    if not ours or not baselines:
        return "nothing to compare"
    best = min(baselines, key=lambda each: each.valid_loss)
    reached = [each for each in ours if each.valid_loss <= best.valid_loss]
    goal = f"the {best.valid_loss:.4f} that {best.run}, reaches in {best.seconds:.2f} s"
    if not reached:
        return f"none of {len(ours)} runs reaches {goal}; the nearest: {min(run.valid_loss for run in ours):.4f}"
    times = ", ".join(f"{best.seconds / run.seconds:.2f}" for run in reached)
    recorded = ", ".join(f"{best.seconds / run.recorded_s:.2f}" for run in reached)
    return (
        f"{len(reached)} of {len(ours)} runs reach {goal}: {times} times sooner (target: at least {target:g}); "
        f"with our first-time costs counted {recorded}"
    )


def seeds_of(arguments: argparse.Namespace) -> list[str]:
    return [] if arguments.seeds == "none" else arguments.seeds.split(",")


def compare(bench: Bench, report: Report, arguments: argparse.Namespace, *, fp8: str) -> None:
    _, shape, target = SHAPES[arguments.shape]
    settings = [tuple(map(float, each.split(":"))) for each in arguments.baseline or BASELINES if each != "none"]
    shape = MINIATURE if arguments.miniature else shape
    baseline = Baseline(bench.tokens, shape, context=bench.context, device=bench.device) if settings else None
    ours: list[Trained] = []
    baselines: list[Trained] = []
    for seed, setting in itertools.zip_longest(seeds_of(arguments), settings):
        if seed is not None:
            run, flags = f"drumline{' in fp8' if fp8 else ''}, seed {seed}", f"--seed {seed} {fp8}"
            trained = attempt(partial(train, bench, run, flags, steps=arguments.steps))
            report.add(trained)
            ours += [trained] if trained else []
        if baseline is not None and setting is not None:
            trained = attempt(partial(epoch, baseline, setting[0], int(setting[1])))
            report.add(trained)
            baselines += [trained] if trained else []
    report.conclude(verdict(ours, baselines, target=target))


def ablate(bench: Bench, report: Report, *, steps: int, fp8: str) -> None:
    rows = [(name, f"{flags} {fp8}") for name, flags in WITHOUT.items()]
    rows += [("fp8", "")] if fp8 else []
    for name, flags in rows:
        report.add(attempt(partial(train, bench, f"without {name}", flags, steps=steps)))


def filled_caches(bench: Bench, *, fp8: str) -> str:
    """Compile every kernel in a short run. Gives back how fp8 is asked for: not at all where it does not work."""
    began = time.perf_counter()
    works = attempt(partial(train, bench, "first", fp8, steps=4 * WARM_STEPS)) is not None
    print(f"first run {time.perf_counter() - began:.0f} s", flush=True)
    if works or not fp8:
        return fp8
    print("fp8 does not work here; going on without", flush=True)
    return filled_caches(bench, fp8="")


@contextmanager
def benching(arguments: argparse.Namespace, flags: str) -> Iterator[Bench]:
    """What all runs share, with tokens that are ready and a folder that is gone afterwards."""
    header()
    context, device = (64, "cpu") if arguments.miniature else (1024, "cuda")
    always = f"--device {device} --context {context} --doctor off --log_every 1 --model {arguments.model}"
    if arguments.miniature:
        print("miniature: its figures mean nothing")
        always += "".join(f" --{name} {value}" for name, value in MINIATURE.items())
    with tempfile.TemporaryDirectory() as work:
        tokens = prepared(arguments.data, Path(work), miniature=arguments.miniature)
        yield Bench(
            tokens=tokens,
            work=Path(work),
            device=torch.device(device),
            context=context,
            flags=f"{always} {flags} {arguments.flags}",
        )


def common_arguments(doc: str, *, steps: int, batch_size: int, seeds: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("."), help="the folder of text or tokens")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch_size", type=int, default=batch_size, help="sequences a step")
    parser.add_argument("--seeds", default=seeds, help="as 0,1,2, or none")
    parser.add_argument("--model", default="drumline.kernels.gpt:FusedGPT", help="as --model of drumline train")
    parser.add_argument("--flags", default="", help="more flags of drumline train, as one word")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--miniature", action="store_true", help="a tiny model on a CPU; its figures mean nothing")
    return parser


def main() -> None:
    parser = common_arguments(__doc__ or "", steps=224, batch_size=24, seeds="0,1,2")
    parser.add_argument("--shape", choices=SHAPES, default="small", help="124M or 350M")
    parser.add_argument("--no_fp8", action="store_true")
    parser.add_argument("--baseline", action="append", help=f"LR:BATCH, or none. Default: {' '.join(BASELINES)}")
    parser.add_argument("--ablate", action="store_true")
    arguments = parser.parse_args()
    if arguments.miniature:
        arguments.steps, arguments.batch_size = 40, 8
        arguments.baseline = arguments.baseline or ["1e-4:64", "3e-4:32"]
    preset = SHAPES[arguments.shape][0]
    recipe = f"--preset {preset} --recipe modern --batch_size {arguments.batch_size}"
    with benching(arguments, recipe) as bench:
        fp8 = "" if arguments.no_fp8 or arguments.miniature else "--fp8"
        if seeds_of(arguments):
            fp8 = filled_caches(bench, fp8=fp8)
        report = Report(arguments.json, arguments)
        if arguments.ablate:
            ablate(bench, report, steps=arguments.steps, fp8=fp8)
        else:
            compare(bench, report, arguments, fp8=fp8)


if __name__ == "__main__":
    main()
