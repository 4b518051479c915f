"""Hosts that are asked before a run, and what is made of what they say; this machine plays all of them."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.ssh_plans import plan, script

from drumline.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    ConfigError,
    DrumlineError,
    PeersLostError,
    RunLostError,
)
from drumline.launch import ssh_sessions
from drumline.launch.hosts_file import RemoteHost
from drumline.launch.ssh import launch, outcome
from drumline.launch.ssh_checks import compare_versions, look, rendezvous_addresses
from drumline.launch.ssh_plan import Plan
from drumline.launch.ssh_sessions import Session, follow
from drumline.network.endpoint import Endpoint

# ssh's part played by this machine: the last word is the command, and the word before it the host.
LOCALLY = '#!/bin/sh\nfor last; do host=$target target=$last; done\nexport FAKE_HOST=$host\nexec sh -c "$last"\n'


@pytest.fixture
def locally(tmp_path: Path) -> str:
    """What --ssh takes so that every host is this machine."""
    return script(tmp_path / "locally", LOCALLY)


def test_what_the_doctor_finds_failed_keeps_a_run_from_starting_and_a_warning_does_not(
    tmp_path: Path, locally: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for state, code in (("warning", 0), ("failed", 1)):
        finding = {"check": "GPU", "state": state, "what": "7 bytes free", "fix": "make room", "host": ""}
        (tmp_path / "right").write_text(json.dumps({"host": "x", "state": state, "findings": [finding]}, indent=2))
        (tmp_path / "left").write_text('{"findings": []}')
        python = script(
            tmp_path / "python",
            f'#!/bin/sh\ncase "$*" in *doctor*) cat {tmp_path}/$FAKE_HOST;;\n'
            f'*remote_agent*) exec {sys.executable} "$@";;\n*) echo trains;; esac\n',
        )
        assert launch(plan(locally, tmp_path, "train", python=python), checks=True) == code
        out, err = capfd.readouterr()
        assert err == f"{'error' if code else state}: right: GPU: 7 bytes free\n  fix: make room\n"
        assert ("left  | trains\n" in out and "right | trains\n" in out) is (code == 0)


def test_a_run_folder_that_cannot_be_written_is_fatal_on_the_first_host_alone(
    tmp_path: Path, locally: str, capfd: pytest.CaptureFixture[str]
) -> None:
    finding = {"check": "disk", "state": "failed", "what": "locked", "fix": "mend it", "code": "unwritable", "host": ""}
    python = script(
        tmp_path / "python",
        f'#!/bin/sh\ncase "$*" in *doctor*) cat {tmp_path}/$FAKE_HOST;;\n'
        f'*remote_agent*) exec {sys.executable} "$@";;\n*) echo trains;; esac\n',
    )
    for unwritable, fine, code in (("right", "left", 0), ("left", "right", 1)):
        (tmp_path / unwritable).write_text(json.dumps({"findings": [finding]}))
        (tmp_path / fine).write_text('{"findings": []}')
        assert launch(plan(locally, tmp_path, "train", python=python), checks=True) == code
        said = capfd.readouterr().err
        assert said == f"{'error' if code else 'warning'}: {unwritable}: disk: locked\n  fix: mend it\n"


def test_a_folder_that_is_not_there_and_a_name_that_is_not_known_there_are_told_for_all_hosts_at_once(
    tmp_path: Path, locally: str, capfd: pytest.CaptureFixture[str]
) -> None:
    there = replace(plan(locally, tmp_path / "no", "train"), endpoint=Endpoint("no-such-host.invalid", 1))
    assert launch(there, checks=True) == 1
    err = capfd.readouterr().err
    assert "error: all hosts: names: the rendezvous host no-such-host.invalid does not resolve there" in err
    assert f"error: left: folder: {tmp_path}/no does not exist\n  fix: {locally} left mkdir -p {tmp_path}/no" in err
    itself = replace(plan(locally, tmp_path / "no", "train"), endpoint=Endpoint("127.0.0.1", 1))
    assert launch(itself, checks=True) == 1
    own = capfd.readouterr().err
    assert "resolves to the host itself there (127.0.0.1)" in own
    elsewhere = f"--rdzv_endpoint ADDRESS:1 --workdir {tmp_path}/no -- train\n"
    for said in (err, own):
        assert f"fix: drumline launch --hosts left,right --ssh {locally} {elsewhere}" in said


def test_a_name_that_one_host_knows_is_told_to_the_others_with_its_address(tmp_path: Path, locally: str) -> None:
    there = replace(plan(locally, tmp_path, "train"), endpoint=Endpoint("left", 29400))
    answers = {"versions": VERSIONS, "checkout": None, "cwd": True, "meeting_addresses": ["10.0.0.7"]}
    for known, problem, fix in (
        ([], "does not resolve", f"{locally} right 'echo 10.0.0.7 left | sudo tee -a /etc/hosts'"),
        (["127.0.1.1"], "resolves to the host itself", "--rdzv_endpoint 10.0.0.7:29400"),
    ):
        sessions = [answering(there, 0, answers), answering(there, 1, {**answers, "meeting_addresses": known})]
        (finding,) = look(sessions[1], replace(there, command=["doctor"]), rendezvous_addresses(sessions))
        assert finding.host == "right" and problem in finding.what and fix in finding.fix


def test_a_host_with_other_versions_is_told_how_they_are_installed(tmp_path: Path, locally: str) -> None:
    there = plan(locally, tmp_path, "train", python="/opt/python")
    for package, fix in (
        ("python", "'cd '\"'\"'/src/drum line'\"'\"' && uv venv --clear --python 1.0 && uv pip install"),
        ("torch", "right /opt/python -m pip install torch==1.0"),
        ("drumline", "git pull && /opt/python -m pip install -c constraints.txt -e ."),
    ):
        other = {"versions": {**VERSIONS, package: "2.0"}, "checkout": "/src/drum line"}
        sessions = [answering(there, 0, {"versions": VERSIONS}), answering(there, 1, other)]
        (finding,) = compare_versions(sessions, there)
        assert finding.what == f"{package} is 2.0 there, but 1.0 on left" and fix in finding.fix


VERSIONS = dict.fromkeys(("python", "torch", "drumline"), "1.0")


def answering(there: Plan, number: int, answers: Mapping[str, object]) -> Session:
    """A host that has answered."""
    session = Session(there.hosts[number], ["true"], {})
    follow([session], lambda host, line: None, together=False)
    session.answers |= answers
    return session


def test_a_host_without_that_python_or_without_drumline_is_told_what_to_install(
    tmp_path: Path, locally: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(plan(locally, tmp_path, "train", python="/no/python"), checks=True) == 1
    err = capfd.readouterr().err
    assert "all hosts: python: /no/python does not exist\n  fix: drumline launch --hosts left,right " in err
    assert " --python PATH -- train # PATH: a Python with drumline, the same on every host\n" in err
    bare = script(tmp_path / "bare", f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    for checks in (True, False):
        assert launch(plan(locally, tmp_path, "train", python=bare), checks=checks) == 1
        err = capfd.readouterr().err
        assert (
            f"drumline is not installed for {bare} there" in err and f"'cd CHECKOUT && {bare} -m pip install -c " in err
        )


def test_lines_are_whole_and_aligned_on_the_stream_they_came_from(
    tmp_path: Path, locally: str, capfd: pytest.CaptureFixture[str]
) -> None:
    python = script(
        tmp_path / "python",
        f'#!/bin/sh\ncase "$*" in *remote_agent*) exec {sys.executable} "$@";; esac\n'
        'for n in 1 2 3; do printf "half "; sleep 0.1; echo "of $n"; echo "error $n" >&2; done; printf "no end"\n',
    )
    assert launch(plan(locally, tmp_path, "train", hosts="a,much-longer", python=python), checks=False) == 0
    out, err = capfd.readouterr()
    for name in ("a           | ", "much-longer | "):
        mine = [line.removeprefix(name) for line in out.splitlines() if line.startswith(name)]
        assert mine == ["half of 1", "half of 2", "half of 3", "no end"]
        assert [line for line in err.splitlines() if line.startswith(name)] == [f"{name}error {n}" for n in (1, 2, 3)]
    assert len(out.splitlines()) == 8


def test_a_progress_bar_is_lines_however_it_is_cut_and_what_never_ends_is_cut_into_lines() -> None:
    said = "a\r\nb\r\r\n\n\r 10%\r 20%\r\r 30%\n\rdone\r"
    for size in range(1, len(said) + 1):
        pieces = [said[start : start + size] for start in range(0, len(said), size)]
        assert heard(pieces) == ["a", "b", "", " 10%", " 20%", " 30%", "done"], size
    endless = heard(["x" * 300_000])
    assert sum(map(len, endless)) == 300_000 and max(map(len, endless)) < 300_000


def heard(pieces: Sequence[str]) -> list[str]:
    """The lines of a host that says something in these pieces."""
    session = Session(RemoteHost("left"), ["true"], {})
    lines = []
    for piece in [*pieces, ""]:
        reading, writing = os.pipe()
        with open(reading, "rb") as pipe, open(writing, "wb", buffering=0) as end:
            thread = threading.Thread(target=lambda end=end, piece=piece: (end.write(piece.encode()), end.close()))
            thread.start()
            while True:
                goes_on, new_lines = session.read("stdout", pipe)
                lines += [line.text for line in new_lines]
                if len(piece) <= 65536 or not goes_on:
                    break
            thread.join()
    session.close()
    return lines


def test_hosts_are_told_at_once_what_no_pipe_holds(tmp_path: Path, locally: str) -> None:
    # Each host reads its order only once the other one has been started.
    slow = script(
        tmp_path / "slow",
        f'#!/bin/bash\nfor last; do host=$target target=$last; done\ntouch "{tmp_path}/$host.here"\n'
        f'until [ -e "{tmp_path}/left.here" ] && [ -e "{tmp_path}/right.here" ]; do sleep 0.05; done\n'
        f'exec {locally} "$@"\n',
    )
    there = plan(slow, tmp_path, "train")
    environ = {f"BIG_{number}": "x" * 100_000 for number in range(4)}
    order = {**there.order(there.hosts[0]), "argv": ["sh", "-c", "test ${#BIG_3} = 100000"], "environ": environ}
    sessions = [Session(host, there.ssh_line(host), order) for host in there.hosts]
    follow(sessions, lambda host, line: None, together=True)
    assert [session.code for session in sessions] == [0, 0]


AFTERWARDS = "until [ -e @said ]; do sleep 0.05; done;"
"""A shell command that waits until the other host has spoken."""


def telling(error: DrumlineError) -> str:
    """A shell command that ends as drumline does with an error; what it prints is nobody's business."""
    event = {"event": "error", "time": 0.0, **error.as_dict()}
    before, after = json.dumps(event).split('"time": 0.0')
    line = f"""'{before}"time": '$(date +%s.%N)'{after}'"""
    return f"echo {line} >> $DRUMLINE_EVENTS; touch @said; echo oh >&2; exit {error.exit_code}"


