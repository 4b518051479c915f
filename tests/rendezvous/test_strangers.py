"""A run on two hosts, and a third host on the same network that knows nothing but where the others listen."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from helpers.elastic_hosts import TIMEOUT_S, step, wait
from helpers.hosts import Host, hosts_on_a_switch
from helpers.small import small
from torch._C._distributed_c10d import TCPStore

from drumline.files.run_folder import RunFolder
from drumline.network import new_secret
from drumline.network.wire import MAC_BYTES, MAGIC, NONCE_BYTES, Channel
from drumline.rendezvous.leader import Lease
from drumline.report.records import read_metrics

pytestmark = [pytest.mark.needs("hosts"), pytest.mark.needs_shm]

Where = tuple[str, int]

STEPS = 60
# Slow while it is attacked, and not done before.
PACED = f"""
import os, time
from drumline.model.gpt import GPT as Real

class GPT(Real):
    calls = 0

    def forward(self, *args, **how):
        GPT.calls += 1
        while not os.path.exists("attacked") and GPT.calls > {STEPS - 20}:
            time.sleep(0.02)
        if not os.path.exists("attacked"):
            time.sleep(0.02)
        return super().forward(*args, **how)
"""
VALIDATE = struct.pack("<BI", 0, 0x3C85F7CE)
"""How a client of torch's store begins."""
SET, ADD, WAIT, COUNT = 1, 4, 6, 7


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with hosts_on_a_switch(tmp_path, 3) as three:
        yield three


