"""Validation per source, and the mean over the sources, weighted by their shares of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from drumline.config import TrainConfig
from drumline.data import Data, TokenFile
from drumline.lazy import room
from drumline.mixes.batches import MixBatches
from drumline.mixes.opening import Mix
from drumline.model import token_objective
from drumline.parallel import Pulse
from drumline.report import Record
from drumline.train import Evaluation, Objective, Setup, evaluate


@dataclass(frozen=True)
class MixEvaluation(Evaluation):
    """The weighted mean of those of the sources."""

    sources: Mapping[str, Evaluation] = field(default_factory=dict)

    @property
    def record(self) -> Record:
        record: Record = {"valid_loss": self.loss}
        record |= {f"valid_loss/{name}": each.loss for name, each in self.sources.items()}
        record |= {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        known = {name: each.bits_per_byte for name, each in self.sources.items()}
        return record | {f"bits_per_byte/{name}": bits for name, bits in known.items() if bits is not None}


def evaluate_mix(
    model: nn.Module,
    objective: Objective,
    tokens: Mapping[str, TokenFile],
    *,
    weights: Mapping[str, float],
    windows: int | None = None,
    **more: Any,
) -> MixEvaluation:
    """The loss of each source; `windows` is for all of them together. weights: of any sum, for the mean"""
    each = None if windows is None else max(1, windows // len(tokens))
    found = {name: evaluate(model, objective, own, windows=each, **more) for name, own in tokens.items()}
    bits = {name: one.bits_per_byte for name, one in found.items() if one.bits_per_byte is not None}
    return MixEvaluation(
        loss=_mean({name: one.loss for name, one in found.items()}, weights),
        tokens=sum(one.tokens for one in found.values()),
        bits_per_byte=_mean(bits, weights) if len(bits) == len(found) else None,
        sources=found,
    )


def _mean(values: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Over the sources that the run has anything of; over all, if it has nothing of these."""
    total = sum(weights[name] for name in values)
    if not total:
        return sum(values.values()) / len(values)
    return sum(value * weights[name] for name, value in values.items()) / total


def weights_of(mix: Mix, batches: MixBatches, *, total_steps: int) -> dict[str, float]:
    """The share of each source in the whole run, so that losses of different steps can be compared."""
    seen = batches.schedule.seen(max(1, total_steps) * batches.plan.sequences)
    return {name: own / sum(seen) for name, own in zip(mix.names, seen, strict=True)}


def evaluator(mix: Mix, config: TrainConfig, data: Data, setup: Setup) -> Callable[[Pulse], Record]:
    """What the loop calls for an evaluation; with --eval_tasks, tasks are made from the text of all sources."""
    assert isinstance(setup.batches, MixBatches)
    if config.run.eval_tasks:
        room("evals").data_for_tasks(config, data, setup.world)
    weights = weights_of(mix, setup.batches, total_steps=setup.batches.total_steps)

    def run(pulse: Pulse) -> Record:
        return evaluate_mix(
            setup.step.model,
            token_objective,
            mix.valid,
            weights=weights,
            context=config.model.context or 0,
            batch_size=config.batch.batch_size or 1,
            precision=setup.step.precision,
            world=setup.world,
            windows=config.run.eval_windows,
            document_mask=config.data.document_mask,
            each_batch=pulse.still_there,
        ).record

    return room("evals").with_tasks(run, config, data, setup) if config.run.eval_tasks else run
