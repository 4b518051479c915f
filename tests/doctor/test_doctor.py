"""`drumline doctor` says what a machine is like and what to type, and `drumline train` looks first."""

from __future__ import annotations

import json
import resource
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.cli.app import run_command
from drumline.config.settings import RanksConfig, RunConfig, TrainConfig
from drumline.doctor import gpus, machine
from drumline.doctor.checkup import findings_before
from drumline.doctor.environment import BETWEEN_RANKS
from drumline.doctor.finding import Finding
from drumline.doctor.hosts.check import HostsReport
from drumline.doctor.hosts.rendezvous import Rendezvous
from drumline.errors import EXIT_USER
from drumline.network.interfaces import free_port
from drumline.parallel.world import Place

Train = Callable[..., int]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG"):
        monkeypatch.delenv(name, raising=False)


def well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine lacks, let it be well."""
    fine = [("check_clock", "clock"), ("check_shared_memory", "/dev/shm")]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (4096, 4096))
    for name, check in fine:
        monkeypatch.setattr(machine, name, lambda *args, check=check, **more: Finding(check, "ok", "fine"))


def test_doctor_looks_at_everything_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    well(monkeypatch)
    assert run_command(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["host"] and report["state"] in ("ok", "warning")
    checks = {finding["check"] for finding in report["findings"]}
    expected = {"system", "Python", "torch", "CUDA", "CPU products", "compiler", "disk", "clock", "network"}
    assert expected | {"open files", "OMP_NUM_THREADS"} <= checks
    assert all(finding["fix"] for finding in report["findings"] if finding["state"] != "ok")
    assert list(tmp_path.iterdir()) == []


def test_each_check_is_a_line_and_what_is_not_well_has_its_fix_beneath(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    well(monkeypatch)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope")
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    assert run_command(["doctor", "--quick", "--run_dir", "runs"]) == EXIT_USER
    lines = capsys.readouterr().out.splitlines()
    failed = next(number for number, line in enumerate(lines) if line.startswith("failed   GLOO_SOCKET_IFNAME is nope"))
    assert lines[failed + 1].strip().startswith("fix: export GLOO_SOCKET_IFNAME=")
    warned = next(number for number, line in enumerate(lines) if line.startswith("warning  OMP_NUM_THREADS is 4096"))
    assert lines[warned + 1].strip().startswith("fix: export OMP_NUM_THREADS=")
    assert any(line.startswith(f"ok       disk         {tmp_path}/runs") for line in lines)
    assert lines[-1].endswith(" checks: 1 failed, 1 warning")


def test_an_address_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    finding = [Finding("network", "ok", "eth0 fd00::b:1 [red]"), Finding("disk", "warning", "full", "rm x", host="b")]
    monkeypatch.setattr("drumline.doctor.all_findings", lambda *args, **more: finding)
    assert run_command(["doctor"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "ok       network      eth0 fd00::b:1 [red]" and shown[1] == "warning  disk         b: full"


def test_hosts_that_are_asked_for_or_that_a_launcher_started_check_each_other(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    asked: list[Rendezvous] = []

    def together(rendezvous: Rendezvous, **how: Any) -> HostsReport:
        asked.append(rendezvous)
        closed = Finding("port 29500", "failed", "closed", "ufw allow 29500/tcp", host="b")
        return HostsReport((closed,), names={0: "a", 1: "b"}, tells=rendezvous.address == "b")

    monkeypatch.setattr("drumline.doctor.check_hosts", together)
    monkeypatch.setattr("drumline.doctor.all_findings", lambda *args, **more: [])
    assert run_command(["doctor", "--nnodes", "2", "--rdzv_endpoint", "b:29500"]) == EXIT_USER
    assert "b: closed" in capsys.readouterr().out
    for name, value in {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    assert run_command(["doctor"]) == EXIT_USER
    assert [(each.address, each.hosts, each.number) for each in asked] == [("b", 2, None), ("a", 2, 1)]
    assert "see the output of a" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "problem", "fix"),
    [
        ("--nnodes 0", "nnodes is 0", "give --nnodes a value of 1 or more"),
        ("--patience -1", "patience is -1", "give --patience a value of 0 or more, in seconds"),
        ("--hosts a,b --patience nan", "patience is nan", "give --patience a value of 0 or more, in seconds"),
        ("--nnodes 2", "--nnodes 2 needs a rendezvous", "drumline doctor --nnodes 2 --rdzv_endpoint HOST:29400"),
        ("--rdzv_endpoint b:1", "need --nnodes", "drumline doctor --nnodes 2 --rdzv_endpoint b:1"),
        ("--names a,b,c", "need --nnodes", "drumline doctor --nnodes 3 --rdzv_endpoint HOST:29400"),
        (
            "--names a,b,c --nnodes 2 --rdzv_endpoint b:1",
            "--names lists 3 hosts",
            "drumline doctor --nnodes 3 --rdzv_endpoint b:1 --names a,b,c",
        ),
        ("--hosts a,b --nnodes 2", "--hosts already lists 2", "drumline doctor --hosts a,b"),
        ("--hosts a,b --names a,b", "--hosts already lists 2", "drumline doctor --hosts a,b"),
        (
            "--hosts a,b --json",
            "--json cannot be combined",
            "on each host: drumline doctor --nnodes 2 --rdzv_endpoint a:29400 --json",
        ),
        ("--hosts a --json", "--json cannot be combined", "on each host: drumline doctor --json"),
    ],
)
def test_flags_that_cannot_work_are_refused_in_two_lines(flags: str, problem: str, fix: str, capsys: Captured) -> None:
    assert run_command(["doctor", *flags.split()]) == EXIT_USER
    printed = capsys.readouterr()
    first, second = printed.err.splitlines()
    assert problem in first and second == f"  fix: {fix}" and printed.out == ""


def test_over_ssh_the_hosts_are_told_where_to_meet_and_what_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def over_ssh(*words: str, **how: Any) -> int:
        asked.append((words, how))
        return 0

    monkeypatch.setattr("drumline.cli.launch.over_ssh", over_ssh)
    assert run_command("doctor --hosts a,b --rdzv_endpoint b:1 --quick --data x --patience 5".split()) == 0
    words = ("doctor", "--run_dir", "runs", "--patience", "5.0", "--data", "x", "--quick")
    assert asked == [(words, {"hosts": "a,b", "rdzv_endpoint": "b:1"})]


def test_a_host_that_is_missing_is_named_where_names_are_given(tmp_path: Path, capsys: Captured) -> None:
    own = socket.gethostname()
    flags = ["--rdzv_endpoint", f"{own}:{free_port()}", "--names", f"root@{own},gone.invalid", "--patience", "0.2"]
    command = ["doctor", "--quick", "--json", "--run_dir", str(tmp_path), "--nnodes", "2", *flags]
    assert run_command(command) == EXIT_USER
    (finding,) = [each for each in json.loads(capsys.readouterr().out)["findings"] if each["check"] == "rendezvous"]
    assert finding["host"] == "gone.invalid" and finding["what"].endswith(f": {own}; missing: gone.invalid")


def test_one_process_of_each_host_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    with socket.socket() as listener:  # as torchrun does
        listener.bind(("", 0))
        listener.listen()
        started = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
        }
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", **started}.items():
            monkeypatch.setenv(name, value)
        assert run_command(["doctor", "--json", "--run_dir", str(tmp_path)]) == 0
        findings = json.loads(capsys.readouterr().out)["findings"]
        assert [each["state"] for each in findings if each["check"].startswith("MASTER_")] == ["ok", "ok"]
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert run_command(["doctor"]) == 0
    assert capsys.readouterr().out == ""


def test_a_torch_that_does_not_load_is_said_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run_command(["doctor", "--json", "--run_dir", str(tmp_path)]) == EXIT_USER
    findings = json.loads(capsys.readouterr().out)["findings"]
    (finding,) = [finding for finding in findings if finding["check"] == "torch"]
    assert finding["state"] == "failed" and finding["fix"] == "pip install --force-reinstall torch"


def test_train_says_nothing_on_a_machine_that_is_well(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    well(monkeypatch)
    assert train("--run_dir", "run", "--total_steps", "1") == 0
    assert capsys.readouterr().err == ""


def test_train_warns_goes_on_and_says_how_to_skip_the_checks(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    well(monkeypatch)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (512, 4096))
    assert train("--run_dir", "run", "--total_steps", "1") == 0
    few = "warning: open files: limit 512: ranks, sockets and data files need 1024\n  fix: ulimit -n 4096\n"
    assert capsys.readouterr().err == f"{few}to skip these checks: --doctor off\n"
    # Whether the machine is looked at may change in a run that goes on.
    assert train("--run_dir", "run", "--total_steps", "1", "--doctor", "off") == 0
    assert capsys.readouterr().err == ""


def test_a_rank_that_cannot_find_rank_0_says_so_and_why(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    with socket.socket() as bound_socket:
        bound_socket.bind(("127.0.0.1", 0))  # and does not listen
        place = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**place, "MASTER_PORT": str(bound_socket.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("drumline.cli.doctor._RANK_0_S", 1.0)
        monkeypatch.setattr("drumline.cli.doctor._SAY_S", 0.1)
        assert train() == EXIT_USER
    stderr = capsys.readouterr().err
    assert "to answer (refused); start the run there too\n" in stderr
    assert "nothing listens there, or a firewall rejects it\n  fix: start the run on 127.0.0.1 too" in stderr


def test_train_refuses_at_once_what_cannot_work(train: Train, tmp_path: Path, capsys: Captured) -> None:
    Path("file").touch()
    assert train("--run_dir", "file/run") == EXIT_USER
    error_lines = capsys.readouterr().err.splitlines()
    assert error_lines[0] == f"error: disk: {tmp_path}/file/run is not writable (Not a directory)"
    assert error_lines[1] == "  to skip these checks: --doctor off"
    assert error_lines[2].startswith("  fix: drumline train --run_dir ")
    assert not Path("data").exists()  # nothing was prepared for it


def before(*, ranks: int = 0, place: Place | None = None, **run: Any) -> dict[str, Finding]:
    hosts = run.pop("nnodes", "1")
    config = TrainConfig(run=RunConfig(**run), ranks=RanksConfig(nnodes=hosts))
    return {finding.check: finding for finding in findings_before(config, place or Place(), ranks=ranks)}


def test_a_variable_ends_only_a_run_that_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = str(tmp_path)
    for name, value in {"GLOO_SOCKET_IFNAME": "nope", "MASTER_PORT": "abc", "MASTER_ADDR": "x.invalid"}.items():
        monkeypatch.setenv(name, value)
    assert not [name for name in before(run_dir=run_dir) if name.startswith(BETWEEN_RANKS)]
    launched = before(run_dir=run_dir, ranks=2)
    assert launched["GLOO_SOCKET_IFNAME"].state == launched["MASTER_PORT"].state == "failed"
    # A rank that left before it met the others would keep them waiting.
    started = before(run_dir=run_dir, place=Place(rank=0, size=2))
    assert started["GLOO_SOCKET_IFNAME"].state == started["MASTER_PORT"].state == "warning"


def test_the_run_folder_is_the_business_of_the_host_that_has_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    absent = str(tmp_path / "file" / "run")
    assert before(run_dir=absent)["disk"].state == "failed"
    assert before(run_dir=absent, ranks=1, nnodes="2")["disk"].state == "warning"
    assert "disk" not in before(run_dir=absent, place=Place(rank=2, size=4))


def test_ranks_that_are_started_again_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert before() == {}


def test_what_a_run_asks_for_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = str(tmp_path)
    monkeypatch.setattr(gpus, "cpu_products", lambda: {"float32": [0, 0.1], "ended": "SIGILL"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not {"compiler", "CUDA", "CPU products"} & before(run_dir=run_dir).keys()
    assert before(run_dir=run_dir, compile=True)["compiler"].state == "failed"
    assert before(run_dir=run_dir, device="cuda")["CUDA"].state == "failed"
    assert before(run_dir=run_dir, device="cpu", dtype="bfloat16")["CPU products"].state == "failed"


def test_room_is_asked_for_all_checkpoints_that_will_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk(folder: Path, *, speed: bool) -> machine.Disk:
        return machine.Disk(folder=folder, existing=tmp_path, free_bytes=70_000_000)

    monkeypatch.setattr(machine, "measure_disk", disk)
    keeping: dict[str, Any] = {"run_dir": str(tmp_path / "run"), "keep_best": False}
    assert before(**keeping, keep_checkpoints=1)["disk"].state == "ok"  # two of 33 MB: one is written before one goes
    finding = before(**keeping, keep_checkpoints=2)["disk"]
    assert finding.state == "warning" and "the run's checkpoints will take about 88.5MB" in finding.what
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model-1-of-1").write_bytes(bytes(33_000_000))  # its room will be free again
    assert before(**keeping, keep_checkpoints=2)["disk"].state == "ok"
