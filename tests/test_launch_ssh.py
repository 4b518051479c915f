"""One run on two hosts over SSH: it starts on both, fails with one cause, and leaves nothing behind however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from conftest import small
from sshd import LIMIT_S, Cluster, two_hosts_with_sshd, wait

from drumline import cli, far_end, ssh_sessions
from drumline.cli_launch import launch as app
from drumline.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED, ConfigError
from drumline.hosts_file import RemoteHost, parse_hosts
from drumline.launch_ssh import launch, outcome
from drumline.run_folder import RunFolder
from drumline.ssh_checks import compare_versions, look, meeting_addresses
from drumline.ssh_plan import Plan, describe, make_plan, passed_on
from drumline.ssh_sessions import Session, follow

SECRET = "canary" * 7
STEP = ("--batch_size", "2", "--global_batch_size", "8", "--bitwise")
"""The same bits on any number of ranks."""
BOTH = ("--hosts", "host-a,host-b", "--nproc", "1")
LONG = ("--total_steps", "100000", "--eval_every", "100000")
MODEL = """
import socket
from torch import nn
from torch.nn import functional as F

class Bad(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)
        self.calls = 0

    def forward(self, input_ids, *, targets, document_ids=None):
        self.calls += 1
        if self.calls == 9 and socket.gethostname() == "host-b":
            raise ValueError("boom on purpose")
        logits = self.table(input_ids)
        return None, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
