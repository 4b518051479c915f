"""What activation checkpointing saves and costs: peak memory and speed of real runs of `drumline train`.

    python benchmarks/recomputing.py [--device cpu] [--steps 6] [--flags "--preset gpt2 --n_layers 12 ..."]

Each run is a process of its own. The speed is the median of its records but the first, the memory the peak of the
process (of the GPU with --device cuda). What does not depend on the tokens is that of a run with a context of 4.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from header import header

FLAGS = (
    "--preset gpt2 --n_layers 12 --n_heads 8 --d_model 512 --d_ff 2048 --vocab_size 512 --context 512 --batch_size 8"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--flags", default=FLAGS)
    given = parser.parse_args()
    header()
    print(f"flags     {given.flags}")
    with tempfile.TemporaryDirectory() as folder:
        words = [*given.flags.split(), "--device", given.device, "--total_steps", str(given.steps)]
        base, _ = run(Path(folder, "base"), [*words, "--context", "4"])
        print("| --activation_checkpointing | peak | above a run of 4 tokens | of none | tokens/s | of none |")
        print("| --- | --- | --- | --- | --- | --- |")
        first = None
        for how in ("none", "selective", "block"):
            peak, speed = run(Path(folder, how), [*words, "--activation_checkpointing", how])
            first = first or (peak - base, speed)
            shares = f"{(peak - base) / first[0]:.2f} | {speed:,.0f} | {speed / first[1]:.2f}"
            print(f"| {how} | {peak / 1e6:,.0f} MB | {(peak - base) / 1e6:,.0f} MB | {shares} |", flush=True)


def run(folder: Path, words: list[str]) -> tuple[int, float]:
    """Peak memory in bytes, tokens per second."""
    fixed = "--log_every 1 --eval_every 1000 --eval_windows 1 --save_every 1000 --doctor off --snapshot_every 0".split()
    command = [sys.executable, "-m", "drumline", "train", *fixed, "--data_dir", str(folder.parent / "data")]
    subprocess.run([*command, "--run_dir", str(folder), *words], check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "tokens_per_s" in record]
    return max(each["peak_memory_bytes"] for each in steps), median(each["tokens_per_s"] for each in steps[1:])


if __name__ == "__main__":
    main()