@pytest.mark.parametrize(
    ("ends", "code", "cause"),
    [
        (("exit 0", "exit 0"), 0, None),
        (("exit 75", "exit 130"), EXIT_STOPPED, None),
        (("exit 3", "exit 75"), EXIT_FAILED, "left: drumline exited with code 3"),
        (("exit 3", "exit 1"), 1, "right: drumline exited with code 1"),
        (("kill -9 $$", "exit 75"), EXIT_FAILED, "left: drumline was killed by SIGKILL"),
        (
            (
                telling(PeersLostError("rank 0 on left is alone", fix="f")),
                f"{AFTERWARDS} {telling(RunLostError('rank 1 on right broke', fix='f'))}",
            ),
            EXIT_FAILED,
            "rank 1 on right broke",
        ),
        (  # of two causes the one that was told first
            (
                # What two hosts say at about the same time arrives in any order.
                f"{AFTERWARDS} sleep 1; {telling(RunLostError('rank 0 on left broke', fix='f'))}",
                telling(RunLostError("rank 1 on right broke", fix="f", details=["x" * 90_000])),
            ),
            EXIT_FAILED,
            "rank 1 on right broke",
        ),
        (  # one of them tells for both, and the other spoke first of something else
            ("echo waiting >&2; touch @said; exit 1", f"{AFTERWARDS} {telling(ConfigError('3 heads', fix='f'))}"),
            1,
            "right: 3 heads",
        ),
    ],
)
def test_the_worst_end_of_a_host_is_that_of_the_run_and_its_cause_the_one_that_is_told(
    tmp_path: Path,
    locally: str,
    monkeypatch: pytest.MonkeyPatch,
    ends: tuple[str, ...],
    code: int,
    cause: str | None,
) -> None:
    monkeypatch.setattr(ssh_sessions, "_FOLLOW_S", 1000.0)
    there = plan(locally, tmp_path, "train")
    ends = tuple(end.replace("@said", str(tmp_path / "said")) for end in ends)
    orders = [{**there.order(host), "argv": ["sh", "-c", end]} for host, end in zip(there.hosts, ends, strict=True)]
    sessions = [Session(host, there.ssh_line(host), order) for host, order in zip(there.hosts, orders, strict=True)]
    assert follow(sessions, lambda host, line: None, together=True) == 0
    exit_code, error = outcome(sessions, there, stops=0)
    assert (exit_code, error and error.problem) == (code, cause)
    assert outcome(sessions, there, stops=2) == (EXIT_INTERRUPTED, None)


