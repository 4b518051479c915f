"""obstore, which drumline uses, against fsspec's s3fs: ranges of an object from a server behind 50 ms and 200 MB/s.

    python benchmarks/store_clients.py --s3fs PYTHON   # an interpreter that has s3fs; drumline does not need it

Both read the same ranges of 16 KiB, in turns: all of them asked for by as many threads as drumline has for that
(obstore, whose calls wait in Rust), or by one call of `cat_ranges` (s3fs, an event loop of Python's own). What counts
is ranges per second and the processor time of the process that reads: it is taken from training.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZE, PART = 100_000_000_000, 1 << 14
THREADS = 64
"""As stores/working.py has."""


def by_obstore(starts: list[int]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import obstore
    from obstore.store import S3Store

    url, options = os.environ["AWS_ENDPOINT_URL"], {"allow_http": True}
    store = S3Store("bucket", prefix="tokens", endpoint=url, client_options=options)

    def one(start: int) -> bytes:
        return bytes(obstore.get_range(store, "train.bin", start=start, end=start + PART))

    with ThreadPoolExecutor(THREADS) as threads:
        parts = list(threads.map(one, starts))
    assert all(len(part) == PART for part in parts)


def by_s3fs(starts: list[int]) -> None:
    import s3fs  # type: ignore[import-not-found]

    files = s3fs.S3FileSystem(config_kwargs={"max_pool_connections": THREADS}, skip_instance_cache=True)
    paths = ["bucket/tokens/train.bin"] * len(starts)
    parts = files.cat_ranges(paths, starts, [at + PART for at in starts], batch_size=THREADS)
    assert all(len(part) == PART for part in parts)


def read(client: str, count: int) -> None:
    """Prints seconds and seconds of processor time."""
    draw = random.Random(count)
    ways = {"obstore": by_obstore, "s3fs": by_s3fs}
    ways[client]([draw.randrange(SIZE // PART) * PART for _ in range(100)])  # modules, connections
    starts = [draw.randrange(SIZE // PART) * PART for _ in range(count)]
    began, before = time.perf_counter(), time.process_time()
    ways[client](starts)
    print(json.dumps([time.perf_counter() - began, time.process_time() - before]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--s3fs", metavar="PYTHON", help="an interpreter that has s3fs")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        read(given.client, given.count)
        return
    from header import header  # the other interpreter has neither torch nor drumline
    from store_gpu import serve

    header()
    with tempfile.TemporaryDirectory() as name:
        with Path(name, "train.bin").open("wb") as file:
            file.truncate(SIZE)
        ports, told = multiprocessing.SimpleQueue(), multiprocessing.SimpleQueue()
        server = multiprocessing.Process(target=serve, args=(Path(name), ports, told), daemon=True)
        server.start()
        keys = {"AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST", "AWS_SECRET_ACCESS_KEY": "a-key-of-nobody"}
        place = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports.get()}", "AWS_REGION": "us-east-1"}
        environ = {**os.environ, **keys, **place}
        clients = {"obstore": sys.executable, **({"s3fs": given.s3fs} if given.s3fs else {})}
        for _ in range(given.rounds):
            for client, python in clients.items():
                words = [python, __file__, "--client", client, "--count", str(given.count)]
                done = subprocess.run(words, env=environ, check=True, capture_output=True, text=True)
                seconds, processor_s = json.loads(done.stdout)
                rate = given.count / seconds
                used = processor_s / given.count * 1e6
                speed = f"{rate:,.0f} ranges/s, {rate * PART / 1e6:.0f} MB/s"
                print(f"{client:8s} {speed}, {used:.0f} us of processor each", flush=True)
        told.put([])


if __name__ == "__main__":
    main()
