"""HOST:PORT is read in one way, IPv6 included, and what cannot be meant is refused with what to type."""

import ipaddress
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.errors import ConfigError
from drumline.network.endpoint import Endpoint

names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z0-9]{1,10}){0,3}", fullmatch=True)
ports = st.integers(1, 65535)
hosts = st.one_of(names, st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(str))


@given(hosts, ports)
def test_what_is_shown_is_read_as_the_same(host: str, port: int) -> None:
    endpoint = Endpoint(host, port)
    assert Endpoint.parse(str(endpoint)) == endpoint


@given(hosts, ports)
def test_without_a_port_it_is_the_default(host: str, port: int) -> None:
    assert Endpoint.parse(host, default_port=port) == Endpoint(host, port)
    assert Endpoint.parse(host).port == 29400


@given(st.text(max_size=30))
def test_any_text_is_an_endpoint_that_reads_back_or_a_user_error_that_shows_one(text: str) -> None:
    try:
        endpoint = Endpoint.parse(text)
    except ConfigError as error:
        shown = f"--rdzv_endpoint {text} is not HOST:PORT"
        endpoint = Endpoint.parse(str(error.fix).rpartition(" ")[2]) if error.problem == shown else Endpoint("", 0)
    assert Endpoint.parse(str(endpoint)) == endpoint and endpoint.host and 0 < endpoint.port < 1 << 16


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("host-a", "host-a", 29400),
        ("host-a:1", "host-a", 1),
        ("10.0.0.1:65535", "10.0.0.1", 65535),
        ("[::1]", "::1", 29400),
        ("[fd00::a]:29500", "fd00::a", 29500),
        ("fd00::a", "fd00::a", 29400),
        ("[fe80::1%eth0]:7", "fe80::1%eth0", 7),
    ],
)
def test_every_form(text: str, host: str, port: int) -> None:
    assert Endpoint.parse(text) == Endpoint(host, port)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("", "HOST:29400"),
        (":1", "HOST:29400"),
        ("a:", "a:29400"),
        ("a:xyz", "a:29400"),
        ("a:0", "a:29400"),
        ("a:65536", "a:29400"),
        ("a:1:2", "HOST:29400"),
        ("tcp://a:1", "HOST:29400"),
        ("[a]:1", "HOST:29400"),
        ("fd00::a:29400", "[fd00::a]:29400"),  # a port after an address that has colons of its own
    ],
)
def test_what_is_refused_and_what_to_type_instead(text: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--where {text} is not HOST:PORT")) as refused:
        Endpoint.parse(text, flag="--where")
    assert refused.value.fix == f"as in --where {fix}"


def test_brackets_are_for_ipv6_alone() -> None:
    for host in ("a", "10.0.0.1", "::1"):
        brackets = "[" in str(Endpoint(host, 1))
        try:
            assert brackets == (ipaddress.ip_address(host).version == 6)
        except ValueError:
            assert not brackets
