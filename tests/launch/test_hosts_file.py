"""Hosts as people write them: a list or a file, and what is wrong with one is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.errors import ConfigError
from drumline.launch.hosts_file import RemoteHost, parse_hosts, read_hosts

NAMES = st.from_regex(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,20}[A-Za-z0-9_])?", fullmatch=True).filter(str.isascii)
HOSTS = st.lists(
    st.builds(RemoteHost, NAMES, st.one_of(st.just(""), NAMES), st.one_of(st.none(), st.integers(1, 10_000))),
    min_size=1,
    unique_by=lambda host: host.name,
)
NOISE = st.sampled_from(["", "   ", "# a comment", "\t# host-x slots=9"])


def short(host: RemoteHost) -> str:
    return host.target + (f":{host.slots}" if host.slots else "")


@given(HOSTS)
def test_a_list_gives_the_hosts_that_it_was_written_for(hosts: list[RemoteHost]) -> None:
    assert parse_hosts(",".join(map(short, hosts))) == hosts
    assert parse_hosts(" , ".join(map(short, hosts))) == hosts


@given(HOSTS, st.data())
def test_a_file_gives_the_same_hosts_in_either_form_between_comments_and_blank_lines(
    tmp_path_factory: pytest.TempPathFactory, hosts: list[RemoteHost], data: st.DataObject
) -> None:
    lines = []
    for host in hosts:
        openmpi = host.target + (f"   slots={host.slots} max_slots=99" if host.slots else "")
        lines += [data.draw(NOISE), data.draw(st.sampled_from([short(host), openmpi])) + data.draw(NOISE)]
    path = tmp_path_factory.getbasetemp() / "hostfile"
    path.write_text("\n".join(lines))
    assert read_hosts(path) == hosts


@given(st.text(max_size=40))
def test_any_text_is_hosts_or_an_error_that_says_what_to_write(text: str) -> None:
    hosts, fix = [], ""
    try:
        hosts = parse_hosts(text)
    except ConfigError as error:
        fix = error.fix
    assert bool(hosts) != bool(fix) and not any(host.target.startswith("-") for host in hosts)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("-oProxyCommand=evil", "'-oProxyCommand=evil' is not a host"),
        ("host-b:two", "'host-b:two' is not a host"),
        ("host-b:0", "host-b has 0 slots"),
        ("host-b slots=x", "cannot parse 'slots=x'"),
        ("host-b:2 slots=3", "cannot parse 'slots=3'"),
        ("root@host-a slots=2", "host-a is listed twice"),
    ],
)
def test_a_bad_line_of_a_file_is_named_with_its_number(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "hostfile"
    path.write_text(f"# all of them\nhost-a\n\n{line}\n")
    with pytest.raises(ConfigError) as raised:
        read_hosts(path)
    assert raised.value.problem == f"{path}, line 4: {problem}"


def test_a_file_that_is_not_there_or_names_nobody_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the hosts"):
        read_hosts(tmp_path / "nowhere")
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(ConfigError, match="there are no hosts in"):
        read_hosts(tmp_path / "empty")
