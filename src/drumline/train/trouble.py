"""NaN, Inf and loss spikes: which rank they came from, and whether to recompute, skip, roll back or fail; and replicas
whose weights differ."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from torch import nn

from drumline.checkpoint import valid_ones, weights_fingerprint
from drumline.errors import DrumlineError, TrainingError
from drumline.files import RunFolder
from drumline.parallel import World, odd_ones, waiting_for
from drumline.train.guard import Guard, ReplicaDriftError, Verdict
from drumline.train.setup import due
from drumline.train.step import StepResult

if TYPE_CHECKING:
    from drumline.train.history import History

_NAMES_SHOWN = 8


def judge_trouble(
    guard: Guard, step: int, data_step: int, result: StepResult, *, finite: bool, rollbacks: int
) -> Verdict:
    """As Guard.judge, for a step with NaN or Inf, now or before it was recomputed, or with a loss spike."""
    if not finite:
        return _not_finite(guard, step, data_step, result, rollbacks)
    if guard.tried_again:
        guard.tried_again = False
        guard.tell(
            f"step {step + 1:,}: no NaN or Inf when recomputed: a transient hardware fault, nothing is lost",
            {"event": "computed again", "step": step + 1, "loss": result.loss},
        )
        return guard.judge(step, data_step, result, rollbacks=rollbacks)
    guard.in_a_row = 0
    usual = median(guard.losses)
    what = f"loss {result.loss:.4g}, {result.loss / usual:.1f} times the median {usual:.4g} of recent steps"
    guard.tell(f"warning: step {step + 1:,}: {what}", {"event": "loss spike", "step": step + 1, "what": what})
    return _back(guard, step, what, data_step, rollbacks)


def _not_finite(guard: Guard, step: int, data_step: int, result: StepResult, rollbacks: int) -> Verdict:
    what = f"loss {result.loss}, gradient norm {result.grad_norm}"
    if not guard.tried_again:
        # A step is a function of its data: recomputed, it gives the same result, unless memory or a chip failed.
        guard.tried_again = True
        ranks, where, documents = _culprits(guard, data_step, result)
        guard.tell(
            f"warning: step {step + 1:,}: {what}: NaN or Inf {where}; recomputing the step; documents: {documents}",
            {
                "event": "not finite",
                "step": step + 1,
                "ranks": ranks,
                "where": where,
                "documents": documents,
                "what": what,
            },
        )
        return Verdict.AGAIN
    guard.tried_again = False
    if guard.rules.on_nonfinite == "rollback":
        return _back(guard, step, what, data_step, rollbacks)
    guard.in_a_row += 1
    guard.skipped_steps += 1
    if guard.rules.on_nonfinite == "halt" or guard.in_a_row >= guard.rules.max_nonfinite:
        raise _give_up(guard, step, f"{what}, {guard.in_a_row} such steps in a row", data_step)
    guard.tell(
        f"warning: step {step + 1:,}: {what}: NaN or Inf again, the step was skipped",
        {"event": "skipped", "step": step + 1, "what": what},
    )
    return Verdict.SKIP


def _back(guard: Guard, step: int, what: str, data_step: int, rollbacks: int) -> Verdict:
    if rollbacks >= guard.rules.max_rollbacks:
        raise _give_up(guard, step, f"{what}, after {rollbacks} rollbacks", data_step)
    return Verdict.BACK


def _give_up(guard: Guard, step: int, what: str, data_step: int) -> TrainingError:
    return TrainingError(
        f"step {step + 1:,}: {what}; its documents: {_shown(guard.batches.names(data_step))}",
        fix="lower --lr, use --dtype bfloat16 or float32, or remove those documents",
        reported=not guard.world.is_rank0,  # every rank sees the same metrics
    )


def _culprits(guard: Guard, data_step: int, result: StepResult) -> tuple[list[int], str, str]:
    """The ranks whose loss it was, and the documents of their micro-batches; a collective."""
    world, batches = guard.world, guard.batches
    finite = math.isfinite(result.own_loss)
    share = batches.plan.share(world.rank, world.size)
    names = [] if finite else [name for index in share for name in batches.names(data_step, index)]
    with waiting_for("the search for the rank with NaN or Inf"):
        ranks = world.gather([socket.gethostname(), finite, names])
    guilty = [(rank, host, named) for rank, (host, fine, named) in enumerate(ranks) if not fine]
    if not guilty:
        return [], "in the gradient, though each rank's loss is finite", _shown(batches.names(data_step))
    where = "on " + ", ".join(f"rank {rank} ({host})" for rank, host, _ in guilty)
    documents = list(dict.fromkeys(name for _, _, named in guilty for name in named))
    return [rank for rank, _, _ in guilty], where, _shown(documents)


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return (", ".join(names[:_NAMES_SHOWN]) or "not known") + more


def compare_replicas(model: nn.Module, world: World, step: int, *, tell: Callable[[str, dict[str, Any]], None]) -> None:
    """ReplicaDriftError on all ranks if one has different weights."""
    own = weights_fingerprint(model)
    with waiting_for("the comparison of the weights"):
        digests = world.gather([socket.gethostname(), own])
    ranks = odd_ones({rank: digest for rank, (_, digest) in enumerate(digests)})[1]
    if not ranks:
        return
    odd, agreeing = [f"rank {rank} on {digests[rank][0]}" for rank in ranks], len(digests) - len(ranks)
    if agreeing * 2 > len(digests):
        problem = f"{', '.join(odd)} has different weights than the {agreeing} other ranks at step {step:,}"
    else:  # with two ranks, it is unknown which one is wrong
        hosts = ", ".join(f"rank {rank} on {host}" for rank, (host, _) in enumerate(digests))
        problem = f"the weights of the replicas ({hosts}) differ at step {step:,}"
    tell("", {"event": "replica drift", "what": problem})
    raise ReplicaDriftError(
        problem,
        fix="run the same command again to resume from the last checkpoint; test the memory of that host",
        reported=not world.is_rank0,
    )


def go_back(history: History, step: int) -> int:
    """Return to the newest checkpoint, and skip the data of the steps since."""
    history.saver.wait()
    history.saver.forget_snapshots()
    where = partial(step_to_go_back_to, history.folder, history.intervals.save_every, warn=history.records.say)
    state = history.restore(history.world.on_rank0(where))
    assert state is not None  # a run that may roll back saves before its first step
    history.saver.saved_step = state.step
    left_out = history.data_step(step) + 1 - history.data_step(state.step)
    history.detours.append([state.step, left_out])
    history.tell(*rolled_back(step + 1, state.step, left_out))
    history.records.flush()
    return state.step


def step_to_go_back_to(folder: RunFolder, save_every: Fraction, *, warn: Callable[[str], None]) -> str:
    """The newest step that was due for saving: where a signal stopped the run must not affect its course."""
    valid = valid_ones(folder.checkpoints, warn=warn)
    return next((str(each.step) for each in valid if due(each.step, save_every, 0)), "auto")


def rolled_back(step: int, to: int, left_out: int) -> tuple[str, dict[str, Any]]:
    """The message and the event of a rollback."""
    return (
        f"rolled back from step {step:,} to {to:,}; the data of {left_out} steps are skipped",
        {"event": "rollback", "step": step, "to": to, "left_out_steps": left_out},
    )


def how_it_ended(error: BaseException) -> dict[str, str]:
    """State and cause of a run that an exception ends, for status.json."""
    if isinstance(error, KeyboardInterrupt):
        return {"state": "stopped", "cause": "interrupted"}
    cause = error.problem if isinstance(error, DrumlineError) else f"{type(error).__name__}: {error}"
    return {"state": "failed", "cause": cause}
