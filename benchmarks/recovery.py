"""What a killed rank costs a run of `drumline train`: steps lost, and seconds until it trains again, at random steps.

    python benchmarks/recovery.py [--preset modern] [--device cuda] [--kills 20] [--snapshot_every 20] ...

One rank under a supervisor; each kill -9 comes 1 to 3 intervals after training went on. Targets: never more steps lost
than --snapshot_every + 2; with `modern` on an H200, training again within 8 s.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from statistics import median

from header import header
from real_training import Training, random_tokens

PARTS = (
    "death noticed, a new process runs",
    "device, data, model, state restored",
    "first step: kernels",
    "second step",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="modern-tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch_size", default=None)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--snapshot_every", default="20")
    parser.add_argument("--save_every", default="500")
    parser.add_argument("--first", type=int, default=0, help="no kill before so many steps of each start")
    arguments = parser.parse_args()
    header()
    flags = ["--preset", arguments.preset, "--device", arguments.device]
    flags += ["--batch_size", arguments.batch_size] if arguments.batch_size else []
    flags += ["--snapshot_every", arguments.snapshot_every, "--save_every", arguments.save_every]
    print(f"command   drumline train {' '.join(flags)} --nproc 1")
    every = 20 if arguments.snapshot_every == "auto" else int(arguments.snapshot_every)
    draw = random.Random(0)
    lost, again_s, parts = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        data = random_tokens(Path(folder) / "train.bin")
        with Training(Path(folder) / "run", data, flags) as training:
            _, beat = training.wait_for_step(1)
            for _ in range(arguments.kills):
                training.wait_for_step(beat.step + arguments.first + draw.randrange(every, 3 * every))
                time.sleep(draw.random() * 0.2)
                killed, began = training.kill(), time.monotonic()
                runs, _ = training.wait_for(lambda beat: True, but=killed.pid)
                restored, beat = training.wait_for(lambda beat: beat.phase != "starting", but=killed.pid)
                start = beat.step
                first, _ = training.wait_for_step(start + 1, but=killed.pid)
                ended, beat = training.wait_for_step(start + 2, but=killed.pid)
                lost.append(killed.step - start)
                again_s.append(ended - began)
                parts.append((runs - began, restored - runs, first - restored, ended - first))
                print(f"killed at step {killed.step}, went on from {start} after {again_s[-1]:.2f} s", flush=True)
    print(f"steps lost         median {median(lost):.0f}, worst {max(lost)} of {len(lost)} kills")
    print(f"training again     median {median(again_s):.2f} s, worst {max(again_s):.2f} s, by its second step:")
    for name, times in zip(PARTS, zip(*parts, strict=True), strict=True):
        print(f"  {name:<40} {median(times):.2f} s, worst {max(times):.2f} s")


if __name__ == "__main__":
    main()
