"""How soon a broken run trains again: every fault many times on 2 CPU ranks of one launcher, in one run.

    python benchmarks/faults.py [--repeat 20]

Targets: a rank killed or crashed: noticed within 0.5 s, training again within 2 s; frozen: named within 5 s of the hang
limit (here 2 s); the launcher killed: no process left after 2 s; SIGTERM, SIGINT, SIGUSR1: no step lost. All of them
every time.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil
from header import header

from drumline.drill.drill import DrillConfig, drilled_run
from drumline.drill.faults import Outcome, inject
from drumline.drill.run import DrilledRun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--faults", default="kill,crash,stop,term,launcher")
    arguments = parser.parse_args()
    repeat, faults = arguments.repeat, arguments.faults.split(",")
    header()
    print(f"{'fault':<10} {'passed':>8} {'detected, s':>12} {'worst':>7} {'again, s':>10} {'worst':>7} {'lost':>5}")
    with tempfile.TemporaryDirectory() as folder:
        config = DrillConfig(faults=("kill",), folder=Path(folder) / "drill", minutes=1.0)
        with drilled_run(config, steps=1_000_000) as run:
            run.start()
            run.wait_for_steps(3)
            for fault in faults:
                if fault == "launcher":
                    launchers(run, repeat)
                    continue
                outcomes = []
                for number in range(repeat):
                    run.sleep(until=time.monotonic() + 1.0)
                    run.wait_for_steps(1, ranks=2)
                    since = time.monotonic()
                    outcomes.append(inject(fault, run, random.Random(number)))
                    if not outcomes[-1].passed:
                        print(outcomes[-1], *(line.text for line in run.lines if line.said_s > since), sep="\n  ")
                report(outcomes)


def report(outcomes: list[Outcome]) -> None:
    noticed = [o.noticed_s for o in outcomes if o.noticed_s is not None]
    again = [o.again_s for o in outcomes if o.again_s is not None]
    passed = f"{sum(o.passed for o in outcomes)}/{len(outcomes)}"
    lost = max((o.lost_steps or 0) for o in outcomes)
    print(
        f"{outcomes[0].fault:<10} {passed:>8} {median(noticed):>12.2f} {max(noticed):>7.2f} "
        f"{median(again):>10.2f} {max(again):>7.2f} {lost:>5}",
        flush=True,
    )


def launchers(run: DrilledRun, repeat: int) -> None:
    """Kill the launcher and count the time until none of its processes is left."""
    times = []
    for _ in range(repeat):
        launcher = run.launchers[0]
        assert launcher is not None
        processes = psutil.Process(launcher.pid).children(recursive=True)
        began = time.monotonic()
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
        while any(map(lives, processes)):
            time.sleep(0.01)
        times.append(time.monotonic() - began)
        run.start()
        run.wait_for_steps(1)
    print(f"launcher killed: no process left after {median(times):.2f} s, at worst {max(times):.2f} s, {repeat} times")


def lives(process: psutil.Process) -> bool:
    """A process that has ended and waits for somebody to ask how is gone."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    main()
