"""Under SLURM a process finds its place by srun's variables alone."""

import itertools
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.small import small
from helpers.warm import Warm
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.errors import ConfigError
from drumline.files.run_folder import RunFolder
from drumline.parallel.place import find_place, slurm_hosts
from drumline.parallel.world import Place
from drumline.report.records import read_metrics

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[08-09]",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
"""The last of the tasks of `srun -N2 -n4`."""
BATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu08",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "4",
}
"""The script of `sbatch -n4` itself: there are four tasks to start, and it is none of them."""


def test_a_task_of_srun_knows_its_rank_and_where_all_meet() -> None:
    place = find_place(SRUN)
    assert place == Place(rank=3, size=4, local_rank=1, master_addr="gpu08", master_port=22977)


def test_all_tasks_of_a_step_meet_at_the_same_port_and_the_next_step_at_another() -> None:
    def port(**more: str) -> int:
        return find_place({**SRUN, **more}).master_port

    assert port(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0") == port()
    assert len({port(), port(SLURM_STEP_ID="1"), port(SLURM_JOB_ID="4712")}) == 3
    assert 1024 < port(SLURM_JOB_ID="4294967295", SLURM_STEP_ID="65535") < 32768  # below the ports handed to clients


def test_a_step_on_some_of_the_jobs_hosts_meets_on_the_first_of_its_own() -> None:
    environ = {**SRUN, "SLURM_JOB_NODELIST": "gpu[07-09]", "SLURM_NTASKS": "6"}
    assert find_place(environ) == find_place(SRUN)


def test_the_meeting_point_can_be_given() -> None:
    given = find_place({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert given == replace(find_place(SRUN), master_addr="10.0.0.1", master_port=1234)


def test_torchruns_variables_come_before_slurms() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "29400"}
    assert find_place({**SRUN, **torchrun}) == Place(5, 8, 1, "127.0.0.1", 29400)


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param(BATCH, id="batch script"),
        pytest.param({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, id="step of one task"),
        pytest.param({"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4"}, id="salloc"),
    ],
)
def test_what_srun_did_not_start_as_one_of_several_is_alone(environ: Mapping[str, str]) -> None:
    assert find_place(environ) == Place()


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "MASTER_PORT"])
def test_a_variable_that_is_no_number_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 'many'"):
        find_place({**SRUN, name: "many"})


@pytest.mark.parametrize(
    ("short", "hosts"),
    [
        ("localhost", "localhost"),
        ("a[1-2,07],b", "a1 a2 a07 b"),
        ("n[98-101]", "n98 n99 n100 n101"),
        ("n[08-11,1-2],login", "n08 n09 n10 n11 n1 n2 login"),
        ("n[001,2,003-004]", "n001 n2 n003 n004"),
        ("rack0_blade[0-1],rack1_blade[0-1]", "rack0_blade0 rack0_blade1 rack1_blade0 rack1_blade1"),
        ("gpu-a-1.x.y,gpu-a-2.x.y", "gpu-a-1.x.y gpu-a-2.x.y"),
    ],
)
def test_host_lists_are_written_out_as_scontrol_does(short: str, hosts: str) -> None:
    assert slurm_hosts(short) == hosts.split()


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    """What stands between commas in brackets, and the numbers it stands for."""
    first, more, zeros = draw(st.integers(0, 1200)), draw(st.integers(0, 12)), draw(st.integers(0, 2))
    width = len(str(first)) + zeros
    numbers = [str(number).zfill(width) for number in range(first, first + more + 1)]
    return (f"{numbers[0]}-{numbers[-1]}" if more else numbers[0]), numbers


@settings(deadline=None)
@given(st.lists(st.tuples(st.from_regex(r"[a-z][a-z0-9._-]{0,5}", fullmatch=True), st.lists(ranges())), min_size=1))
def test_any_host_list_is_written_out_whole_and_in_order(groups: list[tuple[str, list[tuple[str, list[str]]]]]) -> None:
    short = ",".join(stem + (f"[{','.join(s for s, _ in inside)}]" if inside else "") for stem, inside in groups)
    hosts = [stem + number for stem, inside in groups for _, numbers in inside or [("", [""])] for number in numbers]
    assert slurm_hosts(short) == hosts


def free_job() -> str:
    """A job id whose port nobody uses."""
    for job in itertools.count(os.getpid()):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", find_place({**SRUN, "SLURM_JOB_ID": str(job)}).master_port)):
                return str(job)
    raise AssertionError


def test_two_tasks_train_what_one_process_does(train: Callable[..., int], text: Path, tmp_path: Path) -> None:
    step = ("--batch_size", "2", "--global_batch_size", "8", "--train_data_path", str(text))
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    srun = {
        "SLURM_JOB_ID": free_job(),
        **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"), "localhost"),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"), "2"),
        **dict.fromkeys(("SLURM_STEP_ID", "SLURM_NODEID"), "0"),
    }
    tasks = [
        Warm(
            [sys.executable, "-m", "drumline", "train", *small(*step, "--run_dir", "run")],
            env={**own, **srun, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            cwd=tmp_path,
        )
        for rank in range(2)
    ]
    try:
        assert [task.wait(200) for task in tasks] == [0, 0]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    assert RunFolder(tmp_path / "run").read_status()["state"] == "finished"
    assert "batch_size 2 x 2 ranks x 2 accumulated" in (tmp_path / "run" / "train.log").read_text()
    assert train(*step, "--run_dir", "alone") == 0
    together, alone = (
        [record["loss"] for record in read_metrics(tmp_path / run / "metrics.jsonl") if "loss" in record]
        for run in ("run", "alone")
    )
    assert len(together) == 6 and together == pytest.approx(alone, abs=1e-5)
