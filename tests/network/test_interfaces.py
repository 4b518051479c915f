"""The address that this machine uses towards another, by name or number, in IPv4 and IPv6."""

import pytest

from drumline.network.interfaces import address_towards


def test_towards_itself_a_machine_uses_loopback() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("localhost") in ("127.0.0.1", "::1")


@pytest.mark.needs("ipv6")
def test_towards_an_ipv6_address_too() -> None:
    assert address_towards("::1") == "::1"


def test_a_name_that_does_not_resolve_has_no_way() -> None:
    assert address_towards("no-such-host.invalid") is None
