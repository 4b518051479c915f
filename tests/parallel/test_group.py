"""What ranks tell each other through the rendezvous store does not pile up there."""

from pathlib import Path

from helpers.ranks import run_ranks
from helpers.small import small


def messages_left(steps: int) -> dict[str, int]:
    """After a run that saves and takes a snapshot at each step."""
    from torch.distributed import distributed_c10d

    from drumline.cli.app import run_command
    from drumline.parallel import group

    left, leave = [], group.leave_group

    def counting() -> None:
        if not left:  # once more when the process ends
            left.append(distributed_c10d._get_default_store().num_keys())
        leave()

    group.leave_group = counting
    each_step = ["--save_every", "1", "--snapshot_every", "1", "--run_dir", f"run-{steps}"]
    code = run_command(["train", *small("--train_data_path", "text", *each_step, "--total_steps", str(steps))])
    return {"code": code, "messages": left[0]}


def test_a_long_run_leaves_no_more_messages_in_the_store_than_a_short_one(here: Path) -> None:
    short, long = (run_ranks(messages_left, [(steps,)] * 2) for steps in (4, 24))
    assert [outcome.value["code"] for outcome in (*short, *long)] == [0] * 4, (short, long)
    last_of_each_rank = 2  # it may be gone already
    assert long[0].value["messages"] <= short[0].value["messages"] + last_of_each_rank
