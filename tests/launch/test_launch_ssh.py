"""One run on two hosts over SSH: it starts on both, fails with one cause, and leaves nothing behind however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from helpers.small import small
from helpers.ssh_plans import script
from helpers.sshd import LIMIT_S, Cluster, two_hosts_with_sshd, wait
from helpers.warm import warm_programs

from drumline.errors import EXIT_FAILED, EXIT_STOPPED
from drumline.files.run_folder import RunFolder

pytestmark = pytest.mark.needs("hosts", "sshd", "bash")

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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with two_hosts_with_sshd(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """For the hosts, where importing torch would take most of the time."""
    return str(warm_programs(tmp_path_factory.mktemp("warm") / "programs") / "python")


@pytest.fixture
def nothing_left(cluster: Cluster) -> Callable[[], None]:
    """Waits until both hosts run only what they did before the test."""
    before = {host.name: cluster.pids(host) for host in (cluster.a, cluster.b)}

    def check() -> None:
        for host in (cluster.a, cluster.b):
            wait(lambda host=host: cluster.pids(host) <= before[host.name], f"an empty {host.name}")  # type: ignore[misc]

    return check


def train_flags(*flags: str) -> list[str]:
    return ["--", "train", *small("--train_data_path", "text", *STEP, *flags)]


def test_two_hosts_train_the_bits_of_one_process_and_run_what_the_dry_run_shows(
    cluster: Cluster, python: str, train: Callable[..., int], tmp_path: Path, nothing_left: Callable[[], None]
) -> None:
    recorder = tmp_path / "recorder"
    script(recorder, RECORDER)
    ssh, flags = f"{recorder} -F {cluster.folder}/ssh_config", train_flags("--run_dir", "run")
    environ = {"HF_TOKEN": SECRET, "NOT_PASSED_ON": "x"}
    shown = cluster.launch(*BOTH, "--python", python, "--dry_run", *flags, cwd=tmp_path, env=environ, ssh=ssh)
    assert shown.ended(within_s=LIMIT_S) == 0 and SECRET not in shown.said and not (tmp_path / "run").exists()
    started = cluster.launch(*BOTH, "--python", python, *flags, cwd=tmp_path, env=environ, ssh=ssh)
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
    orders = [line for line in Path(f"{recorder}.told").read_text().splitlines() if line.startswith("{")]
    assert sorted(" ".join(shlex.split(line)) for line in dry[::2]) == sorted(f"{recorder} {call}" for call in calls)
    (of_the_run,) = {json.loads(line)["environ"]["DRUMLINE_SECRET"] for line in orders}
    hidden = [line.replace(SECRET, "***").replace(of_the_run, "***") for line in orders]
    assert sorted(dry[1::2]) == sorted(hidden)
    assert not any(of_the_run in line for line in (*lines, *said)) and len(of_the_run) == 64
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert files and not any(of_the_run.encode() in path.read_bytes() for path in files)
    assert all(SECRET in line and "NOT_PASSED" not in line for line in orders)
    assert any("drumline.launch.remote_agent" in line for line in lines) and not any(SECRET in line for line in lines)
    assert train(*STEP, "--run_dir", "alone") == 0
    together, alone = (RunFolder(tmp_path / name).read_status() for name in ("run", "alone"))
    assert together["state"] == "finished" and together["weights_sha256"] == alone["weights_sha256"]
    nothing_left()


def command_lines(cluster: Cluster) -> set[str]:
    """What `ps` would show on both hosts."""
    lines = set()
    for host in (cluster.a, cluster.b):
        for pid in cluster.pids(host):
            with contextlib.suppress(psutil.Error):
                lines.add(" ".join(psutil.Process(pid).cmdline()))
    return lines


def test_a_rank_that_raises_on_one_host_is_the_one_cause_told_at_the_end_with_its_traceback(
    cluster: Cluster, python: str, text: Path, tmp_path: Path, nothing_left: Callable[[], None]
) -> None:
    (tmp_path / "bad.py").write_text(MODEL)
    flags = train_flags("--model", "bad:Bad", "--max_restarts", "0", "--run_dir", "run")
    started = cluster.launch(*BOTH, "--python", python, "--skip_checks", *flags, cwd=tmp_path)
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
    cluster: Cluster, python: str, tmp_path: Path, nothing_left: Callable[[], None]
) -> None:
    started = cluster.launch(*BOTH, "--python", python, "--skip_checks", *train_flags("--n_heads", "3"), cwd=tmp_path)
    assert started.ended(within_s=LIMIT_S) == 1, started.said
    last = [line for line in started.said.splitlines() if not line.startswith("host-")]
    assert len(last) == 2 and "d_model 16 cannot be divided over 3 heads" in last[0] and last[1].startswith("  fix: ")
    assert last[0].startswith(("error: host-a: ", "error: host-b: ")) and "Traceback" not in started.said
    nothing_left()


def test_ctrl_c_saves_and_ends_all_of_it(
    cluster: Cluster, python: str, text: Path, tmp_path: Path, nothing_left: Callable[[], None]
) -> None:
    started = cluster.launch(
        *BOTH, "--python", python, "--skip_checks", *train_flags("--run_dir", "run", *LONG), cwd=tmp_path
    )
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
    errors = {line.split(": ")[1]: (line, fix) for line, fix in pairwise(lines) if "error: " in line}
    for host, problem, fix in (
        ("nowhere", "its name does not resolve here", "fix: echo ADDRESS nowhere | sudo tee -a /etc/hosts"),
        ("refuses", "no ssh server is running there", "systemctl start ssh"),
        ("stranger", "its host key is unknown", f"fix: {ssh} stranger true"),
        ("locked", "ssh login without a password is not set up", "fix: ssh-copy-id locked"),
    ):
        assert problem in errors[host][0] and fix in errors[host][1], started.said
    assert set(errors) == {"nowhere", "refuses", "stranger", "locked"} and "Traceback" not in started.said


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
    assert len(errors) == 1 and errors[0].startswith("error: host-b: versions: torch is 9.9 there, but 2.")
    assert "-m pip install torch==2." in started.said and not (tmp_path / "run").exists()


def test_doctors_on_two_hosts_meet_over_ssh_and_one_tells_what_lies_between_them(
    cluster: Cluster, tmp_path: Path
) -> None:
    script(tmp_path / "ssh", f'#!/bin/sh\nexec {shutil.which("ssh")} -F {cluster.folder}/ssh_config "$@"\n')
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    doctor = [sys.executable, "-m", "drumline", "doctor", "--hosts", "host-a,host-b", "--quick"]
    started = cluster.a.start(doctor, cwd=tmp_path, env=environ)
    assert started.ended(within_s=LIMIT_S) == 0, started.said
    met = [line for line in started.said.splitlines() if "2 hosts joined at host-a:29400: host-a, host-b" in line]
    assert len(met) == 1 and met[0].startswith("host-a | ok"), started.said
    assert "host-b | " in started.said
