"""How fast `prepare` is, against the tokenizers library alone on the same text, tokenizer and cores.

    python benchmarks/prepare_throughput.py [--source builtin] [--repetitions 3] [--vocab_size 32768]

Each measurement has a process of its own, and the kinds take turns. `encode_batch` and `encode_batch_fast` get the
documents in memory, 16 MB at a time, and their result is thrown away; `prepare` reads, unpacks, encodes, hashes and
writes. CPU time is that of all threads: on a machine with other work it says more than the clock. Peak memory is that
of the preparing process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from header import header

from drumline.data.preparing import prepare
from drumline.data.sources import documents
from drumline.data.tokenizer import Tokenizer

KINDS = ("encode_batch", "encode_batch_fast", "prepare")
CHUNK_BYTES = 16_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="builtin", help="text: anything that `drumline prepare` takes")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--vocab_size", type=int, default=32768)
    parser.add_argument("--measure", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.source, options.folder)))
        return
    header()
    print(f"load      {os.getloadavg()[0]:.1f}, tokenizers {version('tokenizers')}")
    with tempfile.TemporaryDirectory() as folder:
        first = first_texts(options.source)
        Tokenizer.train(first, vocab_size=options.vocab_size).save(Path(folder, "tokenizer.json"))
        del first
        compare(options.source, repetitions=options.repetitions, folder=Path(folder))


def compare(source: str, *, repetitions: int, folder: Path) -> None:
    """Measure every kind in turn and print a line for each, with its ratio to `encode_batch`."""
    speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cpu_s_per_mb: dict[str, list[float]] = {kind: [] for kind in KINDS}
    peak_bytes = text_bytes = 0
    for repetition in range(repetitions):
        for kind in KINDS:
            command = [sys.executable, __file__, "--measure", kind, "--source", source, "--folder", str(folder)]
            measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            text_bytes = measured["text_bytes"]
            speeds[kind].append(text_bytes / 1e6 / measured["seconds"])
            cpu_s_per_mb[kind].append(measured["cpu_seconds"] / (text_bytes / 1e6))
            print(f"  {repetition + 1}/{repetitions} {kind:18} {speeds[kind][-1]:6.2f} MB/s", flush=True)
            if kind == "prepare":
                peak_bytes = max(peak_bytes, measured["peak_bytes"])
    print(f"{source}: {text_bytes / 1e6:.1f} MB of text; median of {repetitions}:")
    bare = statistics.median(speeds["encode_batch"])
    for kind in KINDS:
        median = statistics.median(speeds[kind])
        cpu_s = statistics.median(cpu_s_per_mb[kind])
        print(f"  {kind:18} {median:6.2f} MB/s  {median / bare:5.2f} x encode_batch  {cpu_s:.3f} CPU s/MB")
    print(f"  peak memory of prepare: {peak_bytes / 1e6:.0f} MB")


def measure(kind: str, source: str, folder: Path) -> dict[str, float]:
    """Seconds and bytes of one pass over the text."""
    tokenizer = folder / "tokenizer.json"
    if kind == "prepare":
        before = time.process_time()
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = prepare(source, Path(scratch, "tokens"), tokenizer=tokenizer)
        cpu_seconds = time.process_time() - before
        return {
            "seconds": made.seconds,
            "cpu_seconds": cpu_seconds,
            "text_bytes": made.text_bytes,
            "peak_bytes": peak_memory_bytes(),
        }
    import tokenizers

    encode = getattr(tokenizers.Tokenizer.from_file(str(tokenizer)), kind)
    seconds = cpu_seconds = text_bytes = 0.0
    for texts in chunks(source):
        text_bytes += sum(len(text.encode()) for text in texts)
        started, before = time.perf_counter(), time.process_time()
        encode(texts)
        seconds += time.perf_counter() - started
        cpu_seconds += time.process_time() - before
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "text_bytes": text_bytes}


def chunks(source: str) -> Iterator[list[str]]:
    """The source's texts, CHUNK_BYTES or so at a time."""
    texts: list[str] = []
    size = 0
    for document in documents(source):
        texts.append(document.text)
        size += len(document.text)
        if size >= CHUNK_BYTES:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


def first_texts(source: str) -> list[str]:
    return next(chunks(source))


def peak_memory_bytes() -> int:
    """The most that was resident; not `ru_maxrss`, in which Linux counts the process that started this one."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
