"""Signed messages: what was altered, repeated, cut off or signed by someone else is never taken for one."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.network.wire import (
    LONGEST,
    LONGEST_FIRST,
    MAC_BYTES,
    MAGIC,
    NONCE_BYTES,
    Channel,
    ForeignError,
    Line,
    WireError,
)

SECRET = b"a secret of thirty-two characters"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20), lambda inner: st.lists(inner, max_size=3)
)


def taken(channel: Channel) -> bytes:
    sent = bytes(channel.output)
    channel.output.clear()
    return sent


def pair(secret: bytes = SECRET, other: bytes = SECRET) -> tuple[Channel, Channel]:
    """A client and a server that trust each other."""
    client, server = Channel(secret, serves=False), Channel(other, serves=True)
    assert server.feed(taken(client)) == []
    assert client.feed(taken(server)) == [{}]
    client.write("first")
    assert server.feed(taken(client)) == ["first"]
    assert client.is_trusted and server.is_trusted
    return client, server


@given(st.lists(JSON, min_size=1, max_size=4), st.data())
def test_messages_arrive_in_order_however_their_bytes_are_cut(messages: list[object], data: st.DataObject) -> None:
    client, server = pair()
    for message in messages:
        client.write(message)
    sent, received = taken(client), []
    while sent:
        count = data.draw(st.integers(1, len(sent)))
        received += server.feed(sent[:count])
        sent = sent[count:]
    assert received == messages


@given(st.text(max_size=40), st.data())
def test_no_altered_message_is_accepted(text: str, data: st.DataObject) -> None:
    client, server = pair()
    client.write(text)
    sent = bytearray(taken(client))
    place = data.draw(st.integers(0, len(sent) - 1))
    sent[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(WireError):
        assert server.feed(bytes(sent)) == []  # it announces more than there is


@given(st.lists(st.text(max_size=8), min_size=2, max_size=5), st.data())
def test_no_message_is_accepted_twice_or_out_of_order(texts: list[str], data: st.DataObject) -> None:
    client, server = pair()
    frames = []
    for text in texts:
        client.write(text)
        frames.append(taken(client))
    order = data.draw(st.lists(st.integers(0, len(frames) - 1), min_size=1, max_size=6))
    for turn, number in enumerate(order):
        if number != turn:
            with pytest.raises(ForeignError):
                server.feed(frames[number])
            return
        assert server.feed(frames[number]) == [texts[number]]


@given(st.data())
def test_a_message_that_was_cut_off_is_none(data: st.DataObject) -> None:
    client, server = pair()
    client.write("all of it")
    sent = taken(client)
    assert server.feed(sent[: data.draw(st.integers(0, len(sent) - 1))]) == []


def test_what_was_recorded_on_one_connection_is_worth_nothing_on_another() -> None:
    client, server = Channel(SECRET, serves=False), Channel(SECRET, serves=True)
    opening = taken(client)
    server.feed(opening)
    client.feed(taken(server))
    client.write({"say": "join"})
    recorded = taken(client)
    again = Channel(SECRET, serves=True)
    again.feed(opening)
    with pytest.raises(ForeignError):
        again.feed(recorded)


def test_an_end_does_not_take_its_own_messages_for_those_of_the_other() -> None:
    client, _ = pair()
    client.write("mirrored")
    with pytest.raises(ForeignError):
        client.feed(taken(client))


@given(st.binary(max_size=200))
def test_junk_is_refused_without_an_answer(junk: bytes) -> None:
    server = Channel(SECRET, serves=True)
    if MAGIC.startswith(junk[: len(MAGIC)]):
        junk = b"\0" + junk
    with pytest.raises(WireError):
        server.feed(junk)
    assert not server.output


def test_a_stranger_learns_nothing_and_his_first_message_is_refused() -> None:
    server = Channel(SECRET, serves=True)
    server.feed(MAGIC + bytes(NONCE_BYTES))
    assert len(taken(server)) == len(MAGIC) + NONCE_BYTES + 4 + MAC_BYTES + len("{}")
    with pytest.raises(ForeignError):
        server.feed(struct.pack("!I", 2) + bytes(MAC_BYTES) + b"{}")


@pytest.mark.parametrize("length", [LONGEST_FIRST + 1, 1 << 31, (1 << 32) - 1])
def test_a_huge_length_is_refused_before_anything_of_it_is_kept(length: int) -> None:
    server = Channel(SECRET, serves=True)
    server.feed(MAGIC + bytes(NONCE_BYTES))
    with pytest.raises(WireError, match=f"{length:,} bytes"):
        server.feed(struct.pack("!I", length))


def test_a_message_longer_than_the_other_end_reads_is_not_sent() -> None:
    client, server = pair()
    with pytest.raises(ValueError, match="at most"):
        client.write("x" * LONGEST)
    client.write("y")
    assert server.feed(taken(client)) == ["y"]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", WireError),
        (b"", ConnectionResetError),
        (MAGIC + bytes(NONCE_BYTES) + struct.pack("!I", 2) + bytes(MAC_BYTES) + b"{}", ForeignError),
    ],
)
def test_a_client_finds_out_what_answers(answer: bytes, error: type[Exception]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            accepted, _ = listening.accept()
            with accepted:
                accepted.recv(1 << 10)
                accepted.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(error):
            Line.dial("127.0.0.1", listening.getsockname()[1], SECRET, connect_s=10, answer_s=10)
        thread.join()
