"""Whether the memory of ranks and supervisor grows with the number of steps: the tiniest model, for many minutes.

`python benchmarks/soak.py --minutes 15 --nproc 2`. Counted is the memory of each process that is backed by no file:
pages of libraries and of the token file come and go with the machine's cache. The growth is fitted to all samples after
a warm-up, and once more to the second half of them: what goes on growing has the same slope there.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from header import header
from real_training import Training, random_tokens

_IDS = 256
_TINIEST = (
    "--preset tiny --n_layers 1 --n_heads 1 --d_model 8 --d_ff 8 --context 8 --batch_size 1 --vocab_size 256 "
    "--device cpu --doctor off --eval_windows 4"
).split()
_BLOCKS = 10
"""A slope and its error are fitted to the means of so many blocks of samples, which are nearly independent."""
Sample = tuple[int, float]
"""(steps, megabytes)"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--warm_up", type=float, default=3.0, help="minutes at the beginning that are not counted")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--every_s", type=float, default=1.0, help="seconds between two samples")
    parser.add_argument("--bound", type=float, default=10.0, help="MB per million steps that a process may grow by")
    parser.add_argument("--samples", type=Path, help="file for all samples: process, steps, MB")
    arguments, flags = parser.parse_known_args()
    header()
    nproc = arguments.nproc
    schedule = ["--log_every", "100", "--eval_every", "20000", "--save_every", "20000", "--total_steps", "1000000000"]
    flags = [*_TINIEST, "--nproc", str(nproc), "--global_batch_size", str(nproc), *schedule, *flags]
    print(f"command   drumline train {' '.join(flags)}, {arguments.minutes:g} minutes")
    with tempfile.TemporaryDirectory() as folder:
        data = random_tokens(Path(folder) / "train.bin", ids=_IDS)
        with Training(Path(folder) / "run", data, flags) as training:
            samples = follow(training, nproc, minutes=arguments.minutes, every_s=arguments.every_s)
    if arguments.samples:
        lines = (f"{name},{step},{mb:.2f}\n" for name, rows in samples.items() for step, mb in rows)
        arguments.samples.write_text("".join(lines))
    skipped = round(arguments.warm_up * 60 / arguments.every_s)
    grown = [show(name, rows[min(skipped, len(rows) // 2) :]) for name, rows in samples.items()]
    if max(grown) > arguments.bound:
        raise SystemExit(f"grows by more than {arguments.bound:g} MB per million steps")


def follow(training: Training, nproc: int, *, minutes: float, every_s: float) -> dict[str, list[Sample]]:
    """Samples of each process, as long as that."""
    training.wait_for_step(1000)
    samples: dict[str, list[Sample]] = {name: [] for name in ("launcher", *(f"rank {r}" for r in range(nproc)))}
    began = time.monotonic()
    while time.monotonic() < began + 60 * minutes:
        _, beat = training.wait_for_step(1)
        pids = [training.launcher_pid, *(own.pid for rank in range(nproc) if (own := training.beat(rank)))]
        for rows, pid in zip(samples.values(), pids, strict=True):
            rows.append((beat.step, own_megabytes(pid)))
        time.sleep(every_s)
    return samples


def own_megabytes(pid: int) -> float:
    """What a process has in memory that is backed by no file."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def show(name: str, rows: list[Sample]) -> float:
    """Print the growth of a process; gives what it is at least, in MB per million steps."""
    (first_step, first_mb), (last_step, last_mb) = rows[0], rows[-1]
    slope, error = growth(rows)
    later, later_error = growth(rows[len(rows) // 2 :])
    print(
        f"{name:<9} {first_mb:.2f} MB at step {first_step:,}, {last_mb:.2f} MB at step {last_step:,}: "
        f"{slope:+.2f} +- {error:.2f} MB per million steps, {later:+.2f} +- {later_error:.2f} in the second half"
    )
    return slope - 2 * error


def growth(rows: list[Sample]) -> tuple[float, float]:
    """MB per million steps, and its standard error."""
    size = max(1, len(rows) // _BLOCKS)
    blocks = [rows[start : start + size] for start in range(0, size * _BLOCKS, size)]
    steps = [statistics.fmean(step for step, _ in block) / 1e6 for block in blocks if block]
    megabytes = [statistics.fmean(mb for _, mb in block) for block in blocks if block]
    slope, offset = statistics.linear_regression(steps, megabytes)
    left = sum((mb - offset - slope * step) ** 2 for step, mb in zip(steps, megabytes, strict=True))
    spread = sum((step - statistics.fmean(steps)) ** 2 for step in steps)
    return slope, (left / max(1, len(steps) - 2) / spread) ** 0.5


if __name__ == "__main__":
    main()
