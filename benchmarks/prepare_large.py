"""What memory `drumline prepare` needs for many compressed files, and whether its two encoders give the same bytes.

    python benchmarks/prepare_large.py FILE.jsonl.xz --copies 8 [--workers 2]
    python benchmarks/prepare_large.py FILE.jsonl.xz --same

The folder that is prepared has the file several times, by links. `memory` is the most that all processes have at one
time, each page counted once (PSS, looked at ten times a second), and so includes the training of the tokenizer. With
--same, the file is prepared with gigatoken and without it, with one tokenizer, and all files are compared by sha256.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
from header import header

from drumline.data import Corpus, Recipe, Tokenizer, prepare


def many(source: Path, *, copies: int, workers: int, folder: Path) -> None:
    (folder / "text").mkdir()
    for number in range(copies):
        (folder / "text" / f"{number:03}-{source.name}").symlink_to(source.absolute())
    words = [sys.executable, "-m", "drumline", "prepare", str(folder / "text"), "--out", str(folder / "tokens")]
    began = time.perf_counter()
    process = subprocess.Popen([*words, "--workers", str(workers)], stdout=subprocess.DEVNULL)
    most_bytes = largest_bytes = disk_bytes = 0
    while process.poll() is None:
        sizes = list(pss(process.pid))
        most_bytes, largest_bytes = max(most_bytes, sum(sizes)), max(largest_bytes, *sizes, 0)
        disk_bytes = max(disk_bytes, sum(size(path) for path in folder.glob("tokens.parts-*/unpacked.bin")))
        time.sleep(0.1)
    seconds = time.perf_counter() - began
    about = json.loads((folder / "tokens" / "manifest.json").read_text())
    text_bytes = sum(split["text_bytes"] for split in about["splits"].values())
    print(f"{copies} files, {text_bytes / 1e6:,.0f} MB of text, {workers} processes: {seconds:.1f} s")
    print(f"memory    {most_bytes / 1e6:,.0f} MB of all processes, {largest_bytes / 1e6:,.0f} MB of the largest")
    print(f"disk      {disk_bytes / 1e6:,.0f} MB of unpacked text at most")


def pss(pid: int) -> list[int]:
    """Of a process and all that it has started."""
    sizes = []
    with suppress(psutil.Error):
        own = psutil.Process(pid)
        for each in (own, *own.children(recursive=True)):
            with suppress(psutil.Error):
                sizes.append(int(each.memory_full_info().pss))
    return sizes


def size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def same(source: Path, *, folder: Path) -> None:
    prepare(Recipe(Corpus(str(source))), folder / "first")
    tokenizer, found = Tokenizer.load(folder / "first" / "tokenizer.json"), {}
    for fast in (True, False):
        began, before = time.perf_counter(), time.process_time()
        made = prepare(Recipe(Corpus(str(source)), tokenizer, fast=fast), folder / str(fast))
        took = f"{time.perf_counter() - began:.1f} s, {time.process_time() - before:.1f} s of processor time"
        print(f"{'gigatoken' if fast else 'tokenizers':<12}{took}{made.skipped.note}", flush=True)
        found[fast] = {path.name: hash_of(path) for path in sorted(made.path.iterdir())}
    for name, sha256 in found[True].items():
        print(f"{name:<24}{sha256}  {'same' if found[False].get(name) == sha256 else 'OTHER'}")
    tokens = made.manifest.splits["train"].tokens
    print(f"{tokens:,} tokens of training text: {'all the same' if found[True] == found[False] else 'NOT the same'}")


def hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--copies", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--same", action="store_true")
    parser.add_argument("--folder", type=Path, default=None, help="for temporary files")
    given = parser.parse_args()
    header()
    print(f"load      {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        if given.same:
            same(given.source, folder=Path(name))
        else:
            many(given.source, copies=given.copies, workers=given.workers, folder=Path(name))


if __name__ == "__main__":
    main()
