"""Wrong numbers do not get far: a bad loss is computed again, skipped or gone back from."""

import math
import os
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.poisoned import SAMPLES, events, fit, make, sample_of, steps
from helpers.ranks import run_ranks, train_ranks
from helpers.small import small
from torch import nn
from torch.nn import functional as F

from drumline.checkpoint.checkpoints import open_checkpoint
from drumline.errors import EXIT_FAILED, EXIT_USER, TrainingError
from drumline.files.run_folder import RunFolder
from drumline.train.history import History
from drumline.trainer.trainer import Trainer

HOST = socket.gethostname()


def _fit(run_dir: str, settings: dict[str, Any]) -> str:
    """As a rank: the weights' fingerprint."""
    return fit(run_dir, **settings).weights_sha256


def _fit_with_a_passing_fault(run_dir: str) -> str:
    trainer = make(run_dir, bitwise=False)
    clean, rank, computed = trainer.setup.batches.micro_batch, trainer.setup.world.rank, Counter[int]()

    def once(step: int, index: int) -> Any:
        inputs, targets = clean(step, index)
        computed[step] += 1
        return (inputs * math.nan if rank == 1 and step == 2 and computed[step] == 1 else inputs), targets

    if run_dir != "undisturbed":
        trainer.setup.batches.micro_batch = once  # type: ignore[method-assign]
    return trainer.fit(total_steps=5).weights_sha256


def test_a_passing_fault_on_one_rank_is_computed_again_and_changes_nothing(here: Path) -> None:
    undisturbed = run_ranks(_fit_with_a_passing_fault, [("undisturbed",)] * 2)
    outcomes = run_ranks(_fit_with_a_passing_fault, [("run",)] * 2)
    assert len({outcome.value for outcome in undisturbed + outcomes}) == 1, outcomes[0].err
    (event,) = events("run", "not finite")
    assert event["step"] == 3 and event["where"] == f"on rank 1 ({HOST})" and event["documents"].count("sample") == 6
    assert [event["step"] for event in events("run", "computed again")] == [3]
    assert f"step 3: loss nan, gradient norm nan: NaN or Inf on rank 1 ({HOST})" in outcomes[0].out
    assert "a transient hardware fault" in outcomes[0].out and outcomes[1].out == ""
    assert RunFolder(Path("run")).read_status()["skipped_steps"] == 0


def test_bad_data_on_one_rank_is_skipped_by_all_and_named(here: Path) -> None:
    bad = sample_of(3, micro_batch=5)
    outcomes = run_ranks(_fit, [("run", {"poison": {bad: math.inf}})] * 3)
    (alone,) = run_ranks(_fit, [("alone", {"poison": {bad: math.inf}})])
    assert {outcome.value for outcome in outcomes} == {alone.value}, [outcome.err for outcome in outcomes]
    (event,) = events("run", "not finite")
    assert event["where"] == f"on rank 2 ({HOST})" and f"sample {bad}," in event["documents"] + ","
    assert [event["step"] for event in events("run", "skipped")] == [3]
    assert steps("run") == [1, 2, 3, 4, 5] and RunFolder(Path("run")).read_status()["skipped_steps"] == 1


def test_data_without_document_names_does_not_clear_the_rank_that_erred(here: Path) -> None:
    trainer = make("run", poison={sample_of(2): math.nan})
    trainer.setup.batches.names = lambda step, index=None: []  # type: ignore[method-assign]
    trainer.fit(total_steps=3)
    (event,) = events("run", "not finite")
    assert event["where"] == f"on rank 0 ({HOST})" and event["documents"] == "not known"


