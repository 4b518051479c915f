"""How long `drumline --help` takes, which loads no torch.

    python benchmarks/help_time.py [--repeat 20]

Target: at most 0.25 s of processor time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from statistics import median

from header import header


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=20)
    repeat = parser.parse_args().repeat
    header()
    once()  # the first one may have files to read and to compile
    walls, processors = zip(*(once() for _ in range(repeat)), strict=True)
    print(f"drumline --help  {median(walls):.3f} s, of the processor {median(processors):.3f} s, {repeat} times")


def once() -> tuple[float, float]:
    """Seconds, and seconds of the processor."""
    since = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "drumline", "--help"], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return time.monotonic() - since, used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
