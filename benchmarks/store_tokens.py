"""How long the steps of a run wait for data that are in an object store, against data on a disk.

    python benchmarks/store_tokens.py --moto .venv/bin/moto_server    # which comes with the packages for tests
    python benchmarks/store_tokens.py                                 # the other server of the tests instead

A real S3 server on this machine, and between it and the run a proxy that answers after 50 ms, breaks one answer in 50
in its middle, and lets through 200 MB/s in all. `drumline train` on a CPU, with a model so small that it takes as many
windows a second as this machine can: each is read with the 64 KiB that have a hash, so the bytes on the wire are many
more than those of its tokens. `wait` is the share of the steps' time in the phase `data`, without the first steps. The
runs, one after the other: from local files, from the store with an empty cache, with the one that this left, and with
none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path

from header import header

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.large_tokens import large_folder
from helpers.object_store import ObjectStore

SKIPPED = 20
"""Steps that are not measured."""


class Proxy:
    """Between the run and its server: slow to answer, limited, and lossy."""

    def __init__(self, server: int, *, delay_s: float, loss: float, bytes_per_s: float) -> None:
        self.server, self.delay_s, self.loss, self.bytes_per_s = server, delay_s, loss, bytes_per_s
        self.bytes_sent, self.lost, self.free_at = 0, 0, 0.0
        self.loop, started = asyncio.new_event_loop(), threading.Event()
        self.port = 0

        def run() -> None:
            asyncio.set_event_loop(self.loop)
            listening = self.loop.run_until_complete(asyncio.start_server(self.handle, "127.0.0.1", 0))
            self.port = listening.sockets[0].getsockname()[1]
            started.set()
            self.loop.run_forever()

        threading.Thread(target=run, daemon=True).start()
        started.wait()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            there, back = await asyncio.open_connection("127.0.0.1", self.server)
            await asyncio.gather(self.ask(reader, back), self.answer(there, writer, back))
        writer.close()

    async def ask(self, reader: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        while content := await reader.read(1 << 16):
            await asyncio.sleep(self.delay_s)  # a request is small: this is once per request
            back.write(content)
            await back.drain()
        back.close()

    async def answer(
        self, there: asyncio.StreamReader, writer: asyncio.StreamWriter, back: asyncio.StreamWriter
    ) -> None:
        while content := await there.read(1 << 18):
            now = time.monotonic()
            self.free_at = max(self.free_at, now) + len(content) / self.bytes_per_s
            await asyncio.sleep(max(0.0, self.free_at - now))
            if len(content) > 2048 and random.random() < self.loss:
                self.lost += 1
                writer.write(content[:1000])
                writer.transport.abort()
                back.close()
                return
            self.bytes_sent += len(content)
            writer.write(content)
            await writer.drain()


def moto(stack: ExitStack, program: str) -> int:
    """Start moto's server; its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = subprocess.Popen(
        [program, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    stack.callback(server.terminate)
    for _ in range(200):
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/").read()
            return port
        time.sleep(0.1)
    raise SystemExit(f"{program} does not start")


def put(port: int, folder: Path) -> None:
    """A bucket with the folder in it, past the proxy."""
    os.environ.update(AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}", AWS_REGION="us-east-1")
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "AKIATESTTESTTEST")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "a-key-of-nobody")
    bucket = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
    bucket.add_header(
        "Authorization", "AWS4-HMAC-SHA256 Credential=AKIATESTTESTTEST/20261118/us-east-1/s3/aws4_request"
    )
    urllib.request.urlopen(bucket).read()
    from drumline.stores import open_store

    store = open_store("s3://bucket/tokens")
    for path in folder.iterdir():
        store.put(path.name, path)


def train(folder: Path, name: str, source: str, proxy: Proxy, flags: str) -> None:
    run, sent, lost = folder / name.replace(" ", "-").replace(",", ""), proxy.bytes_sent, proxy.lost
    environ = {**os.environ, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "OMP_NUM_THREADS": "1"}
    words = f"{sys.executable} -m drumline train --train_data_path {source} --run_dir {run} {flags}"
    began = time.perf_counter()
    done = subprocess.run(words.split(), env=environ, capture_output=True, text=True, cwd=folder, check=False)
    took = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    lanes = [json.loads(line) for line in (run / "ranks.jsonl").read_text().splitlines()]
    sums: dict[str, float] = {}
    for each in lanes:
        if each["step"] > SKIPPED:
            sums = {phase: sums.get(phase, 0.0) + seconds[0] for phase, seconds in each["seconds"].items()}
    rates = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speeds = [each["tokens_per_s"] for each in rates if "tokens_per_s" in each and each["step"] > SKIPPED]
    speed, wait = sum(speeds) / len(speeds), sums["data"] / sum(sums.values())
    sha256 = json.loads((run / "status.json").read_text())["weights_sha256"][:12]
    print(
        f"| {name} | {speed:,.0f} | {wait:.2%} | {(proxy.bytes_sent - sent) / 1e6:,.1f} MB in {took:.0f} s "
        f"| {proxy.lost - lost} | {sha256} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moto", help="moto_server, of moto[server]")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=60_000_000)
    parser.add_argument("--context", type=int, default=256)
    given = parser.parse_args()
    header()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        local = large_folder(folder / "tokens", tokens=given.tokens)
        port = moto(stack, given.moto) if given.moto else stack.enter_context(ObjectStore()).port
        proxy = Proxy(port, delay_s=0.05, loss=0.02, bytes_per_s=200e6)
        put(port, local)
        flags = (
            f"--n_layers 1 --n_heads 2 --d_model 32 --d_ff 64 --context {given.context} --total_steps {given.steps} "
            f"--batch_size {given.batch_size} --log_every 1 --eval_every 1000000 --save_every 1000000 --device cpu "
            "--bitwise"
        )
        print("| data | tokens/s | wait | over the wire | connections broken | weights |\n" + "| --- " * 6 + "|")
        train(folder, "local files", str(local), proxy, flags)
        train(folder, "store, empty cache", "s3://bucket/tokens", proxy, flags)
        train(folder, "store, filled cache", "s3://bucket/tokens", proxy, flags)
        shutil.rmtree(folder / "data", ignore_errors=True)
        train(folder, "store, no cache", "s3://bucket/tokens", proxy, f"{flags} --cache_gb 0")


if __name__ == "__main__":
    main()
