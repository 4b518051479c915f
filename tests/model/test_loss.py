"""Output matrix and cross entropy in one go equal the plain formula, whatever is left out, capped or cut into parts."""

import pytest
import torch
from torch import Tensor

from drumline.config.model import GPTConfig
from drumline.model.gpt import GPT
from drumline.model.loss import linear_cross_entropy
from drumline.model.whole_logits import linear_cross_entropy_reference

CAPS = pytest.mark.parametrize("softcap", [0.0, 5.0])


def drawn(rows: int, *, vocab: int = 50, width: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden, weight and targets, a third of which do not count."""
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, width, generator=generator).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).requires_grad_()
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[::3] = -100
    return hidden, weight, targets


@CAPS
@pytest.mark.parametrize("rows", [1, 511, 512, 1100])
def test_loss_and_gradients_are_those_of_the_plain_formula(rows: int, softcap: float) -> None:
    hidden, weight, targets = drawn(rows)
    logits = hidden.double() @ weight.double().t()
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    chances = logits.log_softmax(dim=-1)
    wanted = -sum((chances[row, target] for row, target in enumerate(targets.tolist()) if target >= 0), torch.zeros(()))
    loss = linear_cross_entropy(hidden, weight, targets, softcap=softcap)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss.double(), wanted.double(), rtol=1e-5, atol=1e-4)
    if targets.max() >= 0:
        wanted_gradients = torch.autograd.grad(wanted, (hidden, weight))
        for got, exact in zip(torch.autograd.grad(loss, (hidden, weight)), wanted_gradients, strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-4)


@CAPS
def test_the_reference_gives_the_same(softcap: float) -> None:
    hidden, weight, targets = drawn(700)
    both = [f(hidden, weight, targets, softcap=softcap) for f in (linear_cross_entropy, linear_cross_entropy_reference)]
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-4)
    for got, plain in zip(*(torch.autograd.grad(loss * 0.25, (hidden, weight)) for loss in both), strict=True):
        torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-4)


def test_positions_that_do_not_count_have_no_gradient_and_the_sum_is_the_same_bits_each_time() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 300, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    targets = torch.randint(50, (3, 300))
    targets[1] = -100
    results = []
    for _ in range(3):
        loss = linear_cross_entropy(hidden, weight, targets)
        results.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    assert results[0][1][1].abs().max() == 0 and results[0][1][0].abs().max() > 0
    assert all(torch.equal(a, b) for again in results[1:] for a, b in zip(results[0], again, strict=True))


def test_without_gradients_the_loss_is_the_same_and_nothing_is_kept_for_backward() -> None:
    hidden, weight, targets = drawn(600)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.grad_fn is None
    torch.testing.assert_close(loss, linear_cross_entropy(hidden, weight, targets).detach())


def test_targets_that_count_nowhere_give_zero_and_zero_gradients() -> None:
    hidden, weight, targets = drawn(20)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    assert loss == 0.0
    assert all(gradient.abs().max() == 0 for gradient in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("tied", [True, False])
def test_a_gpt_trains_on_the_loss_and_gradients_that_its_logits_give(tied: bool) -> None:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=97, n_layers=2, n_heads=2, d_model=32, d_ff=64, tie_embeddings=tied)
    model, ids = GPT(config), torch.randint(97, (20, 30))
    targets = torch.randint(97, (20, 30)).masked_fill(ids < 20, -100)
    losses = (
        model(ids, targets=targets)[1],
        torch.nn.functional.cross_entropy(model(ids)[0].flatten(0, 1), targets.flatten(), reduction="sum"),
    )
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-3)
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    for got, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(got, plain, rtol=1e-3, atol=1e-3)
