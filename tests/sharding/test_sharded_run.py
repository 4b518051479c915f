"""Sharding does not change the run: the same curve, with --bitwise the same bits."""

import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.ranks import TIMEOUT_S, train_ranks
from helpers.small import small
from helpers.warm import run_warm

from drumline.cli.app import run_command
from drumline.files.run_folder import RunFolder
from drumline.report.records import read_metrics

# Seven micro-batches of two: no number of ranks from 2 to 4 divides them evenly.
DATA = "--train_data_path train.bin --valid_data_path valid.bin".split()
MORE = "--batch_size 2 --global_batch_size 14 --dropout 0.2 --eval_every 3 --n_layers 2".split()
FLAGS = small(*DATA, *MORE, "--recipe", "classic")


@pytest.fixture(autouse=True)
def tokens(here: Path) -> None:
    """Without a tokenizer: a sample at the end of each run would take longer than the run."""
    draw = np.random.default_rng(0)
    for name in ("train.bin", "valid.bin"):
        draw.integers(60, size=4096, dtype=np.uint16).tofile(name)


def train(size: int, run: str, *flags: str) -> None:
    for outcome in train_ranks(size, *FLAGS, "--run_dir", run, *flags):
        assert outcome.code == 0, outcome.err


def losses(run: str, key: str = "loss") -> list[float]:
    return [record[key] for record in read_metrics(Path(run) / "metrics.jsonl") if key in record]


def sha256(run: str) -> str:
    status = RunFolder(Path(run)).read_status()
    assert status["state"] == "finished"
    return str(status["weights_sha256"])


@pytest.mark.parametrize(("size", "shard"), [(2, "full"), (3, "full"), (4, "2")])
def test_the_curve_of_a_sharded_run_is_that_of_the_plain_one(here: Path, size: int, shard: str) -> None:
    train(1, "plain")
    train(size, "sharded", "--shard", shard)
    for key in ("loss", "grad_norm", "valid_loss"):
        assert losses("sharded", key) == pytest.approx(losses("plain", key), rel=1e-5)


def test_the_start_says_which_kernels_are_in_use(here: Path) -> None:
    first, second = train_ranks(2, *FLAGS, "--run_dir", "run", "--shard", "full")
    said = "shard  full: loss without whole logits; no Triton kernels; no kernels for whole models, no CUDA graphs"
    assert said in first.out.splitlines() and second.out == ""
    (plain,) = train_ranks(1, *FLAGS, "--run_dir", "plain")
    assert "shard " not in plain.out


MODERN = "--preset modern-tiny --recipe modern"


@pytest.mark.long
def test_five_and_six_ranks_have_the_bits_of_one(here: Path) -> None:  # two to four: below
    runs = [(1, "none"), (5, "full"), (6, "2")]
    for size, shard in runs:
        train(size, f"{size}-{shard}", "--shard", shard, "--bitwise", "--grad_clip", "0.3")
    assert len({sha256(f"{size}-{shard}") for size, shard in runs}) == 1


@pytest.mark.parametrize("more", ["--preset modern-tiny --recipe portable --n_kv_heads 1", MODERN])
def test_bitwise_gives_the_same_bits_at_any_sharding(here: Path, more: str) -> None:
    runs = [(1, "none"), (1, "full"), (2, "full"), (3, "host"), (4, "2")]
    for size, shard in runs:
        train(size, f"{size}-{shard}", "--shard", shard, "--bitwise", "--grad_clip", "0.3", *more.split())
    assert len({sha256(f"{size}-{shard}") for size, shard in runs}) == 1
    assert losses("1-none", "grad_norm") == losses("4-2", "grad_norm")
    assert max(losses("1-none", "grad_norm")) > 0.3  # clipped


