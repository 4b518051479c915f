"""What is run over SSH, and what hosts are given."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.ssh_plans import plan

from drumline.cli import app as cli
from drumline.cli.launch import launch as app
from drumline.errors import ConfigError
from drumline.launch import remote_agent
from drumline.launch.ssh_plan import Plan, describe, make_plan, passed_on

SECRET = "canary" * 7


def test_hosts_are_given_what_steers_torch_and_what_is_named_and_no_place_among_ranks() -> None:
    steers = dict.fromkeys(("NCCL_DEBUG", "OMP_NUM_THREADS", "HF_TOKEN", "https_proxy", "PYTHONPATH"), "1")
    named = dict.fromkeys(("MINE", "CUDA_VISIBLE_DEVICES"), "1")
    others = dict.fromkeys(("HOME", "PATH", "RANK", "MASTER_PORT", "DRUMLINE_ATTEMPT"), "1")
    assert passed_on({**steers, **named, **others}, named) == {**steers, **named}
    assert passed_on({**steers, **named, **others}, []) == steers
    for name, problem in (("NO_SUCH", "it is not set here"), ("RANK", "it is set for every rank")):
        with pytest.raises(ConfigError, match=problem):
            passed_on(others, [name])


def test_several_hosts_are_given_the_secret_of_the_run_and_one_that_is_set_is_kept(tmp_path: Path) -> None:
    def given(hosts: str, **environ: str) -> dict[str, str]:
        made = make_plan(
            ["train"],
            hosts=hosts,
            hostfile=None,
            nproc=None,
            ssh="true",
            rdzv_endpoint=None,
            workdir=tmp_path,
            python="python",
            environ=environ,
        )
        orders = [made.order(host)["environ"] for host in made.hosts]
        assert all(order == orders[0] for order in orders)
        secret = orders[0].get("DRUMLINE_SECRET", SECRET)
        assert secret not in "".join(describe(made, checks=True)) + " ".join(made.ssh_line(made.hosts[0]))
        return dict(orders[0])

    made = given("a,b")["DRUMLINE_SECRET"]
    assert len(made) == 64 and made != given("a,b")["DRUMLINE_SECRET"]
    assert given("a,b", DRUMLINE_SECRET=SECRET) == {"DRUMLINE_SECRET": SECRET}
    assert given("a,b", DRUMLINE_SECRET_FILE="/s") == {"DRUMLINE_SECRET_FILE": "/s"}
    assert given("a") == {}


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
        ("--hosts a", "there is no command to run on the hosts"),
        ("--hosts a -- sample runs/x", "'sample' cannot be launched on hosts"),
        ("--hosts a -- train --nproc 2", "--nproc cannot be given to train"),
        ("--hosts a -- train --nnodes=2", "--nnodes cannot be given to train"),
        ("--hosts a -- doctor --names a", "--names cannot be given to doctor"),
        ("--hosts a --rdzv_endpoint a:xyz -- train", "--rdzv_endpoint a:xyz is not HOST:PORT"),
        ("--hosts a --rdzv_endpoint a:65536 -- train", "--rdzv_endpoint a:65536 is not HOST:PORT"),
        ("--hosts a --rdzv_endpoint :1 -- train", "--rdzv_endpoint :1 is not HOST:PORT"),
        ("-- train", "hosts must be given in exactly one way"),
        ("--hosts a --hostfile b -- train", "hosts must be given in exactly one way"),
        ("--hosts a --nproc 0 -- train", "nproc is 0"),
        ("--hosts a --ssh no-such-ssh -- train", "command not found"),
        ("--hosts a --env NO_SUCH -- train", "--env NO_SUCH: it is not set here"),
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
        monkeypatch.setattr("drumline.launch.launch", lambda plan, *, checks, seen=started: seen.append(plan))
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


def test_a_remote_agent_tells_its_versions_without_loading_torch() -> None:
    code = (
        "import sys; from drumline.launch.remote_agent import facts; facts('/', 'localhost'); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    facts = remote_agent.facts(os.getcwd(), "localhost")
    assert facts["cwd"] and facts["versions"]["torch"].startswith("2.") and facts["meeting_addresses"]
