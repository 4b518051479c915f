"""One run on several hosts, each with its own network: every way to start it, with and without a shared disk."""

import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from helpers.hosts import PORT, Host, Started, two_hosts
from helpers.small import small

from drumline.files.run_folder import RunFolder
from drumline.report.records import read_metrics

pytestmark = pytest.mark.needs("hosts")

Train = Callable[..., int]
Hosts = tuple[Host, Host]

LIMIT_S = 200.0
"""How long a start of a few ranks may take on a busy machine; one that hangs takes for ever."""
STEP = ("--batch_size", "2", "--global_batch_size", "12")
"""The same step on any number of ranks."""


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Installed as Debian and Ubuntu are: each takes its own name for 127.0.1.1, where others do not find it."""
    with two_hosts(tmp_path_factory.mktemp("hosts"), debian=True) as both:
        yield both


@pytest.fixture
def disks(text: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A folder for each host, with its own copy of the text."""
    folders = tmp_path / "disk-a", tmp_path / "disk-b"
    for folder in folders:
        shutil.copytree(text, folder / "text")
    return folders


def losses(run: Path) -> list[float]:
    return [value for record in read_metrics(run / "metrics.jsonl") for key, value in record.items() if "loss" in key]


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "drumline", "train", *small(*STEP, "--train_data_path", "text", *flags)]


def torchrun(hosts: Hosts, cwd: Path, *flags: str, nproc: Sequence[int]) -> tuple[Started, ...]:
    """Train with torchrun on both hosts: {node} in a flag is the host's number, {a} the first host's name."""
    return tuple(
        host.start(
            [
                *(sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={nproc[node]}"),
                *(flag.format(node=node, a=hosts[0].name) for flag in flags),
                *command("--run_dir", "run")[1:],
            ],
            cwd=cwd,
        )
        for node, host in enumerate(hosts)
    )


def by_variables(host: Host, arguments: Sequence[str], *, rank: int, cwd: Path) -> Started:
    """Start one of two ranks, one on each host, as a launcher other than torchrun would."""
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return host.start(arguments, cwd=cwd, env={**variables, "MASTER_ADDR": "host-a", "MASTER_PORT": str(PORT)})


def one_each(hosts: Hosts, disks: tuple[Path, Path], *flags: str) -> tuple[Started, ...]:
    """Train with a rank on each host, as srun starts them."""
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "host-a,host-b"}
    return tuple(
        host.start(command(*flags), cwd=disk, env={**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"})
        for rank, (host, disk) in enumerate(zip(hosts, disks, strict=True))
    )


def all_finish(started: Sequence[Started]) -> None:
    for each in started:
        assert each.ended(within_s=LIMIT_S) == 0, each.said


@pytest.mark.parametrize(
    ("flags", "nproc"),
    [
        pytest.param(
            ("--nnodes=2", "--node_rank={node}", "--master_addr={a}", f"--master_port={PORT}"), (2, 4), id="static"
        ),
        pytest.param(
            ("--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint={{a}}:{PORT}", "--rdzv_id=x"), (1, 1), id="c10d"
        ),
        pytest.param(
            ("--nnodes=1:2", "--rdzv_backend=c10d", f"--rdzv_endpoint={{a}}:{PORT}", "--rdzv_id=x"),
            (1, 1),
            id="elastic",
        ),
    ],
)
def test_two_hosts_train_what_one_process_does(
    hosts: Hosts, train: Train, tmp_path: Path, flags: Sequence[str], nproc: Sequence[int]
) -> None:
    all_finish(torchrun(hosts, tmp_path, *flags, nproc=nproc))
    status, ranks = RunFolder(tmp_path / "run").read_status(), sum(nproc)
    assert status["state"] == "finished" and status["host"] in ("host-a", "host-b")
    assert f"batch_size 2 x {ranks} ranks x {6 // ranks} accumulated" in (tmp_path / "run" / "train.log").read_text()
    assert train(*STEP, "--run_dir", "alone") == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), abs=1e-5)


def test_nothing_is_left_of_the_hosts(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as (a, b):
        asked = a.start(["getent", "hosts", b.name], cwd=tmp_path)
        assert asked.ended(within_s=LIMIT_S) == 0 and asked.said.split() == [b.address, b.name]
        left = b.start(["sleep", "1000"], cwd=tmp_path)
    assert left.process.returncode == -signal.SIGKILL
    assert not any(Path("/run/netns", host.namespace).exists() for host in (a, b))


def test_hosts_need_no_shared_disk_to_train_or_to_go_on(
    hosts: Hosts, disks: tuple[Path, Path], train: Train, tmp_path: Path
) -> None:
    more = ("--total_steps", "9", "--allow_change", "total_steps")
    all_finish(one_each(hosts, disks, "--run_dir", "run"))
    again = one_each(hosts, disks, "--run_dir", "run", *more)
    all_finish(again)
    assert "resuming from run/checkpoints/step-00000006" in again[0].said
    assert {path.name for path in disks[1].iterdir()} == {"text", "data"}
    assert train(*STEP, "--run_dir", "alone") == 0 and train(*STEP, "--run_dir", "alone", *more) == 0
    assert losses(disks[0] / "run") == pytest.approx(losses(tmp_path / "alone"), abs=1e-5)


def test_a_host_with_other_text_is_named_before_the_first_step(hosts: Hosts, disks: tuple[Path, Path]) -> None:
    (disks[1] / "text" / "7.txt").write_text("Document 7. All play and no work. " * 9)
    first, other = one_each(hosts, disks, "--run_dir", "run")
    assert (first.ended(within_s=LIMIT_S), other.ended(within_s=LIMIT_S)) == (1, 1), first.said + other.said
    (problem,) = (line for line in first.said.splitlines() if line.startswith("error: "))
    assert "train_data" in problem and "rank 1 on host-b: train_data" in first.said
    assert "make host-b like the others" in first.said
    assert "Traceback" not in first.said + other.said and "error: " not in other.said
    assert "step 1/6" not in first.said


def test_a_rendezvous_port_that_is_in_use_is_named(hosts: Hosts, text: Path) -> None:
    listening = (
        "import os, socket, sys; taken = socket.create_server(('', int(os.environ['MASTER_PORT']))); "
        "taken.set_inheritable(True); os.execv(sys.argv[1], sys.argv[1:])"
    )
    start = [sys.executable, "-c", listening, *command()]
    first = by_variables(hosts[0], start, rank=0, cwd=text.parent)
    assert first.ended(within_s=LIMIT_S) == 1, first.said
    assert f"error: the rendezvous port {PORT} of rank 0 on host-a is in use" in first.said
    assert "fix: choose a free port: the same MASTER_PORT" in first.said and "Traceback" not in first.said
