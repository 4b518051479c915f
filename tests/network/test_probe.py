"""Probes tell a closed port from a dropped packet, measure the way there, and answer nobody without the token."""

from __future__ import annotations

import errno
import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drumline.network import probe
from drumline.network.probe import ProbeServer, largest_packet, ping, transfer, why_not, within

HERE = "127.0.0.1"


@pytest.fixture
def server() -> Iterator[ProbeServer]:
    with ProbeServer([HERE], clock=lambda: time.time() + 5) as made:
        yield made


def test_a_round_trip_is_timed_and_the_other_clock_read(server: ProbeServer) -> None:
    trip = ping(HERE, server.ports[HERE][0], server.token, within_s=60)
    assert 0 < trip.rtt_s < 60
    assert trip.skew_s == pytest.approx(5, abs=trip.rtt_s + 0.1)


def test_a_transfer_arrives_whole_and_says_how_many_packets_it_took(server: ProbeServer) -> None:
    sent = transfer(HERE, server.ports[HERE][0], server.token, within_s=60)
    assert sent.bytes >= 4 << 20 and not sent.stalled
    assert sent.segments > sent.retransmitted >= 0


@pytest.mark.parametrize("mtu", [600, 1500, 9000])
def test_the_largest_packet_is_the_largest_that_is_tried_where_all_pass(server: ProbeServer, mtu: int) -> None:
    assert largest_packet(HERE, server.ports[HERE][1], server.token, mtu=mtu) == mtu


def test_the_largest_packet_that_passes_is_found_to_the_byte() -> None:
    limit = 1399
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hole:
        hole.bind((HERE, 0))

        def answer() -> None:
            while True:
                received, sender = hole.recvfrom(1 << 16)
                if not received:
                    return
                if len(received) + 28 <= limit:
                    hole.sendto(struct.pack("!I", len(received)), sender)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            assert largest_packet(HERE, hole.getsockname()[1], "t" * 16, mtu=9000, rtt_s=0.05) == limit
        finally:
            hole.sendto(b"", hole.getsockname())
            thread.join()


def test_whoever_lacks_the_token_gets_no_answer(server: ProbeServer) -> None:
    with pytest.raises(ConnectionError):
        ping(HERE, server.ports[HERE][0], "x" * 16, within_s=60)
    assert largest_packet(HERE, server.ports[HERE][1], "x" * 16, mtu=1500) == 0


def test_a_server_listens_only_on_the_addresses_it_was_given(server: ProbeServer) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.ports[HERE][0]), timeout=60)
    with ProbeServer(["203.0.113.1"]) as elsewhere:  # not an address of this machine
        assert elsewhere.ports == {}


def test_a_server_that_was_closed_answers_no_more() -> None:
    with ProbeServer([HERE]) as server:
        port = server.ports[HERE][0]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection((HERE, port), timeout=60).close()
        except ConnectionRefusedError:
            return
        except ConnectionResetError:  # was let in just before
            continue
    raise AssertionError("still listening")


def test_what_kept_a_connection_from_opening_has_a_name() -> None:
    errors = [
        (socket.gaierror(socket.EAI_NONAME, ""), "unresolved"),
        (TimeoutError(), "timed out"),
        (OSError(errno.ETIMEDOUT, ""), "timed out"),
        (OSError(errno.ECONNREFUSED, ""), "refused"),
        (OSError(errno.ENETUNREACH, ""), "no route"),
        (OSError(errno.EHOSTUNREACH, ""), "unreachable"),
        (OSError(errno.EPERM, ""), "forbidden"),
        (OSError(errno.ECONNRESET, ""), "silent"),
    ]
    assert [why_not(error) for error, _ in errors] == [why for _, why in errors]


def test_what_never_ends_is_left_behind() -> None:
    ended = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.05, ended.wait)
    ended.set()
    assert within(60, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(60, lambda: dict[str, int]()["x"])


@pytest.mark.parametrize(("known", "lost"), [(220, 5), (160, 30), (100, 0)])
def test_a_segment_that_came_twice_was_not_lost_where_the_system_can_tell(known: int, lost: int) -> None:
    info = bytearray(220)
    for offset, number in {100: 30, 156: 1000, 216: 25}.items():  # tcp_info: sent again, sent, came twice
        struct.pack_into("@I", info, offset, number)
    connection = SimpleNamespace(getsockopt=lambda level, name, length: bytes(info[: min(known, length)]))
    assert probe._sent_so_far(cast(Any, connection))[2] == lost