def test_a_connection_that_is_lost_ends_the_other_hosts_and_is_the_cause(
    tmp_path: Path, locally: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_sessions, "_FOLLOW_S", 0.1)
    there = plan(locally, tmp_path, "train")
    order = {**there.order(there.hosts[0]), "argv": ["sleep", "1000"]}
    dying = script(
        tmp_path / "dying",
        "#!/bin/sh\nprintf '\\036drumline {\"started\": 1}\\n'; echo 'ssh: it broke' >&2; exit 255\n",
    )
    sessions = [
        Session(RemoteHost("left"), there.ssh_line(there.hosts[0]), order),
        Session(RemoteHost("right"), [dying], order),
    ]
    follow(sessions, lambda host, line: None, together=True)
    code, error = outcome(sessions, there, stops=0)
    assert code == EXIT_FAILED and error is not None
    assert error.problem == "the connection to right was lost: ssh: it broke"
    assert sessions[0].code == 128 + signal.SIGTERM


def test_a_host_that_is_only_asked_for_facts_answers_and_ends(tmp_path: Path, locally: str) -> None:
    there = plan(locally, tmp_path, "doctor")
    sessions = [Session(host, there.ssh_line(host), there.check()) for host in there.hosts]
    follow(sessions, lambda host, line: None, together=False)
    assert [look(session, there) for session in sessions] == [[], []]
