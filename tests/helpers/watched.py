"""Run folders as training writes them, without training, and a page of them that is served."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

BEGIN = 1_790_000_000.0
"""The first second of every run."""


def iso(seconds: float) -> str:
    """A time as events have it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def append(path: Path, *records: dict[str, Any]) -> None:
    """Lines of JSON at the end of a file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def step_record(step: int, *, loss: float | None = None, spread: float = 0.05, seed: int = 0) -> dict[str, Any]:
    """A record of metrics.jsonl."""
    noise = random.Random(seed * 1_000_003 + step)
    usual = 2.2 + 5.5 * math.exp(-step / 400) + noise.gauss(0, spread)
    return {
        "step": step,
        "loss": usual if loss is None else loss,
        "lr": 0.002 * min(1.0, step / 200) * (0.55 + 0.45 * math.cos(min(1.0, step / 4000) * math.pi)),
        "grad_norm": 0.4 + abs(noise.gauss(0, 0.06)),
        "tokens_per_s": 182_000 + noise.gauss(0, 2_500),
        "mfu": 0.412 + noise.gauss(0, 0.006),
        "epoch": step / 3000,
        "eta_s": max(0.0, (4000 - step) * 0.36),
        "peak_memory_bytes": 61 * 2**30,
        "time": BEGIN + 30 + step * 0.36,
        "tokens": step * 65_536,
        "fingerprint": f"{step:016x}",
    }


def make_run(
    folder: Path,
    *,
    steps: int = 1000,
    every: int = 10,
    ranks: int = 2,
    hosts: Sequence[str] = ("node-a", "node-b"),
    slow: int | None = None,
    seed: int = 0,
    state: str = "finished",
    lr: float = 0.002,
) -> Path:
    """A run of some steps with evaluations, samples, saves, and a restart in the middle."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        f'[model]\npreset = "small"\ncontext = 1024\n\n[batch]\nglobal_batch_size = 64\ntotal_steps = {steps}\n\n'
        f"[optim]\nlr = {lr}\n\n[run]\nseed = {seed}\n"
    )
    status = {"state": state, "step": steps, "total_steps": steps, "host": "elsewhere", "pid": 1, "updated": iso(BEGIN)}
    (folder / "status.json").write_text(json.dumps(status))
    records = []
    for step in range(every, steps + 1, every):
        records.append(step_record(step, seed=seed))
        if step % (every * 10) == 0:
            evaluation = {
                "step": step,
                "valid_loss": 2.4 + 5.4 * math.exp(-step / 400),
                "bits_per_byte": 0.9,
                "eval_s": 1,
            }
            records.append(evaluation | {"time": records[-1]["time"]})
            text = "the quick brown fox\n    return self.jumps(over=dog)  # at last"
            append(folder / "samples.jsonl", {"step": step, "time": BEGIN + step, "prompt": "def ", "text": text})
    append(folder / "metrics.jsonl", *records)
    names = [hosts[rank * len(hosts) // ranks] for rank in range(ranks)]
    middle = steps // 2
    versions = {"drumline": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}
    started = {
        "event": "started",
        "world_size": ranks,
        "hosts": names,
        "device": "cuda",
        "versions": versions,
        "pid": 1,
    }
    cause = {"host": names[-1], "rank": ranks - 1, "pid": 7, "step": middle + 6, "kind": "signal", "what": "SIGKILL"}
    fault = {"event": "restart", "attempt": 2, "cause": {**cause, "trace": "Traceback: in step"}, "world_size": ranks}
    at = BEGIN + 30 + middle * 0.36
    append(
        folder / "events.jsonl",
        {**started, "step": 0, "time": iso(BEGIN)},
        *(
            {
                "event": "snapshot",
                "step": step,
                "bytes": 1 << 30,
                "stall_s": 0.004,
                "time": iso(BEGIN + 30 + step * 0.36),
            }
            for step in range(50, middle, 50)
        ),
        {**fault, "time": iso(at + 5), "stacks": "rank 1:\n  in all_reduce"},
        {**started, "step": middle, "time": iso(at + 8)},
        {"event": "resumed", "step": middle, "world_size": ranks, "from": "snapshot", "time": iso(at + 9)},
        {"event": "saved", "step": steps, "bytes": 3 << 30, "stall_s": 0.05, "time": iso(BEGIN + 30 + steps * 0.36)},
        {"event": "finished", "step": steps, "time": iso(BEGIN + 31 + steps * 0.36)},
    )
    append(folder / "ranks.jsonl", *(ranks_record(step, ranks, slow) for step in range(every, steps + 1, every)))
    return folder


def ranks_record(step: int, ranks: int, slow: int | None) -> dict[str, Any]:
    """A record of ranks.jsonl, in which one rank may be slow, and the others wait for it."""
    noise = random.Random(step)
    shares = {"data": 0.01, "forward": 0.09, "backward": 0.18, "optimizer": 0.03, "save": 0.002, "other": 0.005}
    seconds: dict[str, list[float]] = {
        name: [share * noise.uniform(0.96, 1.04) * (1.7 if rank == slow else 1) for rank in range(ranks)]
        for name, share in shares.items()
    }
    own = [sum(values) for values in zip(*seconds.values(), strict=True)]
    seconds["wait"] = [max(own) - each + 0.02 for each in own]
    order = ["data", "forward", "backward", "wait", "optimizer", "save", "other"]
    rounded = {name: [round(value, 5) for value in seconds[name]] for name in order}
    return {"step": step, "time": BEGIN + 30 + step * 0.36, "steps": 10, "seconds": rounded}


@dataclass
class Watch:
    """A `drumline watch` that serves."""

    process: subprocess.Popen[str]
    url: str

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    def ask(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    def json(self, path: str) -> Any:
        status, _, body = self.ask(path)
        assert status == 200, body
        return json.loads(body)
