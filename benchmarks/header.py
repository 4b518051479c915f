"""What every figure needs beside it: when, on what, with which versions."""

import datetime
import os
import platform
from pathlib import Path

import torch

import drumline


def header() -> None:
    """Print date, hardware and versions as one line each."""
    print(f"date      {datetime.datetime.now(datetime.UTC):%Y-%m-%d}")
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    print(f"hardware  {_processor()}, {os.cpu_count()} cores{gpu}")
    print(f"versions  drumline {drumline.__version__}, torch {torch.__version__}, python {platform.python_version()}")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
