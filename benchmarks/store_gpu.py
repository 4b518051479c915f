"""How much of its time a GPU would wait for windows of tokens in an object store, at the rate of a GPU.

    python benchmarks/store_gpu.py                           # one H200: 769,532 tokens/s
    python benchmarks/store_gpu.py --ranks 8 --context 8192  # eight of them on one host

No GPU is needed: what stands in for the step only waits until the tokens of a micro-batch would be computed. All else
is what `drumline train` does: the folder is opened by its URL, and each rank takes its micro-batches from what is made
ahead. A rank is a process; all read from one server by S3's protocol, which answers each request after 50 ms and sends
200 MB/s in all. The tokens are 100 GB of zeros, so nothing is read twice. That server is a few lines of its own: moto's
copies the whole object for every range of it that is read. `store_tokens.py` trains from moto's.

`wait` is the share of the time from the 21st micro-batch on in which a rank has no batch; `processor` is the cores that
all ranks take meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from header import header

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.sparse import sparse_folder

SKIPPED = 20
"""Micro-batches of each rank that are not measured."""
BUCKET = "/bucket/tokens/"


class Answers(asyncio.Protocol):
    """HEAD and GET, with ranges, of the files of a folder; one large file is zeros and lies nowhere."""

    free_at = 0.0
    bytes_sent = requests = 0

    def __init__(self, sizes: dict[str, int], contents: dict[str, bytes], *, delay_s: float, rate: float) -> None:
        self.sizes, self.contents, self.delay_s, self.rate = sizes, contents, delay_s, rate
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        while b"\r\n\r\n" in self.received:  # requests have no bodies
            request, _, self.received = self.received.partition(b"\r\n\r\n")
            asyncio.get_running_loop().call_later(self.delay_s, self.answer, request.decode())

    def answer(self, request: str) -> None:
        method, path, _ = request.partition("\r\n")[0].split(" ")
        name = path.removeprefix(BUCKET)
        size = self.sizes.get(name)
        if size is None:
            self.transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        start, stop, head = 0, size, "200 OK"
        for line in request.lower().split("\r\n"):
            if line.startswith("range: bytes="):
                first, last = line.removeprefix("range: bytes=").split("-")
                start, stop = int(first), min(size, int(last) + 1)
                head = f"206 Partial Content\r\nContent-Range: bytes {start}-{stop - 1}/{size}"
        about = 'ETag: "1"\r\nLast-Modified: Thu, 19 Nov 2026 10:00:00 GMT\r\nContent-Length:'
        content = b""
        if method == "GET":
            content = self.contents[name][start:stop] if name in self.contents else bytes(stop - start)
        loop, kind = asyncio.get_running_loop(), Answers
        kind.free_at = max(kind.free_at, loop.time()) + len(content) / self.rate
        kind.bytes_sent += len(content)
        kind.requests += 1
        answer = f"HTTP/1.1 {head}\r\n{about} {stop - start}\r\n\r\n".encode() + content
        loop.call_later(kind.free_at - loop.time(), self.transport.write, answer)


def serve(folder: Path, ports: Any, told: Any) -> None:
    """Until told to stop; then tells bytes, requests and seconds of processor time."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    contents = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "train.bin"}

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Answers(sizes, contents, delay_s=0.05, rate=200e6), "127.0.0.1", 0)
        ports.put(server.sockets[0].getsockname()[1])
        await asyncio.to_thread(told.get)

    asyncio.run(run())
    ports.put(Answers.bytes_sent)
    ports.put(Answers.requests)
    ports.put(round(time.process_time() * 1000))


def consume(given: argparse.Namespace) -> None:
    """One rank: prints its seconds of waiting, all of its seconds, and those of processor time."""
    import torch

    from drumline.config import DataConfig
    from drumline.data import BatchPlan, TokenBatches, open_tokens
    from drumline.stores import mirrored, read_ahead

    torch.set_num_threads(1)
    data = DataConfig(train_data_path="s3://bucket/tokens", data_dir=str(given.consume), cache_gb=given.cache_gb)
    tokens = open_tokens(mirrored(data).train_data_path)
    plan = BatchPlan(given.batch_size, given.ranks)
    steps = round(given.seconds * given.rate / (given.batch_size * given.context)) + SKIPPED
    batches = read_ahead(TokenBatches, total_steps=steps)(tokens, plan, context=given.context, seed=0)
    (index,) = plan.share(given.rank, given.ranks)
    step_s = given.batch_size * given.context / given.rate
    waited_s = began = before_s = 0.0
    for step in range(steps):
        if step == SKIPPED:
            began, waited_s, before_s = time.perf_counter(), 0.0, time.process_time()
        asked = time.perf_counter()
        batches.micro_batch(step, index)
        got = time.perf_counter()
        waited_s += got - asked
        time.sleep(step_s)
    print(json.dumps([waited_s, time.perf_counter() - began, time.process_time() - before_s]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=769_532.0, help="tokens/s of each rank")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--cache_gb", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=50_000_000_000)
    parser.add_argument("--consume", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.consume:
        consume(given)
        return
    header()
    print(f"load      {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as name:
        measure(given, Path(name))


def measure(given: argparse.Namespace, folder: Path) -> None:
    sparse = sparse_folder(folder / "tokens", tokens=given.tokens, documents=1000)
    ports, told = multiprocessing.SimpleQueue(), multiprocessing.SimpleQueue()
    server = multiprocessing.Process(target=serve, args=(sparse, ports, told), daemon=True)
    server.start()
    environ = {
        **os.environ,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports.get()}",
        "AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST",
        "AWS_SECRET_ACCESS_KEY": "a-key-of-nobody",
        "AWS_REGION": "us-east-1",
        "OMP_NUM_THREADS": "1",
        "LOCAL_WORLD_SIZE": str(given.ranks),
    }
    words = [sys.executable, __file__, *sys.argv[1:], "--consume", str(folder / "data")]
    ranks = [
        subprocess.Popen([*words, "--rank", str(rank)], env=environ, stdout=subprocess.PIPE, text=True)
        for rank in range(given.ranks)
    ]
    found = [json.loads(rank.communicate()[0]) for rank in ranks]
    told.put([])
    sent, requests, server_ms = ports.get(), ports.get(), ports.get()
    server.join()
    seconds = max(each[1] for each in found)
    asked = given.rate * given.ranks
    done = (
        given.batch_size
        * given.context
        * given.ranks
        * round(given.seconds * given.rate / (given.batch_size * given.context))
    )
    print(f"{given.ranks} ranks, windows of {given.context:,} tokens, micro-batches of {given.batch_size}")
    print(f"asked for  {asked:,.0f} tokens/s, {asked / given.context:,.0f} windows/s")
    print(f"got        {done / seconds:,.0f} tokens/s in {seconds:.1f} s")
    print(f"wait       {max(each[0] / each[1] for each in found):.2%} of the rank that waits most")
    print(f"wire       {sent / 1e6:,.0f} MB in {requests:,} requests, {sent / (2 * done):.1f} bytes for one of a token")
    cores = sum(each[2] for each in found) / seconds
    print(f"processor  {cores:.2f} cores, and the server {server_ms / 1000 / seconds:.2f}")


if __name__ == "__main__":
    main()
