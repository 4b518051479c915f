"""Hosts that meet over real connections, and strangers who try to take part, to crowd them out or to stop them."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from drumline.errors import ConfigError
from drumline.network import new_secret
from drumline.network.interfaces import free_port
from drumline.network.wire import MAC_BYTES, MAGIC, NONCE_BYTES, Channel, Line
from drumline.rendezvous import leader
from drumline.rendezvous.joining import Hosts, HostsRendezvous
from drumline.rendezvous.leader import Lease, RendezvousPoint
from drumline.rendezvous.membership import Membership
from drumline.rendezvous.server import RendezvousServer
from drumline.signals import in_background

SECRET = new_secret().encode()
TIMEOUT_S = 60


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def meet(tmp_path: Path) -> Iterator[Callable[..., HostsRendezvous]]:
    """A host of a run; all of them are on this machine and share a folder."""
    all_hosts = []

    def host(
        *, hosts: tuple[int, int] = (2, 2), secret: bytes = SECRET, endpoint: str | None = None
    ) -> HostsRendezvous:
        lease = Lease(tmp_path / ".leader") if endpoint is None else None
        point = RendezvousPoint(endpoint, lease, secret, hosts=hosts, say=print)
        all_hosts.append(HostsRendezvous(point, elastic=hosts[0] < hosts[1]))
        return all_hosts[-1]

    yield host
    for each in reversed(all_hosts):
        each.leave(finished=False)


def joined(*hosts: HostsRendezvous) -> list[Hosts]:
    asked: list[Future[Hosts]] = [in_background(lambda each=each: each.join(2)) for each in hosts]
    return [each.result(TIMEOUT_S) for each in asked]


def test_hosts_meet_share_a_cause_and_finish_together(meet: Callable[..., HostsRendezvous]) -> None:
    one, two = meet(), meet()
    first, second = joined(one, two)
    assert {first.number, second.number} == {0, 1} and first.ranks == second.ranks == (2, 2)
    assert (first.master_addr, first.master_port) == (second.master_addr, second.master_port)
    assert first.key == second.key and len(first.key) == 64 and first.key not in repr(first)
    one.share({"rank": 0, "trace": ""})
    assert two.shared(wait=True) == {"rank": 0, "trace": ""}
    again, _ = joined(one, two)
    two.share({"trace": "long" * 9_000_000 + "end"})
    wait(lambda: one.shared(wait=True))
    assert str((one.shared(wait=False) or {})["trace"]).endswith("end") and one.change() == ""
    again, _ = joined(one, two)
    assert again.key != first.key and two.shared(wait=False) is None
    ended = [in_background(lambda each=each: each.leave(finished=True)) for each in (one, two)]
    for each in ended:
        each.result(TIMEOUT_S)


def test_a_host_that_dies_is_noticed_and_the_other_goes_on_alone(meet: Callable[..., HostsRendezvous]) -> None:
    one, two = meet(hosts=(1, 2)), meet(hosts=(1, 2))
    assert [each.ranks for each in joined(one, two)] == [(2, 2), (2, 2)]
    two.forget() if one._point._ours else one.forget()
    stays = one if one._point._ours else two
    wait(lambda: stays.change() == "left")
    assert joined(stays)[0].ranks == (2,)


def test_a_host_with_another_secret_is_told_so_at_once(
    meet: Callable[..., HostsRendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    one = meet(endpoint=endpoint)
    waits = in_background(lambda: one.join(1))
    wait(lambda: one._point._ours)
    monkeypatch.setattr(leader, "is_here", lambda name: False)
    for secret, has in [(new_secret().encode(), "another secret than"), (b"", "a secret, unlike")]:
        with pytest.raises(ConfigError, match=f"the rendezvous at {endpoint} has {has} this host") as refused:
            meet(endpoint=endpoint, secret=secret).join(1)
        assert "DRUMLINE_SECRET" in refused.value.fix
        assert SECRET.decode() not in str(refused.value)
    assert sorted(joined(meet(endpoint=endpoint))[0].ranks) == sorted(waits.result(TIMEOUT_S).ranks) == [1, 2]


def test_what_listens_at_the_end_of_an_old_lease_keeps_no_host_from_leading(
    meet: Callable[..., HostsRendezvous], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "_STALE_S", 0.5)
    server = RendezvousServer(["127.0.0.1"], 0, new_secret().encode(), Membership(fewest=1, most=1))
    (tmp_path / ".leader").mkdir()
    (tmp_path / ".leader" / "epoch-1.json").write_text(f'{{"address": "127.0.0.1", "port": {server.port}}}')
    one, two = meet(), meet()
    assert joined(one, two)[0].ranks == (2, 2)
    server.close()


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    serving = RendezvousServer(["127.0.0.1"], 0, SECRET, Membership(fewest=1, most=1))
    yield serving
    serving.close()


def stranger(server: RendezvousServer, said: bytes = b"", *, at: str = "127.0.0.9") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S, source_address=(at, 0))
    with contextlib.suppress(OSError):
        connection.sendall(said)
    return connection


def is_dropped(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 10):
            pass
    return True


def takes_part(server: RendezvousServer) -> bool:
    """Whether a host of the run is taken in."""
    line = Line.dial("127.0.0.1", server.port, SECRET, connect_s=TIMEOUT_S, answer_s=TIMEOUT_S)
    line.send({"say": "join", "node": "n", "turn": 1, "ranks": 1, "address": "127.0.0.1"})
    while True:
        for view in line.receive():
            if "number" in view:
                line.close()
                return True


def recorded(server: RendezvousServer) -> bytes:
    """All that a host of the run sent on a connection of its own."""
    sent, channel = b"", Channel(SECRET, serves=False)
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as connection:
        while True:
            sent += bytes(channel.output)
            connection.sendall(channel.output)
            channel.output.clear()
            if channel.is_trusted:
                return sent
            channel.feed(connection.recv(1 << 10))
            channel.write({"say": "join", "node": "m", "turn": 1, "ranks": 9, "address": "10.9.9.9"})


HELLO = MAGIC + bytes(NONCE_BYTES)
ATTACKS = {
    "junk": b"\x80\x04\x95junk\n" * 200,
    "a web browser": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a huge length": HELLO + struct.pack("!I", 0xFFFFFFFF),
    "unsigned": HELLO + struct.pack("!I", 2) + bytes(MAC_BYTES) + b"{}",
    "deep JSON, unsigned": HELLO + struct.pack("!I", 4000) + bytes(MAC_BYTES) + b"[" * 4000,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_who_does_not_know_the_secret_is_ignored_and_named_once(
    server: RendezvousServer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        with stranger(server, ATTACKS[name]) as connection:
            assert is_dropped(connection)
    assert takes_part(server)
    assert caplog.messages == ["someone at 127.0.0.9 spoke to the rendezvous without the run's secret: ignored"]


def test_a_recording_of_a_host_is_worth_nothing(server: RendezvousServer, caplog: pytest.LogCaptureFixture) -> None:
    with stranger(server, recorded(server)) as connection:
        assert is_dropped(connection)
    assert takes_part(server) and "someone at 127.0.0.9" in caplog.text


def test_connections_that_are_held_open_crowd_nobody_out(
    server: RendezvousServer, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as held:
        waits = held.enter_context(stranger(server, HELLO[:9], at="127.0.0.8"))  # an honest one that is slow
        ours = [held.enter_context(stranger(server)) for _ in range(200)]
        assert takes_part(server)
        assert len(server._connections) <= 66
        waits.sendall(HELLO[9:])
        assert waits.recv(1 << 10).startswith(MAGIC)
        assert is_dropped(ours[0])
    assert caplog.text.count("someone at 127.0.0.9") == 1 and "127.0.0.8" not in caplog.text


def test_who_only_looks_whether_the_port_is_open_is_not_mentioned(
    server: RendezvousServer, caplog: pytest.LogCaptureFixture
) -> None:
    stranger(server).close()
    assert takes_part(server) and not caplog.text


def test_it_listens_where_it_is_told_to_and_nowhere_else(server: RendezvousServer) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), timeout=TIMEOUT_S)
    with pytest.raises(OSError, match="in use"):
        RendezvousServer(["127.0.0.1"], server.port, SECRET, Membership(fewest=1, most=1))


@pytest.mark.parametrize("message", ["a string", [], {"say": "join"}, {"no": "say"}, {"say": "join", "node": [[[]]]}])
def test_a_host_that_says_what_makes_no_sense_ends_nobody_elses_connection(
    server: RendezvousServer, message: object
) -> None:
    line = Line.dial("127.0.0.1", server.port, SECRET, connect_s=TIMEOUT_S, answer_s=TIMEOUT_S)
    line.send(message)
    with contextlib.suppress(OSError):
        while True:
            line.receive()
    line.close()
    assert takes_part(server)