@pytest.mark.parametrize(
    ("flags", "problem"),
    [("--shard 2", "groups of 2"), ("--shard full --dtype float16", "float16"), ("--offload optimizer", "not sharded")],
)
def test_what_cannot_be_sharded_is_refused_in_two_lines(here: Path, flags: str, problem: str) -> None:
    outcomes = train_ranks(3, *FLAGS, "--run_dir", "run", *flags.split())
    assert [outcome.code for outcome in outcomes] == [1, 1, 1]
    assert problem in outcomes[0].err


MIXING = """
import torch

def muon(model, optim):
    return torch.optim.Muon([each for each in model.parameters() if each.dim() == 2])
"""


def test_an_optimizer_that_mixes_rows_is_refused_in_two_lines(here: Path) -> None:
    (here / "mixing.py").write_text(MIXING)
    first, second = train_ranks(2, *FLAGS, "--run_dir", "run", "--shard", "full", "--optimizer", "mixing:muon")
    assert first.code == second.code == 1 and second.err == ""
    problem, fix = first.err.splitlines()
    assert problem.endswith("torch.optim.Muon mixes the rows of a weight, which sharding gives to different ranks")
    assert "such as torch.optim.AdamW" in fix and "--optimizer muon" in fix


@pytest.mark.parametrize(
    ("flags", "problem"),
    [("--offload optimizer", "not sharded"), ("--shard full --dtype float16", "float16"), ("--shard 3", "groups of 3")],
)
def test_a_dry_run_refuses_what_a_run_does(
    here: Path, flags: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["train", "--dry_run", *FLAGS, "--nproc", "2", *flags.split()]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert problem in lines[0] and lines[1].startswith("  fix: ") and len(lines) == 2


def test_a_run_goes_on_under_any_other_sharding_with_the_same_bits(here: Path) -> None:
    own = [*MODERN.split(), "--bitwise", "--activation_checkpointing", "block", "--save_every", "2"]
    train(1, "plain", *own)
    # Each of them begins with a checkpoint that the one before has written.
    for size, shard, resumed in (
        (3, "full", "auto"),
        (1, "none", "2"),
        (4, "2", "4"),
        (6, "3", "2"),
        (5, "full", "4"),
        (1, "full", "2"),
        (2, "none", "4"),
        (3, "full", "2"),
    ):
        train(size, "moved", *own, "--shard", shard, "--resume_from", resumed)
        assert sha256("moved") == sha256("plain")


def test_an_offloaded_run_has_the_same_bits_and_goes_on_without_offloading(here: Path) -> None:
    own = [*MODERN.split(), "--bitwise", "--save_every", "2", "--grad_clip", "0.3"]
    train(1, "plain", *own)
    train(2, "offloaded", *own, "--shard", "full", "--offload", "optimizer")
    assert losses("offloaded") == losses("plain") and sha256("offloaded") == sha256("plain")
    for offload in ("none", "optimizer"):  # each from what the one before has written
        train(2, "offloaded", *own, "--shard", "full", "--offload", offload, "--resume_from", "2")
        assert sha256("offloaded") == sha256("plain")


KILLING = """
import os, signal
from pathlib import Path

class Sink:
    def __init__(self, folder):
        pass

    def write(self, record):
        if record.get("step") == 4 and not Path("killed-once").exists():
            Path("killed-once").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self):
        pass
"""


@pytest.mark.needs_shm
def test_a_sharded_run_whose_rank_is_killed_goes_on_by_itself_and_ends_with_the_same_bits(here: Path) -> None:
    (here / "killing.py").write_text(KILLING)
    train(1, "plain", *MODERN.split(), "--bitwise")
    words = [*FLAGS, *MODERN.split(), "--bitwise", "--shard", "full", "--nproc", "2", "--sink", "killing:Sink"]
    done = run_warm(
        [sys.executable, "-m", "drumline", "train", *words, "--snapshot_every", "1", "--run_dir", "killed"],
        cwd=here,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0 and "was killed by SIGKILL" in done.stderr, done.stderr
    assert sha256("killed") == sha256("plain")
