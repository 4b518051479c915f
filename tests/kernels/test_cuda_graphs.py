"""CUDA graphs: only where they can be, and steps that are replayed compute what steps that are launched do."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.interpreted import MODERN
from helpers.steps import make_step, train_step
from torch import Tensor

from drumline.config.model import GPTConfig
from drumline.config.settings import OptimConfig
from drumline.kernels.cuda_graphs import RecordedBackward, with_graphs
from drumline.kernels.gpt import FusedGPT
from drumline.model.build import token_objective
from drumline.model.gpt import GPT
from drumline.optim.optimizers import make_optimizer
from drumline.parallel.strategies import Plain
from drumline.train.step import Backward, Precision, StepResult

MODEL = GPTConfig(vocab_size=512, max_position_embeddings=64, n_layers=2, n_heads=4, d_model=64, d_ff=256)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Own(GPT):
    """A model of somebody else's."""


def test_only_our_own_models_on_a_gpu_without_dropout_are_recorded() -> None:
    cpu, gpu = (Precision.of(torch.device(device), torch.bfloat16) for device in ("cpu", "cuda"))
    models = GPT(MODEL), FusedGPT(MODEL), Own(MODEL), GPT(replace(MODEL, dropout=0.1)), torch.nn.Linear(2, 2)
    for precision, recorded in ((cpu, [False] * 5), (gpu, [True, True, False, False, False])):
        plain = Backward(token_objective, precision, 1)
        ways = [with_graphs(plain, model, Plain(model)) for model in models]
        assert [isinstance(way, RecordedBackward) for way in ways] == recorded


def micro_batches(
    step: int, *, count: int, length: int, masked: bool = False
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    draw = torch.Generator().manual_seed(step)
    drawn = torch.randint(512, (count, 2, 256 // length, length), generator=draw)
    documents = (torch.rand(drawn[0, 0].shape, generator=draw) < 0.02 * step).cumsum(1) if masked else None
    return [(ids, targets, documents) for ids, targets in drawn]


def train(*, recorded: bool, count: int, optimizer: Any, masked: bool = False) -> tuple[list[StepResult], GPT]:
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = FusedGPT(MODERN).to(device) if masked else GPT(MODEL).to(device)
    used = make_optimizer(model, OptimConfig(lr=1e-3, optimizer=optimizer))
    precision = Precision.of(device, torch.bfloat16)
    step = make_step(model, used, token_objective, weight=count * 256, precision=precision, grad_clip=1.0)
    if recorded:
        step.backward = with_graphs(step.backward, model, step.strategy)
    results = []
    for number in range(14):
        batches = micro_batches(number, count=count, length=32 if number < 7 else 64, masked=masked)
        results.append(train_step(step, batches, lr=1e-3))
    if recorded:
        assert isinstance(step.backward, RecordedBackward) and step.backward.is_recorded
    return results, model


@NEEDS_CUDA
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("count", [1, 3], ids=["one micro-batch", "accumulated"])
def test_replayed_steps_compute_what_launched_ones_do_also_when_the_context_grows(count: int, optimizer: str) -> None:
    ours, model = train(recorded=True, count=count, optimizer=optimizer)
    launched, plain = train(recorded=False, count=count, optimizer=optimizer)
    for mine, right in zip(ours, launched, strict=True):
        assert mine.updated and mine.loss == pytest.approx(right.loss, rel=2e-3)
        assert mine.own_loss == pytest.approx(right.own_loss, rel=2e-3)
        assert mine.grad_norm == pytest.approx(right.grad_norm, rel=0.05)
    for mine, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=0.05, atol=5e-3)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_replayed_steps_mask_the_documents_of_their_own_micro_batch_however_many() -> None:
    ours, launched = (train(recorded=each, count=1, optimizer="adamw", masked=True)[0] for each in (True, False))
    other = train(recorded=False, count=1, optimizer="adamw")[0]
    assert [mine.loss for mine in ours] == pytest.approx([right.loss for right in launched], rel=2e-3)
    assert [mine.loss for mine in ours] != pytest.approx([right.loss for right in other], rel=2e-3)


@NEEDS_CUDA
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_update_never_makes_the_host_wait_for_the_device(optimizer: Any) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = GPT(MODEL).to(device)
    used = make_optimizer(model, OptimConfig(lr=1e-3, optimizer=optimizer))
    precision = Precision.of(device, torch.bfloat16)
    step = make_step(model, used, token_objective, weight=256, precision=precision, grad_clip=1.0)
    train_step(step, micro_batches(0, count=1, length=32), lr=1e-3)
    gradient = step.gradient(micro_batches(1, count=1, length=32))
    torch.cuda.set_sync_debug_mode("error")
    try:
        read = step.update(gradient, lr=1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert read().updated
