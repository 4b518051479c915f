"""How fast `prepare` is, against the tokenizers library alone with the same tokenizer and cores.

    python benchmarks/prepare_throughput.py [--source builtin] [--repetitions 3] [--vocab_size 32768] [--bare_mb 16]

Each measurement has a process of its own, and the kinds take turns. `encode_batch` and `encode_batch_fast` get
documents in memory, the first `bare_mb` MB, and their result is thrown away; `prepare` reads, unpacks, encodes, checks,
hashes and writes all of the source. CPU time is that of all threads: on a machine with other work it says
more than the clock. Peak memory is that of the preparing process.
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
from importlib.metadata import version
from pathlib import Path

from header import header

from drumline.data import Corpus, Recipe, Tokenizer, documents, prepare

KINDS = ("encode_batch", "encode_batch_fast", "prepare")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="builtin", help="text: anything that `drumline prepare` takes")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--vocab_size", type=int, default=32768)
    parser.add_argument("--bare_mb", type=int, default=16, help="text for the library alone, which is slower")
    parser.add_argument("--measure", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.source, options.folder, most_bytes=options.bare_mb * 10**6)))
        return
    header()
    versions = ", ".join(f"{name} {version(name)}" for name in ("tokenizers", "gigatoken"))
    print(f"load      {os.getloadavg()[0]:.1f}, {versions}")
    with tempfile.TemporaryDirectory() as folder:
        first = first_texts(options.source, most_bytes=16 * 10**6)
        Tokenizer.train(first, vocab_size=options.vocab_size).save(Path(folder, "tokenizer.json"))
        compare(options.source, repetitions=options.repetitions, folder=Path(folder), bare_mb=options.bare_mb)


def compare(source: str, *, repetitions: int, folder: Path, bare_mb: int) -> None:
    """Measure every kind in turn and print a line for each, with its ratio to `encode_batch`."""
    speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cpu_s_per_mb: dict[str, list[float]] = {kind: [] for kind in KINDS}
    peak_bytes, text_bytes = 0, 0.0
    for repetition in range(repetitions):
        for kind in KINDS:
            command = [sys.executable, __file__, "--measure", kind, "--source", source, "--folder", str(folder)]
            command += ["--bare_mb", str(bare_mb)]
            measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            text_bytes = measured["text_bytes"]
            speeds[kind].append(text_bytes / 1e6 / measured["seconds"])
            cpu_s_per_mb[kind].append(measured["cpu_seconds"] / (text_bytes / 1e6))
            print(f"  {repetition + 1}/{repetitions} {kind:18} {speeds[kind][-1]:6.2f} MB/s", flush=True)
            if kind == "prepare":
                peak_bytes = max(peak_bytes, measured["peak_bytes"])
    print(f"{source}: {text_bytes / 1e6:.1f} MB of text; median of {repetitions}:")
    bare, bare_cpu_s = statistics.median(speeds["encode_batch"]), statistics.median(cpu_s_per_mb["encode_batch"])
    for kind in KINDS:
        median = statistics.median(speeds[kind])
        cpu_s = statistics.median(cpu_s_per_mb[kind])
        print(
            f"  {kind:18} {median:6.2f} MB/s, {median / bare:5.1f}x  {cpu_s:.4f} CPU s/MB, {bare_cpu_s / cpu_s:5.1f}x"
        )
    print(f"  peak memory of prepare: {peak_bytes / 1e6:.0f} MB")


def measure(kind: str, source: str, folder: Path, *, most_bytes: int) -> dict[str, float]:
    """Seconds and bytes of one pass over the text."""
    tokenizer = folder / "tokenizer.json"
    if kind == "prepare":
        before = time.process_time()
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = prepare(Recipe(Corpus(source), Tokenizer.load(tokenizer)), Path(scratch, "tokens"))
        if made.skipped.note:
            print(made.skipped.note.removeprefix("; "), file=sys.stderr)
        return {
            "seconds": made.seconds,
            "cpu_seconds": time.process_time() - before,
            "text_bytes": sum(split.text_bytes for split in made.manifest.splits.values()),
            "peak_bytes": peak_memory_bytes(),
        }
    import tokenizers

    encode = getattr(tokenizers.Tokenizer.from_file(str(tokenizer)), kind)
    texts = first_texts(source, most_bytes=most_bytes)
    started, before = time.perf_counter(), time.process_time()
    encode(texts)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - before
    text_bytes = sum(len(text.encode()) for text in texts)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "text_bytes": text_bytes}


def first_texts(source: str, *, most_bytes: int) -> list[str]:
    """Documents from the beginning of the source, of about `most_bytes` together."""
    texts: list[str] = []
    for document in documents(source):
        texts.append(document.text)
        most_bytes -= len(document.text)
        if most_bytes <= 0:
            break
    return texts


def peak_memory_bytes() -> int:
    """The most that was resident; not `ru_maxrss`, in which Linux counts the process that started this one."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