def test_a_step_that_is_skipped_leaves_running_statistics_alone_too(here: Path) -> None:
    torch.manual_seed(7)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1))
    data = [(torch.full((6,), math.nan if n == 3 else float(n)), torch.ones(1)) for n in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, data, optimizer, loss=F.mse_loss, run_dir="run", batch_size=2, device="cpu")
    trainer.fit(total_steps=2)
    assert RunFolder(Path("run")).read_status()["skipped_steps"] == 1
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())
    assert int(model.state_dict()["0.num_batches_tracked"]) == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"on_nonfinite": "halt"}, "1 such steps in a row"),
        ({"on_nonfinite": "skip", "max_nonfinite": 2}, "2 such steps in a row"),
        ({"on_nonfinite": "rollback", "max_rollbacks": 2}, "after 2 rollbacks"),
        ({"on_nonfinite": "rollback", "max_rollbacks": 0}, "after 0 rollbacks"),
    ],
)
def test_a_run_that_stays_bad_gives_up_at_its_limit_and_names_documents(
    here: Path, settings: dict[str, Any], says: str
) -> None:
    poison = dict.fromkeys(range(SAMPLES), math.nan)
    with pytest.raises(TrainingError, match=rf"{says}; its documents: sample \d+, .* and 4 more") as raised:
        fit("run", poison=poison, **settings)
    assert raised.value.exit_code == EXIT_FAILED and "remove those documents" in raised.value.fix
    status = RunFolder(Path("run")).read_status()
    assert status["state"] == "failed" and says in status["cause"]


def test_bad_steps_that_are_not_in_a_row_do_not_end_a_run(here: Path) -> None:
    poison = {sample_of(step): math.nan for step in (1, 3, 5)}
    assert fit("run", poison=poison, max_nonfinite=2).state == "finished"
    assert RunFolder(Path("run")).read_status()["skipped_steps"] == 3


def _settings(step: int) -> dict[str, Any]:
    """A rollback from `step` to the checkpoint before it."""
    return {"poison": {sample_of(step): math.nan}, "on_nonfinite": "rollback", "steps": 7}


def test_a_rollback_leaves_out_the_data_since_the_checkpoint_and_ends_the_same_on_any_number_of_ranks(
    here: Path,
) -> None:
    settings = _settings(4)
    outcomes = [run_ranks(_fit, [(f"w{size}", settings)] * size) for size in (1, 2, 3)]
    assert len({outcome.value for each in outcomes for outcome in each}) == 1, outcomes[-1][0].err
    for run in ("w1", "w3"):
        (event,) = events(run, "rollback")
        assert (event["step"], event["to"], event["left_out_steps"]) == (4, 2, 2) and "time" in event
        assert steps(run) == [1, 2, 3, 4, 5, 6, 7]
        assert open_checkpoint(RunFolder(Path(run)).checkpoint(7)).state.detours == [[2, 2]]
    left_out = make("by hand")  # steps 3 and 4 see what would have been the data of 5 and 6
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(History, "data_step", lambda self, step: step + 2 * (step >= 2))
        assert left_out.fit(total_steps=7).weights_sha256 == outcomes[0][0].value
    assert "rolled back from step 4 to 2; the data of 2 steps are skipped" in outcomes[0][0].out


@pytest.mark.parametrize("stop", [3, 6])
def test_a_run_stopped_before_or_after_a_rollback_and_resumed_ends_with_the_same_bits(here: Path, stop: int) -> None:
    settings = _settings(4)
    whole = fit("whole", **settings)
    for size, length in ((2, stop), (3, 7)):
        outcomes = run_ranks(_fit, [("part", {**settings, "steps": length})] * size)
        assert outcomes[0].code == 0, outcomes[0].err
    assert outcomes[0].value == whole.weights_sha256
    assert steps("part") == steps("whole")


def _die_after_the_rollback(run_dir: str, settings: dict[str, Any]) -> None:
    trainer = make(run_dir, poison=settings["poison"], on_nonfinite=settings["on_nonfinite"])
    back = History.go_back

    def go_back_and_die(*args: Any) -> int:
        back(*args)
        os._exit(9)

    History.go_back = go_back_and_die  # type: ignore[assignment, method-assign]
    trainer.fit(total_steps=7, save_every=2, log_every=1)


