"""A port for a server: the first that is free, or two lines about why there is none."""

import socket
from pathlib import Path

import pytest

from drumline.errors import ConfigError
from drumline.network import bound, free_port, interfaces


def test_the_first_free_port_is_taken_and_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken, free = other.getsockname()[1], free_port()
        with bound("127.0.0.1", taken, free) as ours:
            assert ours.getsockname()[1] == free
        with pytest.raises(ConfigError, match=f"127.0.0.1:{taken}: another process uses that port"):
            bound("127.0.0.1", taken)


@pytest.mark.skipif(not Path("/proc/sys/net/ipv4/ip_local_port_range").exists(), reason="needs Linux")
def test_a_free_port_is_none_that_the_system_gives_to_connections() -> None:
    """Or another program has it by the time that rank 0 listens there, seconds later."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    given = range(low, high + 1)
    if set(interfaces._NEVER_GIVEN) & set(given):
        pytest.skip(f"this machine gives its connections ports from {low} on")
    assert all(free_port() not in given for _ in range(50))


def test_a_port_in_use_is_not_called_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        monkeypatch.setattr(interfaces, "_NEVER_GIVEN", range(taken, taken + 1))
        assert free_port() != taken


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_number_that_is_no_port_is_not_taken_for_another_one(port: int) -> None:
    with pytest.raises(ConfigError, match=f"{port} is no port"):
        bound("127.0.0.1", port)


def test_an_address_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot serve at 192\.0\.2\.1:0"):
        bound("192.0.2.1", 5, 0)
