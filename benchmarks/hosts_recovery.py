"""How soon two hosts go on when one dies or falls silent, and when it is back. Needs root, for network namespaces.

    python benchmarks/hosts_recovery.py [--repeat 5]

Targets: the other goes on alone within 10 s; both go on within 10 s after the host is restarted or its link is up.
Measured from the fault to the first step beyond those that were reached before it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

from header import header

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers.elastic_hosts import goes_on, kill, link, rendezvous_count, wait
from helpers.hosts import Host, Started, two_hosts
from helpers.small import small


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    header()
    times: dict[str, list[float]] = {}
    for _ in range(repeat):
        for name, seconds in once(Path(tempfile.mkdtemp())).items():
            times.setdefault(name, []).append(seconds)
    for name, taken in times.items():
        print(f"{name:<46} {median(taken):6.2f} s, at worst {max(taken):6.2f} s, {len(taken)} times")


def once(folder: Path) -> dict[str, float]:
    """One life of a run on two hosts, with everything that can happen to them."""
    (folder / "text").mkdir()
    for number in range(30):
        (folder / "text" / f"{number}.txt").write_text(f"Document {number}. " + "All work and no play. " * 12)
    run, took_s = folder / "run", {}
    with two_hosts(folder) as (a, b):
        one, two = start(a, folder), start(b, folder)
        wait(lambda: rendezvous_count(one, two) > 0, "two ranks", one, two)
        goes_on(run, one, two)
        kill(b)
        took_s["a host dies: the other trains alone after"] = goes_on(run, one)
        before = rendezvous_count(one)
        two = start(b, folder)
        took_s["it is started again: both train after"] = together(before, one, two)
        goes_on(run, one, two)
        link(b, "down")
        took_s["its link falls silent: the other alone after"] = goes_on(run, one)
        before = rendezvous_count(one, two)
        link(b, "up")
        took_s["the link is back: both train after"] = together(before, one, two)
        goes_on(run, one, two)
        kill(a)
        took_s["the host that led dies: the other alone after"] = goes_on(run, two)
    return took_s


def start(host: Host, folder: Path) -> Started:
    flags = small("--train_data_path", "text", "--global_batch_size", "16", "--total_steps", "1000000")
    more = ["--save_every", "20", "--eval_every", "1000000", "--run_dir", "run", "--nproc", "1", "--nnodes", "1:2"]
    return host.start(
        [sys.executable, "-m", "drumline", "train", *flags, *more], cwd=folder, env={"OMP_NUM_THREADS": "1"}
    )


def together(before: int, *started: Started) -> float:
    return wait(lambda: rendezvous_count(*started) > before, "two ranks again", *started)


if __name__ == "__main__":
    main()