def test_a_run_killed_right_after_a_rollback_goes_back_again_and_ends_with_the_same_bits(here: Path) -> None:
    settings = _settings(4)
    whole = fit("whole", **settings)
    (outcome,) = run_ranks(_killed, [("part", settings)])
    assert outcome.value == 9, outcome.err
    assert fit("part", **settings).weights_sha256 == whole.weights_sha256
    assert len(events("part", "rollback")) == 2 and steps("part") == steps("whole")


def _killed(run_dir: str, settings: dict[str, Any]) -> int:
    child = os.fork()
    if child == 0:
        os.environ.pop("RANK")
        _die_after_the_rollback(run_dir, settings)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_run_that_may_go_back_can_do_so_before_its_first_save(here: Path) -> None:
    result = fit("run", poison={sample_of(1): math.nan}, on_nonfinite="rollback", save_every=9)
    assert result.state == "finished" and steps("run") == [1, 2, 3, 4, 5]
    assert [(event["step"], event["to"]) for event in events("run", "rollback")] == [(1, 0)]


def test_rollbacks_can_follow_each_other_from_the_same_checkpoint(here: Path) -> None:
    # Back from step 3; its data left out, step 3 sees step 4's, which is bad as well.
    poison = {sample_of(3): math.nan, sample_of(4): math.nan}
    assert fit("run", poison=poison, on_nonfinite="rollback", steps=7).state == "finished"
    assert open_checkpoint(RunFolder(Path("run")).checkpoint(7)).state.detours == [[2, 1], [2, 1]]
    assert steps("run") == [1, 2, 3, 4, 5, 6, 7]


def _leap() -> dict[str, Any]:
    """Data whose loss leaps at step 20 and at no other step of a long epoch."""
    poison = {sample_of(20, global_batch_size=2): 1e3}
    return {"global_batch_size": 2, "poison": poison, "spike_factor": 20.0, "steps": 30, "save_every": 5}


def test_a_leap_of_the_loss_goes_back_and_a_resumed_run_sees_the_same_leap(here: Path) -> None:
    settings = _leap()
    whole = fit("whole", **settings)
    (spike,), (back,) = events("whole", "loss spike"), events("whole", "rollback")
    assert spike["step"] == 20 and "times the median" in spike["what"]
    assert (back["step"], back["to"], back["left_out_steps"]) == (20, 15, 5)
    assert steps("whole") == list(range(1, 31))
    # Stopped two steps before: what the leap is measured by comes from the checkpoint.
    fit("part", **{**settings, "steps": 18})
    assert fit("part", **settings).weights_sha256 == fit("alike", **settings).weights_sha256
    assert len(events("part", "rollback")) == 1
    assert fit("ignored", **{**settings, "spike_factor": None}).weights_sha256 != whole.weights_sha256


def test_leaps_that_do_not_end_give_up(here: Path) -> None:
    with pytest.raises(TrainingError, match=r"times the median .* after 0 rollbacks"):
        fit("run", **{**_leap(), "max_rollbacks": 0})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--spike_factor", "1"], "spike_factor"),
        (["--max_rollbacks", "-1"], "max_rollbacks"),
        (["--check_replicas_every", "0"], "check_replicas_every"),
    ],
)
def test_rules_that_make_no_sense_are_refused(
    train: Callable[..., int], capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    assert train(*flags) == EXIT_USER and says in capsys.readouterr().err


def test_the_command_line_goes_back_and_gives_up_with_two_lines(here: Path, text: Path) -> None:
    flags = small(
        "--train_data_path", "text", "--run_dir", "run", "--lr", "1e30", *"--grad_clip 0 --recipe classic".split()
    )
    rules = ["--on_nonfinite", "rollback", "--max_rollbacks", "1", "--spike_factor", "50", "--save_every", "2"]
    outcomes = train_ranks(2, *flags, *rules)
    assert [outcome.code for outcome in outcomes] == [EXIT_FAILED] * 2
    lines = outcomes[0].err.splitlines()
    assert "after 1 rollbacks; its documents: " in lines[0] and ".txt" in lines[0] and "lower --lr" in lines[1]
    assert len(lines) == 2 and outcomes[1].err == "" and len(events("run", "rollback")) == 1
