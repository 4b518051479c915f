"""What saves and snapshots cost while `drumline train` trains: stalls, times until they can be used, goodput.

    python benchmarks/save_stall.py [--preset modern] [--device cuda] [--steps 600] [--save_every 200] ...

One rank under a supervisor trains three times: without saves and snapshots, with both, and without again. Goodput is
the time per step without them over that with them; --once trains only with them, and leaves it out. The speed of saves
is compared with a plain write of as many bytes by 8 threads, with fsync, on the same disk. Targets on an H200 with
`modern` (3.0 GB): a snapshot complete within 0.7 s that stalls at most 30 ms; saves at 0.8 of the plain write or
better; at most 2% of the time lost with --snapshot_every 20 --save_every 500.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import Any

from header import header
from real_training import Training, random_tokens

_CHUNK_BYTES = 16 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="modern-tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch_size", default=None)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--warm_up", type=int, default=60)
    parser.add_argument("--snapshot_every", default="20")
    parser.add_argument("--save_every", default="500")
    parser.add_argument("--once", action="store_true")
    arguments = parser.parse_args()
    header()
    flags = ["--preset", arguments.preset, "--device", arguments.device, "--keep_checkpoints", "1"]
    flags += ["--batch_size", arguments.batch_size] if arguments.batch_size else []
    scheduled = ["--snapshot_every", arguments.snapshot_every, "--save_every", arguments.save_every]
    first, last = arguments.warm_up, arguments.warm_up + arguments.steps
    print(f"command   drumline train {' '.join([*flags, *scheduled])} --nproc 1, steps {first} to {last}")
    with tempfile.TemporaryDirectory() as folder:
        data = random_tokens(Path(folder) / "train.bin")
        step_s, events = list[list[float]](), list[dict[str, Any]]()
        for name in ("with",) if arguments.once else ("before", "with", "after"):
            schedule = scheduled if name == "with" else ["--snapshot_every", "0", "--save_every", "100000000"]
            with Training(Path(folder) / name, data, [*flags, *schedule]) as training:
                training.wait_for_step(first)
                step_s.append(training.follow(last))
                if name == "with":
                    while len(saved := training.events("saved")) < last // int(arguments.save_every):
                        time.sleep(0.1)
                    events = [*training.events("snapshot"), *saved]
        show(events, plain_write_s=plain_write(Path(folder), max(event["bytes"] for event in events)))
        if arguments.once:
            return
        for name, times in zip(("without", "with", "without"), step_s, strict=True):
            figures = f"median {median(times):.4f}, mean {mean(times):.4f}, worst {max(times):.3f}"
            print(f"step, s            {figures} ({name})")
        undisturbed = mean([*step_s[0], *step_s[2]])
        for name in ("saved", "snapshot"):
            longer = extra(step_s[1], first, events, name) / undisturbed
            print(f"meanwhile          steps take {longer:+.1%} ({name})")
        print(f"goodput            {undisturbed / mean(step_s[1]):.4f} of that without")


def extra(step_s: list[float], first: int, events: list[dict[str, Any]], name: str) -> float:
    """How much longer the steps are, on average, while a save or a snapshot is being completed (and no save is)."""
    under_way: dict[str, set[int]] = {"saved": set(), "snapshot": set()}
    for event in events:
        lasts_s = event["complete_s"] if event["event"] == "snapshot" else event["written_s"] + event.get("check_s", 0)
        number, left_s = event["step"] - first, lasts_s
        while 0 <= number < len(step_s) and left_s > 0:
            under_way[event["event"]].add(number)
            number, left_s = number + 1, left_s - step_s[number]
    chosen = under_way[name] - (under_way["saved"] if name == "snapshot" else set())
    others = [each for number, each in enumerate(step_s) if number not in under_way["saved"] | under_way["snapshot"]]
    return mean(step_s[number] for number in chosen) - mean(others) if chosen and others else 0.0


def show(events: list[dict[str, Any]], *, plain_write_s: float) -> None:
    snapshots = [event for event in events if event["event"] == "snapshot"]
    saves = [event for event in events if event["event"] == "saved"]
    print(f"{'':<10}{'number':>7}{'GB':>8}{'stall, s':>10}{'worst':>8}{'usable after, s':>17}{'worst':>8}")
    for name, rows, usable in (("snapshots", snapshots, "complete_s"), ("saves", saves, "written_s")):
        if rows:
            stalls, times = [row["stall_s"] for row in rows], [row[usable] for row in rows]
            print(
                f"{name:<10}{len(rows):>7}{rows[0]['bytes'] / 1e9:>8.2f}{median(stalls):>10.4f}{max(stalls):>8.4f}"
                f"{median(times):>17.3f}{max(times):>8.3f}"
            )
    if saves:
        written = median(row["written_s"] for row in saves)
        parts = ", ".join(f"{row['copy_s']:.2f} + {row['write_s']:.2f}" for row in saves)
        print(f"saves, s           to the host + to the disk: {parts}")
        print(
            f"plain write        {plain_write_s:.3f} s with 8 threads and fsync: "
            f"saves reach {plain_write_s / written:.2f} of its speed"
        )


def plain_write(folder: Path, size: int) -> float:
    """Seconds to write and flush so many bytes with 8 threads."""
    chunk = os.urandom(_CHUNK_BYTES)

    def write(number: int) -> None:
        with (folder / f"plain-{number}").open("wb", buffering=0) as file:
            for start in range(0, size // 8, _CHUNK_BYTES):
                file.write(chunk[: size // 8 - start])
            os.fsync(file.fileno())

    began = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    taken = time.monotonic() - began
    for number in range(8):
        (folder / f"plain-{number}").unlink()
    return taken


if __name__ == "__main__":
    main()