"""
# Says what it is called with, and all that it is told.
RECORDER = '#!/bin/bash\nprintf "%s\\n" "$*" >> "$0.calls"\nexec ssh "$@" < <(tee -a "$0.told" 2>&-)\n'
# ssh's part played by this machine: the last word is the command, and the word before it the host.
LOCALLY = '#!/bin/sh\nfor last; do host=$target target=$last; done\nexport FAKE_HOST=$host\nexec sh -c "$last"\n'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with two_hosts_with_sshd(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture
def nothing_left(cluster: Cluster) -> Callable[[], None]:
    """Waits until both hosts run only what they did before the test."""
    before = {host.name: cluster.pids(host) for host in (cluster.a, cluster.b)}

    def check() -> None:
        for host in (cluster.a, cluster.b):
            wait(lambda host=host: cluster.pids(host) <= before[host.name], f"an empty {host.name}")  # type: ignore[misc]

    return check


@pytest.fixture
def locally(tmp_path: Path) -> str:
    """What --ssh takes so that every host is this machine."""
    return script(tmp_path / "locally", LOCALLY)


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def plan(ssh: str, workdir: Path, *command: str, hosts: str = "left,right", python: str = sys.executable) -> Plan:
    return Plan(
        hosts=parse_hosts(hosts),
        command=command,
        nproc=None,
        ssh=[ssh],
        endpoint="10.1.2.3:29400",
        workdir=str(workdir),
        python=python,
        environ={},
    )


def train_flags(*flags: str) -> list[str]:
    return ["--", "train", *small("--train_data_path", "text", *STEP, *flags)]


# Over a real sshd


def test_two_hosts_train_the_bits_of_one_process_and_run_what_the_dry_run_shows(
    cluster: Cluster, train: Callable[..., int], tmp_path: Path, nothing_left: Callable[[], None]
) -> None:
    recorder = tmp_path / "recorder"
    script(recorder, RECORDER)
    ssh, flags = f"{recorder} -F {cluster.folder}/ssh_config", train_flags("--run_dir", "run")
    environ = {"HF_TOKEN": SECRET, "NOT_PASSED_ON": "x"}
    shown = cluster.launch(*BOTH, "--dry_run", *flags, cwd=tmp_path, env=environ, ssh=ssh)
    assert shown.ended(within_s=LIMIT_S) == 0 and SECRET not in shown.said and not (tmp_path / "run").exists()
    started = cluster.launch(*BOTH, *flags, cwd=tmp_path, env=environ, ssh=ssh)
    lines: set[str] = set()
    deadline_s = time.monotonic() + LIMIT_S
    while started.process.poll() is None and time.monotonic() < deadline_s:
        lines |= command_lines(cluster)
        time.sleep(0.2)
    assert started.ended(within_s=LIMIT_S) == 0, started.said
    said = started.said.splitlines()
    assert any(line.startswith("2 hosts are ready: host-a, host-b (python 3.") for line in said)
    assert any(line.startswith("host-a | step  6/6 | loss ") for line in said)
    # What was run is what was shown, and nobody could see the secret.
    dry = [line.partition(": ")[2] for line in shown.said.splitlines()]
    calls = Path(f"{recorder}.calls").read_text().splitlines()
    told = [line for line in Path(f"{recorder}.told").read_text().splitlines() if line.startswith("{")]
    assert sorted(" ".join(shlex.split(line)) for line in dry[::2]) == sorted(f"{recorder} {call}" for call in calls)
    assert sorted(dry[1::2]) == sorted(line.replace(SECRET, "***") for line in told)
    assert all(SECRET in line and "NOT_PASSED" not in line for line in told)
    assert any("drumline.far_end" in line for line in lines) and not any(SECRET in line for line in lines)
    assert train(*STEP, "--run_dir", "alone") == 0
    together, alone = (RunFolder(tmp_path / name).read_status() for name in ("run", "alone"))
    assert together["state"] == "finished" and together["weights_sha256"] == alone["weights_sha256"]
    nothing_left()


def command_lines(cluster: Cluster) -> set[str]:
    """What `ps` would show on both hosts."""
    found = set()
    for host in (cluster.a, cluster.b):
        for pid in cluster.pids(host):
            with contextlib.suppress(psutil.Error):
                found.add(" ".join(psutil.Process(pid).cmdline()))
    return found


def test_a_rank_that_raises_on_one_host_is_the_one_cause_told_at_the_end_with_its_traceback(
    cluster: Cluster, text: Path, tmp_path: Path, nothing_left: Callable[[], None]
) -> None:
    (tmp_path / "bad.py").write_text(MODEL)
    flags = train_flags("--model", "bad:Bad", "--max_restarts", "0", "--run_dir", "run")
    started = cluster.launch(*BOTH, "--skip_checks", *flags, cwd=tmp_path)
    assert started.ended(within_s=LIMIT_S) == EXIT_FAILED, started.said
    last = [line for line in started.said.splitlines() if not line.startswith("host-")]
    assert (
        last[0].startswith("error: rank 1 on host-b (process ") and "failed with ValueError: boom on purpose" in last[0]
    )
    assert last[1] == "  Traceback (most recent call last):" and "  ValueError: boom on purpose" in last
    assert sum(line.startswith("error: ") for line in last) == 1 and last[-1].startswith("  fix: ")
    assert RunFolder(tmp_path / "run").read_status()["state"] == "failed"
    nothing_left()


def test_a_users_mistake_is_two_lines_with_the_host_and_the_exit_code_of_a_mistake(
    cluster: Cluster, tmp_path: Path, nothing_left: Callable[[], None]
) -> None:
    started = cluster.launch(*BOTH, "--skip_checks", *train_flags("--n_heads", "3"), cwd=tmp_path)
    assert started.ended(within_s=LIMIT_S) == 1, started.said
    last = [line for line in started.said.splitlines() if not line.startswith("host-")]
    assert len(last) == 2 and "d_model 16 cannot be divided over 3 heads" in last[0] and last[1].startswith("  fix: ")
    assert last[0].startswith(("error: host-a: ", "error: host-b: ")) and "Traceback" not in started.said
    nothing_left()


def test_ctrl_c_saves_and_ends_all_of_it(
    cluster: Cluster, text: Path, tmp_path: Path, nothing_left: Callable[[], None]
) -> None:
    started = cluster.launch(*BOTH, "--skip_checks", *train_flags("--run_dir", "run", *LONG), cwd=tmp_path)
    wait(lambda: "| loss " in started.said, "a step", started)
    started.process.send_signal(signal.SIGINT)
    assert started.ended(within_s=LIMIT_S) == EXIT_STOPPED, started.said
    nothing_left()
    status = RunFolder(tmp_path / "run").read_status()
    assert status["state"] == "stopped" and RunFolder(tmp_path / "run").checkpoint(status["step"]).is_dir()


def test_a_launcher_that_is_killed_leaves_nothing_on_any_host_and_the_run_is_saved(
    cluster: Cluster, text: Path, tmp_path: Path, nothing_left: Callable[[], None]
) -> None:
    started = cluster.launch(*BOTH, "--skip_checks", *train_flags("--run_dir", "run", *LONG), cwd=tmp_path)
    wait(lambda: "| loss " in started.said, "a step", started)
    started.process.kill()
    nothing_left()
    status = RunFolder(tmp_path / "run").read_status()
    assert status["state"] == "stopped" and RunFolder(tmp_path / "run").checkpoint(status["step"]).is_dir()


def test_every_host_that_ssh_does_not_reach_is_named_with_what_to_type(cluster: Cluster, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "Host refuses\n HostName 10.77.0.2\n Port 23\nHost stranger\n HostName 10.77.0.2\n HostKeyAlias stranger\n"
        "Host locked\n HostName 10.77.0.2\n User nobody\n HostKeyAlias host-b\n"
        f"Host *\n Include {cluster.folder}/ssh_config\n"
    )
    ssh = f"ssh -F {config}"
    hosts = "host-a,nowhere,refuses,stranger,locked"
    started = cluster.launch("--hosts", hosts, "--", "train", cwd=tmp_path, ssh=ssh)
    assert started.ended(within_s=LIMIT_S) == 1, started.said
    lines = started.said.splitlines()
    told = {line.split(": ")[1]: (line, fix) for line, fix in pairwise(lines) if "error: " in line}
    for host, problem, fix in (
        ("nowhere", "its name does not resolve here", "fix: echo ADDRESS nowhere | sudo tee -a /etc/hosts"),
        ("refuses", "nothing listens for ssh there", "systemctl start ssh"),
        ("stranger", "its host key is not known here", f"fix: {ssh} stranger true"),
        ("locked", "ssh is not let in without a password", "fix: ssh-copy-id locked"),
    ):
        assert problem in told[host][0] and fix in told[host][1], started.said
    assert set(told) == {"nowhere", "refuses", "stranger", "locked"} and "Traceback" not in started.said


def test_hosts_whose_versions_differ_are_refused_by_name(cluster: Cluster, tmp_path: Path) -> None:
    metadata = tmp_path / "other" / "torch-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    python = script(
        tmp_path / "python",
        f'#!/bin/sh\n[ "$(hostname)" = host-b ] && export PYTHONPATH={tmp_path}/other\nexec {sys.executable} "$@"\n',
    )
    started = cluster.launch(*BOTH, "--python", python, *train_flags("--run_dir", "run"), cwd=tmp_path)
    assert started.ended(within_s=LIMIT_S) == 1, started.said
    errors = [line for line in started.said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith("error: host-b: versions: torch is 9.9 there, and 2.")
    assert "-m pip install torch==2." in started.said and not (tmp_path / "run").exists()


# With this machine in the part of the hosts


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
            f'*far_end*) exec {sys.executable} "$@";;\n*) echo trains;; esac\n',
        )
        assert launch(plan(locally, tmp_path, "train", python=python), checks=True) == code
        out, err = capfd.readouterr()
        assert err == f"{'error' if code else state}: right: GPU: 7 bytes free\n  fix: make room\n"
        assert ("left  | trains\n" in out and "right | trains\n" in out) is (code == 0)


def test_a_run_folder_that_cannot_be_written_is_fatal_on_the_first_host_alone(
    tmp_path: Path, locally: str, capfd: pytest.CaptureFixture[str]
) -> None:
    finding = {"check": "disk", "state": "failed", "what": "it cannot be written", "fix": "mend it", "host": ""}
    python = script(
        tmp_path / "python",
        f'#!/bin/sh\ncase "$*" in *doctor*) cat {tmp_path}/$FAKE_HOST;;\n'
        f'*far_end*) exec {sys.executable} "$@";;\n*) echo trains;; esac\n',
    )
    for unwritable, fine, code in (("right", "left", 0), ("left", "right", 1)):
        (tmp_path / unwritable).write_text(json.dumps({"findings": [finding]}))
        (tmp_path / fine).write_text('{"findings": []}')
        assert launch(plan(locally, tmp_path, "train", python=python), checks=True) == code
        said = capfd.readouterr().err
        assert said == f"{'error' if code else 'warning'}: {unwritable}: disk: it cannot be written\n  fix: mend it\n"


def test_a_folder_that_is_not_there_and_a_name_that_is_not_known_there_are_told_for_all_hosts_at_once(
    tmp_path: Path, locally: str, capfd: pytest.CaptureFixture[str]
) -> None:
    there = replace(plan(locally, tmp_path / "no", "train"), endpoint="no-such-host.invalid:1")
    assert launch(there, checks=True) == 1
    err = capfd.readouterr().err
    assert "error: all hosts: names: the name no-such-host.invalid, where all hosts meet, does not resolve there" in err
    assert f"error: left: folder: there is no {tmp_path}/no\n  fix: {locally} left mkdir -p {tmp_path}/no" in err
    itself = replace(plan(locally, tmp_path / "no", "train"), endpoint="127.0.0.1:1")
    assert launch(itself, checks=True) == 1
    own = capfd.readouterr().err
    assert "means the host itself there (127.0.0.1)" in own
    elsewhere = f"--rdzv_endpoint ADDRESS:1 --workdir {tmp_path}/no -- train\n"
    for said in (err, own):
        assert f"fix: drumline launch --hosts left,right --ssh {locally} {elsewhere}" in said


def test_a_name_that_one_host_knows_is_told_to_the_others_with_its_address(tmp_path: Path, locally: str) -> None:
    there = replace(plan(locally, tmp_path, "train"), endpoint="left:29400")
    answers = {"versions": VERSIONS, "checkout": None, "cwd": True, "meeting_addresses": ["10.0.0.7"]}
    for known, problem, fix in (
        ([], "does not resolve", f"{locally} right 'echo 10.0.0.7 left | sudo tee -a /etc/hosts'"),
        (["127.0.1.1"], "means the host itself", "--rdzv_endpoint 10.0.0.7:29400"),
    ):
        sessions = [answering(there, 0, answers), answering(there, 1, {**answers, "meeting_addresses": known})]
        (found,) = look(sessions[1], replace(there, command=["doctor"]), meeting_addresses(sessions))
        assert found.host == "right" and problem in found.what and fix in found.fix


def test_a_host_with_other_versions_is_told_how_they_are_installed(tmp_path: Path, locally: str) -> None:
    there = plan(locally, tmp_path, "train", python="/opt/python")
    for package, fix in (
        ("python", "'cd '\"'\"'/src/drum line'\"'\"' && uv venv --clear --python 1.0 && uv pip install"),
        ("torch", "right /opt/python -m pip install torch==1.0"),
        ("drumline", "git pull && /opt/python -m pip install -c constraints.txt -e ."),
    ):
        other = {"versions": {**VERSIONS, package: "2.0"}, "checkout": "/src/drum line"}
        sessions = [answering(there, 0, {"versions": VERSIONS}), answering(there, 1, other)]
        (found,) = compare_versions(sessions, there)
        assert found.what == f"{package} is 2.0 there, and 1.0 on left" and fix in found.fix


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
    assert "all hosts: python: there is no /no/python\n  fix: drumline launch --hosts left,right " in err
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
        f'#!/bin/sh\ncase "$*" in *far_end*) exec {sys.executable} "$@";; esac\n'
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
                goes_on, found = session.read("stdout", pipe)
                lines += [line.text for line in found]
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


@pytest.mark.parametrize(
    ("ends", "code", "cause"),
    [
        (("exit 0", "exit 0"), 0, None),
        (("exit 75", "exit 130"), EXIT_STOPPED, None),
        (("exit 3", "exit 75"), EXIT_FAILED, "left: drumline ended with exit code 3"),
        (("exit 3", "exit 1"), 1, "right: drumline ended with exit code 1"),
        (("kill -9 $$", "exit 75"), EXIT_FAILED, "left: drumline was ended by SIGKILL"),
        (
            (
                'echo "error: rank 0 on left (process 1) lost the other ranks: reset" >&2; exit 3',
                'echo "error: rank 1 on right (process 2) failed with ValueError: x" >&2; exit 3',
            ),
            EXIT_FAILED,
            "rank 1 on right (process 2) failed with ValueError: x",
        ),
    ],
)
def test_the_worst_end_of_a_host_is_that_of_the_run_and_its_cause_the_one_that_is_told(
    tmp_path: Path,
    locally: str,
    monkeypatch: pytest.MonkeyPatch,
    ends: tuple[str, str],
    code: int,
    cause: str | None,
) -> None:
    monkeypatch.setattr(ssh_sessions, "_FOLLOW_S", 1000.0)
    there = plan(locally, tmp_path, "train")
    orders = [{**there.order(host), "argv": ["sh", "-c", end]} for host, end in zip(there.hosts, ends, strict=True)]
    sessions = [Session(host, there.ssh_line(host), order) for host, order in zip(there.hosts, orders, strict=True)]
    assert follow(sessions, lambda host, line: None, together=True) == 0
    found, error = outcome(sessions, there, stops=0)
    assert (found, error and error.problem) == (code, cause)
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


# The far end by itself


def test_a_host_that_is_only_asked_for_facts_answers_and_ends(tmp_path: Path, locally: str) -> None:
    there = plan(locally, tmp_path, "doctor")
    sessions = [Session(host, there.ssh_line(host), there.check()) for host in there.hosts]
    follow(sessions, lambda host, line: None, together=False)
    assert [look(session, there) for session in sessions] == [[], []]


def far(**order: object) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "drumline.far_end"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps({"environ": {}, "cwd": "/", "silent_s": 1000, **order}).encode() + b"\n")
    process.stdin.flush()
    assert process.stdout.readline().startswith(b'\x1edrumline {"started": ')
    return process


TRAPS = 'trap "echo saved; exit 75" TERM; echo ready; while :; do sleep 0.1; done'


@pytest.mark.parametrize("how", ["TERM", "closed", "silent", "signal"])
def test_the_far_end_lets_its_command_save_when_asked_or_when_nobody_is_there_to_ask(how: str) -> None:
    process = far(argv=["sh", "-c", TRAPS], silent_s=5 if how == "silent" else 1000)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    if how == "TERM":
        process.stdin.write(b"\nTERM\nTERM\n")
        process.stdin.flush()
    elif how == "closed":
        process.stdin.close()
        process.stdin = None
    elif how == "signal":
        process.terminate()
    assert process.wait(LIMIT_S) == 75
    assert process.stdout.read() == b'saved\n\x1edrumline {"code": 75}\n'
    process.communicate()


def test_the_far_end_kills_its_command_and_all_that_it_started_when_told_so() -> None:
    process = far(argv=["sh", "-c", f"setsid sh -c '{TRAPS}' & {TRAPS}"])
    assert process.stdin is not None and process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
    mine = psutil.Process(process.pid).children(recursive=True)
    process.stdin.write(b"KILL\n")
    process.stdin.flush()
    assert process.wait(LIMIT_S) == 128 + signal.SIGKILL and len(mine) >= 2
    assert not [child for child in mine if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    process.communicate()


def test_what_a_command_leaves_behind_ends_with_it() -> None:
    process = far(argv=["sh", "-c", "setsid sleep 1000 & exit 7"])
    assert process.wait(LIMIT_S) == 7
    out, _ = process.communicate()  # returns only once nobody holds the pipe any more
    assert out == b'\x1edrumline {"code": 7}\n'


def test_a_far_end_that_is_killed_takes_its_command_along() -> None:
    process = far(argv=["sh", "-c", "echo ready; exec sleep 1000"])
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    wait(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the end of its command")


# What is given to hosts


def test_hosts_are_given_what_steers_torch_and_what_is_named_and_no_place_among_ranks() -> None:
    steers = dict.fromkeys(("NCCL_DEBUG", "OMP_NUM_THREADS", "HF_TOKEN", "https_proxy", "PYTHONPATH"), "1")
    named = dict.fromkeys(("MINE", "CUDA_VISIBLE_DEVICES"), "1")
    others = dict.fromkeys(("HOME", "PATH", "RANK", "MASTER_PORT", "DRUMLINE_ATTEMPT"), "1")
    assert passed_on({**steers, **named, **others}, named) == {**steers, **named}
    assert passed_on({**steers, **named, **others}, []) == steers
    for name, problem in (("NO_SUCH", "there is no such variable"), ("RANK", "every rank is given its own")):
        with pytest.raises(ConfigError, match=problem):
            passed_on(others, [name])


def test_a_dry_run_shows_no_secret(tmp_path: Path) -> None:
    environ = dict.fromkeys(("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD"), SECRET)
    environ["https_proxy"] = f"http://me:{SECRET}@proxy:1"
    shown = describe(replace(plan("ssh", tmp_path, "train"), environ=environ), checks=True)
    assert SECRET not in "".join(shown) and all(name in shown[1] for name in environ)


def test_each_host_is_told_its_ranks_and_where_all_meet(tmp_path: Path) -> None:
    there = replace(plan("ssh", tmp_path, "train", "--run_dir", "run", hosts="a,me@b:4"), nproc=2)
    words = [there.order(host)["argv"][3:] for host in there.hosts]
    meet = ["--nnodes", "2", "--rdzv_endpoint", "10.1.2.3:29400"]
    assert words == [["train", "--run_dir", "run", "--nproc", slots, *meet] for slots in ("2", "4")]
    assert there.ssh_line(there.hosts[1])[-2] == "me@b"


def test_hosts_that_a_doctor_is_called_to_are_not_sent_one_first(tmp_path: Path) -> None:
    there = plan("ssh", tmp_path, "doctor")
    words = ["doctor", "--nnodes", "2", "--rdzv_endpoint", "10.1.2.3:29400", "--names", "left,right"]
    assert "argv" not in there.check() and there.order(there.hosts[0])["argv"][3:] == words
    assert "--names" not in plan("ssh", tmp_path, "train").words(there.hosts[0])
    assert plan("ssh", tmp_path, "doctor", hosts="left").words(there.hosts[0]) == ["doctor"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--hosts a", "there is nothing to run on the hosts"),
        ("--hosts a -- sample runs/x", "'sample' is not a command for hosts"),
        ("--hosts a -- train --nproc 2", "--nproc is not train's to say"),
        ("--hosts a -- train --nnodes=2", "--nnodes is not train's to say"),
        ("--hosts a -- doctor --names a", "--names is not doctor's to say"),
        ("--hosts a --rdzv_endpoint a:xyz -- train", "--rdzv_endpoint a:xyz is not HOST:PORT"),
        ("--hosts a --rdzv_endpoint a:65536 -- train", "--rdzv_endpoint a:65536 is not HOST:PORT"),
        ("--hosts a --rdzv_endpoint :1 -- train", "--rdzv_endpoint :1 is not HOST:PORT"),
        ("-- train", "the hosts are to be given in one way"),
        ("--hosts a --hostfile b -- train", "the hosts are to be given in one way"),
        ("--hosts a --nproc 0 -- train", "nproc is 0"),
        ("--hosts a --ssh no-such-ssh -- train", "there is no such program"),
        ("--hosts a --env NO_SUCH -- train", "--env NO_SUCH: there is no such variable"),
    ],
)
def test_a_command_line_that_cannot_work_is_refused_with_what_to_write(words: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        app(words.split(), exit_on_error=False, result_action="return_value")
    assert problem in raised.value.problem and raised.value.fix


def test_what_the_hosts_are_to_run_is_judged_before_any_of_them_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    for words, code, problem in (
        ("train --nheads 3", 2, "Unknown option: --nheads. Did you mean --n_heads?"),
        ("train --lr -1", 1, "lr is -1"),
        ("doctor --qick", 2, "--qick"),
    ):
        assert cli.run_command(["launch", "--hosts", "a,b", "--dry_run", "--", *words.split()]) == code
        out, err = capsys.readouterr()
        assert out == "" and problem in err and len(err.splitlines()) == 2
    assert cli.run_command(["launch", "--hosts", "a,b", "--dry_run", "--", "doctor"]) == 0


def test_the_line_to_type_again_starts_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINE", "1")
    for given in (
        ["--hosts", "a,me@b:4"],
        ["--hosts", "a,b", "--nproc", "2", "--ssh", "ssh -p 22", "--workdir", "sub", "--env", "MINE"],
        ["--hosts", "a,b", "--python", "/opt/python", "--rdzv_endpoint", "c:9"],
    ):
        assert cli.run_command(["launch", *given, "--dry_run", "--", "train", "--run_dir", "a run"]) == 0
        shown = capsys.readouterr().out
        started: list[Plan] = []
        monkeypatch.setattr("drumline.launch_ssh.launch", lambda plan, *, checks, seen=started: seen.append(plan))
        assert cli.run_command(["launch", *given, "--", "train", "--run_dir", "a run"]) == 0
        again = shlex.split(started[0].again())
        assert again[:2] == ["drumline", "launch"]
        assert cli.run_command([*again[1 : again.index("--")], "--dry_run", *again[again.index("--") :]]) == 0
        assert capsys.readouterr().out == shown


def test_hosts_of_a_file_meet_at_the_first_one_unless_told_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("me@a slots=3\nb:2\n")
    monkeypatch.chdir(tmp_path)
    for more, endpoint in ((), "a:29400"), (("--rdzv_endpoint", "c:1"), "c:1"):
        words = ["--hostfile", "hosts", "--skip_checks", "--dry_run", *more, "--", "train", "--total_steps", "9"]
        assert app(words, exit_on_error=False, result_action="return_value") == 0
        _, first, _, second = capsys.readouterr().out.splitlines()
        for line, slots in ((first, "3"), (second, "2")):
            order = json.loads(line.partition("stdin: ")[2])
            expected = ["train", "--total_steps", "9", "--nproc", slots, "--nnodes", "2", "--rdzv_endpoint", endpoint]
            assert order["argv"][3:] == expected and order["cwd"] == str(tmp_path)


def test_the_folder_to_start_in_is_sent_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = make_plan(
        ["train"],
        hosts="a",
        hostfile=None,
        nproc=None,
        ssh="ssh",
        rdzv_endpoint=None,
        workdir=Path("sub"),
        python=sys.executable,
        environ={},
    )
    assert made.workdir == f"{tmp_path}/sub"


def test_a_far_end_tells_its_versions_without_loading_torch() -> None:
    code = (
        "import sys; from drumline import far_end; far_end.facts('/', 'localhost'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    found = far_end.facts(os.getcwd(), "localhost")
    assert found["cwd"] and found["versions"]["torch"].startswith("2.") and found["meeting_addresses"]
