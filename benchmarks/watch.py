"""The page of runs: time until it answers, until it has the first curves, and memory, with many records and pages.

    python benchmarks/watch.py [--records 1000000] [--pages 100]

Writes a run folder as training would, starts `drumline watch`, and keeps pages open as a browser does (server-sent
events) while records are appended. Memory is the resident size of the server's process.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
from header import header

SPIKE = 42.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--pages", type=int, default=100)
    options = parser.parse_args()
    header()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        write_run(run, options.records)
        size = (run / "metrics.jsonl").stat().st_size
        print(f"{options.records:,} records, {size / 1e6:.0f} MB of metrics.jsonl")
        began = time.perf_counter()
        words = [sys.executable, "-m", "drumline", "watch", str(run), "--port", "0"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout
            port = int(process.stdout.readline().rstrip().rpartition(":")[2])
            print(f"page served after       {time.perf_counter() - began:6.2f} s")
            measure(run, process.pid, port, began, options)
        finally:
            process.terminate()
            process.wait()


def measure(run: Path, pid: int, port: int, began: float, options: argparse.Namespace) -> None:
    found, _ = curves(port)
    print(f"first curves after      {time.perf_counter() - began:6.2f} s ({len(found['curves']['loss']['x'])} points)")
    with ExitStack() as ends:
        pages = [opened(ends, port, found["at"]) for _ in range(options.pages)]
        while found["left_bytes"]:
            time.sleep(0.2)
            found, took = curves(port)
        print(f"all records read after  {time.perf_counter() - began:6.2f} s")
        print(f"curves of all records   {1000 * took:6.0f} ms, {answer_bytes(port) / 1e3:.0f} kB")
        _, took = curves(port, f"&low={options.records // 3}&high={options.records // 2}")
        print(f"a part, zoomed          {1000 * took:6.0f} ms")
        assert max(found["curves"]["loss"]["y"]) == SPIKE, "the spike is not visible"
        last = options.records + 1
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record(last)) + "\n")
        written = time.perf_counter()
        for page in pages:
            while f'"x":[{last}.0]'.encode() not in page.readline():
                pass
        print(f"a new record on {options.pages} pages {time.perf_counter() - written:6.2f} s after it was written")
        print(f"memory                  {psutil.Process(pid).memory_info().rss / 1e6:6.0f} MB")


def opened(ends: ExitStack, port: int, at: list[int]) -> http.client.HTTPResponse:
    connection = ends.enter_context(closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)))
    connection.request("GET", f"/api/stream?run=run&at={','.join(map(str, at))}")
    return connection.getresponse()


def ask(port: int, path: str) -> bytes:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request("GET", path)
        return connection.getresponse().read()


def answer_bytes(port: int) -> int:
    return len(ask(port, "/api/curves?run=run"))


def curves(port: int, more: str = "") -> tuple[dict[str, Any], float]:
    began = time.perf_counter()
    answer = ask(port, f"/api/curves?run=run{more}")
    return json.loads(answer), time.perf_counter() - began


def record(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "loss": SPIKE if step == 123_457 else 2.0 + (step * 7919 % 1000) / 1e4,
        "lr": 0.001234567,
        "grad_norm": 0.4123456 + step % 7 / 100,
        "tokens_per_s": 182_345.678 + step % 11,
        "epoch": step / 1e5,
        "eta_s": 1234.5,
        "peak_memory_bytes": 61 << 30,
        "mfu": 0.41234,
        "time": 1_790_000_000.123 + step * 0.36,
        "tokens": step * 65_536,
        "fingerprint": f"{step * 2654435761 % (1 << 64):016x}",
    }


def write_run(run: Path, records: int) -> None:
    run.mkdir()
    (run / "config.toml").write_text('[model]\npreset = "small"\n')
    (run / "status.json").write_text(json.dumps({"state": "running", "step": records, "total_steps": records}))
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(record(step)) + "\n" for step in range(1, records + 1))


if __name__ == "__main__":
    main()
