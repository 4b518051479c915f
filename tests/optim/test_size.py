"""The size of a run's state is known before the run."""

from dataclasses import replace

import pytest

from drumline.config import ModelSettings, RunConfig, TrainConfig, with_preset
from drumline.model import build_model
from drumline.optim import make_optimizer
from drumline.optim.size import checkpoints_bytes, state_size


@pytest.mark.parametrize("name", ["tiny", "modern-tiny"])
def test_the_optimizer_keeps_as_many_numbers_as_was_said(name: str) -> None:
    config = with_preset(TrainConfig(model=ModelSettings(preset=name)))
    model = build_model(config, vocab_size=300)
    optimizer = make_optimizer(model, config.optim)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    size = state_size(config, vocab_size=300)
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    states = [optimizer.state, *(each.state for each in vars(optimizer).values() if hasattr(each, "state"))]
    kept = {id(value): value for state in states for of in state.values() for value in of.values() if value.dim() > 0}
    assert size.moments == pytest.approx(sum(value.numel() for value in kept.values()), rel=0.01)


def test_there_must_be_room_for_one_checkpoint_more_than_are_kept() -> None:
    config = with_preset(TrainConfig(run=RunConfig(keep_checkpoints=2, keep_best=False)))
    one = state_size(config, vocab_size=config.data.vocab_size or 0).checkpoint_bytes
    assert checkpoints_bytes(config) == 3 * one
    assert checkpoints_bytes(replace(config, model=replace(config.model, model="my.module:Model"))) == 0
    assert checkpoints_bytes(replace(config, model=replace(config.model, n_heads=7))) == 0
