"""How long a folder of tokens takes to open, and what memory that needs, by its size.

    python benchmarks/opening.py [--repetitions 5] [--folder /tmp]

The tokens are holes in a file, which read as zeros: a terabyte takes no room. Each opening is a process of its own, and
includes a micro-batch of a late step. Target: under 1 s for 1 TB.
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

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.sparse import sparse_folder

_OPEN = """
import json, resource, sys, time
import torch
from drumline.data import BatchPlan, TokenBatches, open_tokens
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
tokens = open_tokens(sys.argv[1])
opened = time.perf_counter()
TokenBatches(tokens, BatchPlan(32, 16), context=1024, seed=0).micro_batch(len(tokens) // 1024 // 1024, 3)
read = time.perf_counter()
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([opened - began, read - opened, grown / 1024]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    given = parser.parse_args()
    header()
    print("| bytes | open, first time | again | micro-batch of 32 | memory |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        for size_bytes in (10**9, 10**10, 10**11, 10**12):
            folder = sparse_folder(Path(temporary, str(size_bytes)), tokens=size_bytes // 2, documents=1000)
            first, *others = (opening(folder) for _ in range(given.repetitions + 1))
            again, batch = (median(each[place] for each in others) for place in (0, 1))
            memory = max(each[2] for each in others)
            print(f"| {size_bytes:,} | {first[0]:.2f} s | {again:.2f} s | {batch * 1000:.0f} ms | {memory:.0f} MiB |")


def opening(folder: Path) -> list[float]:
    """Seconds to open, seconds for a micro-batch, and MiB."""
    words = [sys.executable, "-c", _OPEN, str(folder)]
    measured: list[float] = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return measured


if __name__ == "__main__":
    main()