class Touch:
    """Unpickled, it runs a command."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._path}",)


def tell(where: Where, said: bytes) -> None:
    """Say something, and hang up a little later."""
    with socket.create_connection(where, timeout=TIMEOUT_S) as connection, contextlib.suppress(OSError):
        connection.sendall(said)
        connection.settimeout(0.1)
        while connection.recv(1 << 12):
            pass


def attack(rendezvous: Where, store: Where, mark: Path, recording: bytes) -> list[str]:
    """All that a stranger can send, on his own host; returns what went better than it should."""
    hello, torchs = MAGIC + bytes(NONCE_BYTES), [struct.pack("<BQ", query, 1 << 62) for query in (SET, ADD, WAIT)]
    poison = pickle.dumps(Touch(mark))
    foreign = Channel(b"another secret of the same length", serves=False)
    foreign._write_key = foreign._read_key = b"k"
    foreign.write({"say": "join", "node": "x", "turn": 1, "ranks": 1, "address": "10.77.0.3"})
    said = [
        *(os.urandom(20_000), bytes(20_000), b"GET / HTTP/1.1\r\n\r\n", poison),
        *(hello + struct.pack("!I", 0xFFFFFFFF) + bytes(1000), hello + struct.pack("!I", 4000) + bytes(MAC_BYTES)),
        *(hello + struct.pack("!I", len(poison)) + bytes(MAC_BYTES) + poison, bytes(foreign.output), recording),
        *(VALIDATE + huge + bytes(20_000) for huge in torchs),
    ]
    for each in said:
        tell(rendezvous, each)
        tell(store, each)
    better = []
    try:  # torch's own rendezvous kept a pickle under this key
        client = TCPStore(*rendezvous, is_master=False, timeout=timedelta(seconds=1))
        client.set("torch.rendezvous.drumline", pickle.dumps(Touch(mark)))
        client.delete_key("torch.rendezvous.drumline")
        better.append("the rendezvous answers like a store of torch")
    except RuntimeError:
        pass
    with contextlib.ExitStack() as held:
        for _ in range(200):
            for where in (rendezvous, store):
                held.enter_context(socket.create_connection(where, timeout=TIMEOUT_S))
        for where in (rendezvous, store):
            tell(where, os.urandom(1000))
    return better


def record(rendezvous: Where, secret: bytes) -> bytes:
    """All that a host of the run says on a connection: it shows that it knows the secret, and that it is alive."""
    sent, channel = b"", Channel(secret, serves=False)
    with socket.create_connection(rendezvous, timeout=TIMEOUT_S) as connection:
        while not sent.endswith(b'"beat"}'):
            if channel.is_trusted:
                channel.write({"say": "beat"})
            sent += channel.output
            connection.sendall(channel.output)
            channel.output.clear()
            channel.feed(connection.recv(1 << 12))
    return sent


def listening(host: Host) -> list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    """Where something on a host listens."""
    read = ["ip", "netns", "exec", host.namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
    lines = subprocess.run(read, capture_output=True, text=True, check=True).stdout.splitlines()
    places = []
    for words in map(str.split, lines):
        if words[3] == "0A":
            address, port = words[1].split(":")
            raw = b"".join(struct.pack("=I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8))
            places.append((ipaddress.ip_address(raw), int(port, 16)))
    return places


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


def flags(text: Path, run: Path) -> Sequence[str]:
    more = ("--global_batch_size", "4", "--total_steps", str(STEPS), "--model", "paced:GPT", "--run_dir", str(run))
    return small("--train_data_path", str(text), "--batch_size", "2", "--check_replicas_every", "1", *more)


def test_nothing_that_a_stranger_sends_runs_code_ends_a_run_or_changes_its_result(
    hosts: list[Host], text: Path, tmp_path: Path, train: Callable[..., int]
) -> None:
    (tmp_path / "paced.py").write_text(PACED)
    *ours, stranger = hosts
    run = tmp_path / "run"
    command = [sys.executable, "-m", "drumline", "train", *flags(text, run), "--nproc", "1", "--nnodes", "2"]
    both = [host.start(command, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"}) for host in ours]
    wait(lambda: step(run) > 5, "5 steps", *both)
    point = Lease(RunFolder(run).leader).newest()
    assert point is not None
    rendezvous = point.endpoint.host, point.endpoint.port
    secret = (RunFolder(run).leader / "secret").read_text().strip()
    recording = ours[1].call(record, rendezvous, secret.encode()).result(within_s=TIMEOUT_S)
    places = [(str(address), port) for host in ours for address, port in listening(host)]
    # Each port is open at the address that leads to the other hosts, and at no other.
    assert {address for address, _ in places} <= {"127.0.0.1", *(host.address for host in ours)}, places
    (store,) = [
        (address, port)
        for address, port in places
        if address == "10.77.0.1" and port != rendezvous[1] and answers_like_a_store(stranger, (address, port))
    ]
    mark = tmp_path / "code-ran"
    assert stranger.call(attack, rendezvous, store, mark, recording).result(within_s=TIMEOUT_S) == []
    reached = step(run)
    (tmp_path / "attacked").touch()
    assert [each.ended(within_s=TIMEOUT_S) for each in both] == [0, 0], "\n".join(each.said for each in both)
    said = "".join(each.said for each in both)
    assert reached < STEPS and not mark.exists() and "restarting" not in said
    holders = [path for path in run.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert holders == [RunFolder(run).leader / "secret"] and secret not in said
    assert said.count("someone at 10.77.0.3 spoke to the rendezvous without the run's secret: ignored") == 1
    assert train(*flags(text, tmp_path / "alone")) == 0
    assert losses(run) == pytest.approx(losses(tmp_path / "alone"), abs=1e-5) and len(losses(run)) == STEPS


def answers_like_a_store(stranger: Host, where: Where) -> bool:
    return bool(stranger.call(speaks_torchs_protocol, where).result(within_s=TIMEOUT_S))


def speaks_torchs_protocol(where: Where) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(where, timeout=1) as connection:
        connection.sendall(VALIDATE + bytes([COUNT]))
        return len(connection.recv(8)) == 8
    return False


def test_a_host_with_another_secret_is_told_so_in_two_lines(hosts: list[Host], text: Path, tmp_path: Path) -> None:
    where = ("--nproc", "1", "--nnodes", "2", "--rdzv_endpoint", "host-a:29400")
    command = [sys.executable, "-m", "drumline", "train", *small("--train_data_path", str(text), *where)]
    secrets = [new_secret(), new_secret()]
    one, two = (
        host.start(command, cwd=tmp_path, env={"DRUMLINE_SECRET": secret})
        for host, secret in zip(hosts[:2], secrets, strict=True)
    )
    assert two.ended(within_s=TIMEOUT_S) == 1, two.said
    assert two.said.splitlines()[-2:] == [
        "error: the rendezvous at host-a:29400 has another secret than this host, host-b",
        "  fix: set the same DRUMLINE_SECRET on every host; one can be made with: openssl rand -hex 32",
    ]
    wait(lambda: "someone at 10.77.0.2 spoke to the rendezvous" in one.said, "a word about it", one)
    assert one.process.poll() is None and not any(secret in one.said + two.said for secret in secrets)


@pytest.mark.needs("hosts", "firewall")
def test_the_firewall_of_the_documents_lets_only_the_hosts_of_the_run_in(hosts: list[Host], tmp_path: Path) -> None:
    document = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
    (line,) = [line for line in document.splitlines() if line.startswith("nft ")]
    for number in (1, 2):
        line = line.replace(f"10.0.0.{number}", f"10.77.0.{number}")
    a, b, stranger = hosts
    assert a.start(["sh", "-c", line], cwd=tmp_path).ended(within_s=TIMEOUT_S) == 0, a.started[-1].said
    serve = "import socket; at = socket.create_server(('', 29500)); print('ready', flush=True); [*iter(at.accept, 0)]"
    for host in (a, stranger):
        serving = host.start([sys.executable, "-c", serve], cwd=tmp_path)
        wait(lambda serving=serving: "ready" in serving.said, "a server", serving)  # type: ignore[misc]
    reached = {
        (one.name, other.name): one.call(connects, (other.address, 29500)).result(within_s=TIMEOUT_S)
        for one, other in [(b, a), (a, a), (a, stranger), (stranger, a)]
    }
    assert [pair for pair, reaches in reached.items() if not reaches] == [("host-c", "host-a")]


def connects(where: Where) -> bool:
    with contextlib.suppress(TimeoutError), socket.create_connection(where, timeout=3):
        return True
    return False
