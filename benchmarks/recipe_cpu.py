"""The modern recipe against the classic one on the default run's shape and text, for the same time on this machine.

    python benchmarks/recipe_cpu.py             # both recipes: about 7 minutes on 2 quiet cores
    python benchmarks/recipe_cpu.py --ablate    # the modern recipe short, then with one part of it left out at a time
    python benchmarks/recipe_cpu.py --portable  # the modern recipe and the portable one: the time to the same loss

Both train modern-tiny on the built-in text, side by side with one thread each, so that whatever else the machine does
slows both alike. The modern recipe takes the preset's steps; the classic one as many as fit into the same time at the
speed that a short run of both shows, so that its schedule ends there too. Judged by bits per byte of all validation
text. The ablation takes a fifth of the preset's steps, the same number for each row, two rows at a time. --portable
trains both recipes side by side for half of the steps, then the better one for 0.7 to 0.3 of them, and says which of
these runs still ends at the loss of the other: at a loss on the way, the learning rate of a run is still high.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from header import header

from drumline.config.presets import PRESETS
from drumline.report.records import read_metrics

PRESET = PRESETS["modern-tiny"]
SHAPE = "--n_layers 4 --context 128 --batch_size 16"
"""Of the runs whose figures docs/recipe.md has."""
STEPS = 800
PARTS = {
    "the untied head": "--tie_embeddings",
    "projections that start at zero": "--init gpt2",
    "value tables": "--value_tables 0",
    "smeared embeddings": "--no-smear",
    "the cap on logits": "--softcap 0",
    "norms without weights": "--norm_weights",
    "its schedule (cosine to a tenth instead)": "--schedule cosine --warmup_steps 3 --min_lr_ratio 0.1",
}
"""What can be left out of the recipe in the same way at any size, and the flags that do so."""
WITHOUT = {
    "nothing": "",
    "Muon (AdamW at 0.002 instead)": "--optimizer adamw",
    **PARTS,
    "whole contexts in the first half": "--short_contexts 0.5",
}
"""What is left out, and the flags that do so."""
INSIDE_MUON = {
    "updates of rows at one rate": (
        "drumline.optim.muon.row_factors = lambda rows, *_, **__: rows.new_ones(rows.shape[:2])"
    ),
    "queries, keys and values apart": "drumline.optim.optimizers.CausalSelfAttention = type(None)",
}
"""What has no flag: the line that takes it out."""


@dataclass(frozen=True)
class Trained:
    bits_per_byte: float
    tokens_per_s: float
    wall_s: float


def drumline(*arguments: str, changed: str = "") -> None:
    """The command; `changed` is run before it."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = f"import drumline.optim.optimizers; {changed}; from drumline.cli.app import main; main()"
    command = [sys.executable, *(["-c", code] if changed else ["-m", "drumline"]), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        raise SystemExit(done.stderr)


def train(folder: Path, flags: str, *, steps: int, changed: str = "") -> Trained:
    """Train once, in a folder of its own beside the prepared text."""
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    fixed = f"--train_data_path {folder / 'text'} --run_dir {run} --device cpu --total_steps {steps} {SHAPE}"
    judged = "--eval_windows 1000000 --eval_every 1000000"
    start = time.perf_counter()
    drumline("train", *fixed.split(), *judged.split(), *flags.split(), changed=changed)
    wall_s = time.perf_counter() - start
    records = read_metrics(run / "metrics.jsonl")
    speed = statistics.median(record["tokens_per_s"] for record in records if "tokens_per_s" in record)
    (bits,) = (record["bits_per_byte"] for record in records if "bits_per_byte" in record)
    return Trained(bits_per_byte=bits, tokens_per_s=speed, wall_s=wall_s)


def side_by_side(folder: Path, runs: Sequence[tuple[str, int, str]], *, at_once: int = 2) -> Iterator[Trained]:
    """Train each (flags, steps, what is changed), two at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(lambda run: train(folder, run[0], steps=run[1], changed=run[2]), runs)


def compare(folder: Path, steps: int) -> None:
    recipes = ("--recipe modern", "--recipe classic")
    modern, classic = side_by_side(folder, [(flags, 50, "") for flags in recipes])
    classic_steps = round(steps * classic.tokens_per_s / modern.tokens_per_s)
    modern, classic = side_by_side(folder, [(recipes[0], steps, ""), (recipes[1], classic_steps, "")])
    for name, trained, taken in (("modern", modern, steps), ("classic", classic, classic_steps)):
        print(f"{name:<9} {trained.bits_per_byte:.4f} bits/byte, {taken} steps in {trained.wall_s:.0f} s")
    print(f"modern / classic  {modern.bits_per_byte / classic.bits_per_byte:.3f} (target: at most 0.85)")


def to_the_same_loss(folder: Path, steps: int, *, seed: int, at_once: int) -> None:
    """How much sooner the better of both recipes ends at the loss of the other."""
    flags = f"--seed {seed} --recipe"
    print(f"{'':<10}{'steps':>6}{'bits/byte':>12}{'tokens/s':>11}{'seconds':>9}")

    def show(name: str, taken: int, trained: Trained) -> None:
        numbers = f"{trained.bits_per_byte:>12.4f}{trained.tokens_per_s:>11.0f}{trained.wall_s:>9.1f}"
        print(f"{name:<10}{taken:>6}{numbers}", flush=True)

    names = ("modern", "portable")
    whole = side_by_side(folder, [(f"{flags} {name}", steps, "") for name in names], at_once=at_once)
    both = dict(zip(names, whole, strict=True))
    for name, trained in both.items():
        show(name, steps, trained)
    better, other = sorted(names, key=lambda name: both[name].bits_per_byte)
    shares = (0.7, 0.5, 0.4, 0.3)
    shorter = [(f"{flags} {better}", round(steps * share), "") for share in shares]
    enough = 1.0
    for share, trained in zip(shares, side_by_side(folder, shorter, at_once=at_once), strict=True):
        show(better, round(steps * share), trained)
        enough = share if trained.bits_per_byte <= both[other].bits_per_byte else enough
    ratio = both[better].tokens_per_s / both[other].tokens_per_s / enough
    least = "at least " if enough == shares[-1] else ""
    print(
        f"{better} ends at the loss of {other} or below with {enough:g} of the steps: {least}{ratio:.2f} times as fast"
    )


def ablate(folder: Path, steps: int) -> None:
    print(f"{steps} steps\n{'without':<42}bits/byte   tokens/s")
    runs = [(f"--recipe modern {flags}", steps, "") for flags in WITHOUT.values()]
    runs += [("--recipe modern", steps, line) for line in INSIDE_MUON.values()]
    for name, trained in zip((*WITHOUT, *INSIDE_MUON), side_by_side(folder, runs), strict=True):
        print(f"{name:<42}{trained.bits_per_byte:9.4f} {trained.tokens_per_s:10.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--portable", action="store_true")
    parser.add_argument(
        "--steps", type=int, help="of the modern recipe. Default: the preset's; a fifth or half with a flag"
    )
    parser.add_argument("--seed", type=int, default=0, help="of --portable (default 0)")
    parser.add_argument("--at_once", type=int, default=2, help="runs side by side, of --portable (default 2)")
    arguments = parser.parse_args()
    usual = STEPS
    header()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        drumline("prepare", "builtin", "--out", str(folder / "text"), "--vocab_size", str(PRESET.vocab_size))
        if arguments.ablate:
            ablate(folder, arguments.steps or usual // 5)
        elif arguments.portable:
            to_the_same_loss(folder, arguments.steps or usual // 2, seed=arguments.seed, at_once=arguments.at_once)
        else:
            compare(folder, arguments.steps or usual)


if __name__ == "__main__":
    main()
