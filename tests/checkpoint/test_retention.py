"""Which checkpoints stay: the last few, every so many steps, the best; and always the newest."""

import json
import math
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.checkpoint.checkpoints import Checkpoint, RunState, checkpoint_paths
from drumline.checkpoint.retention import Retention, prune, reasons, step_of
from drumline.files.run_folder import RunFolder

LOSSES = st.one_of(st.none(), st.floats(allow_nan=True), st.just("no number"), st.just(10**400))


@settings(max_examples=100, deadline=None)
@given(
    losses=st.dictionaries(st.integers(0, 200), LOSSES, min_size=1, max_size=12),
    last=st.integers(1, 5),
    every=st.none() | st.integers(1, 50),
    best=st.booleans(),
)
def test_the_last_few_every_so_many_and_the_best_are_kept_and_nothing_else(
    losses: dict[int, float | str | None], last: int, every: int | None, best: bool
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder(Path(scratch))
        for step, loss in losses.items():
            folder.checkpoint(step).mkdir(parents=True)
            (folder.checkpoint(step) / "run.json").write_text(json.dumps({"valid_loss": loss}))
        (folder.checkpoints / ".step-00000003.partial-99").mkdir()
        (folder.checkpoints / ".step-00000003.partial-mine-4").mkdir()
        newest = Checkpoint(folder.checkpoint(max(losses)), RunState(step=max(losses), facts={}))
        prune(folder, Retention(last=last, every=every, best=best), newest=newest, spare="mine")
        kept = {step_of(path) for path in checkpoint_paths(folder.checkpoints)}
        hidden = [path.name for path in folder.checkpoints.glob(".*")]
    judged = {step: loss for step, loss in losses.items() if isinstance(loss, float) and math.isfinite(loss)}
    wanted = set(sorted(losses)[-last:])
    wanted |= {step for step in losses if every is not None and step % every == 0}
    wanted |= {min(judged, key=lambda step: (judged[step], step))} if best and judged else set()
    assert kept == wanted and max(losses) in kept
    assert hidden == [".step-00000003.partial-mine-4"]


def test_a_newest_that_counts_as_old_is_kept_all_the_same(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        folder.checkpoint(step).mkdir(parents=True)
    newest = Checkpoint(folder.checkpoint(1), RunState(step=1, facts={}))
    prune(folder, Retention(last=1), newest=newest, spare="none")
    assert [step_of(path) for path in checkpoint_paths(folder.checkpoints)] == [1, 3]


def test_each_reason_is_named(tmp_path: Path) -> None:
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0)):
        (tmp_path / f"step-{step:08d}").mkdir()
        (tmp_path / f"step-{step:08d}" / "run.json").write_text(json.dumps({"valid_loss": loss}))
    reasons_by_path = reasons(checkpoint_paths(tmp_path), Retention(last=1, every=20))
    assert list(reasons_by_path.values()) == [[], ["every", "best"], ["newest"]]
