"""Ranks that would not train the same run are stopped before the first step, and the odd one is named."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.ranks import Outcome, _command, run_ranks, train_ranks
from helpers.small import small

FLAGS = small("--train_data_path", "text", "--run_dir", "run")


def assert_named(outcomes: list[Outcome], fact: str) -> None:
    assert [outcome.code for outcome in outcomes] == [1] * 3, outcomes[0].err
    first, *table, fix = outcomes[0].err.splitlines()
    assert first.startswith("error: the ranks would not train the same run: they differ in") and fact in first
    assert any(line.startswith(f"  rank 2 on {socket.gethostname()}: {fact} ") for line in table)
    assert fix.startswith("  fix: make") and outcomes[1].err == outcomes[2].err == ""
    assert not Path("run/metrics.jsonl").exists() or Path("run/metrics.jsonl").read_text() == ""


@pytest.mark.parametrize("flags", [["--lr", "0.5"], ["--seed", "3"], ["--save_every", "2"], ["--weight_decay", "0.3"]])
def test_a_setting_that_one_rank_has_otherwise_is_named(here: Path, flags: list[str]) -> None:
    assert_named(train_ranks(3, *FLAGS, last=flags), flags[0].removeprefix("--"))


def test_data_and_tokenizer_that_one_rank_has_otherwise_are_named(here: Path) -> None:
    other = Path("other")
    other.mkdir()
    for number in range(30):
        (other / f"{number}.txt").write_text(f"Document {number}. " + "Nothing rhymes with orange, or silver. " * 12)
    outcomes = run_ranks(
        _command, [(["train", *FLAGS],)] * 2 + [(["train", *small("--train_data_path", "other", "--run_dir", "run")],)]
    )
    assert_named(outcomes, "train_data")
    assert_named(outcomes, "tokenizer")


def _disguised(name: str, argv: list[str]) -> int:
    """A rank that has another version of something, or other weights."""
    import platform

    import torch

    import drumline
    from drumline.train import pretraining as pretrain
    from drumline.train import ranks

    if name == "torch":
        torch.__version__ = "2.0.0"  # type: ignore[assignment]
    elif name == "cuda":
        torch.version.cuda = "11.1"
    elif name == "drumline":
        drumline.__version__ = "0.0.9"
    elif name == "python":
        platform.python_version = lambda: "3.10.0"
    elif name == "nccl":
        ranks.versions = _other_nccl(ranks.versions)
    else:
        build = pretrain.build_model

        def changed(*args: object, **kwargs: object) -> torch.nn.Module:
            model = build(*args, **kwargs)  # type: ignore[arg-type]
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 1e-6
            return model

        pretrain.build_model = changed
    return _command(argv)


def _other_nccl(versions: Callable[[], dict[str, str]]) -> Callable[[], dict[str, str]]:
    return lambda: {**versions(), "nccl": "2.1"}


@pytest.mark.parametrize("name", ["torch", "cuda", "drumline", "python", "nccl", "initial weights"])
def test_a_version_or_first_weights_that_one_rank_has_otherwise_are_named(here: Path, name: str) -> None:
    arguments = [("", ["train", *FLAGS])] * 3
    plain = [(_command, (argv,)) for _, argv in arguments[:2]]
    outcomes = run_ranks(_call, [*plain, (_disguised, (name, ["train", *FLAGS]))])
    assert_named(outcomes, name)


def _call(work: Callable[..., int], arguments: tuple[object, ...]) -> int:
    return work(*arguments)


def test_a_mistake_of_one_rank_stops_all_and_is_told_once_with_whose_it_is(here: Path) -> None:
    broken = small("--train_data_path", "nowhere.txt", "--run_dir", "run")
    outcomes = run_ranks(_command, [(["train", *FLAGS],), (["train", *broken],)])
    assert [outcome.code for outcome in outcomes] == [1, 1]
    assert f"error: rank 1 on {socket.gethostname()}: nowhere.txt does not exist" in outcomes[0].err
    assert outcomes[1].err == ""
