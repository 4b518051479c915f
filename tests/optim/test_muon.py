"""Muon: its update against a singular value decomposition, its state in checkpoints, the same bits everywhere."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from drumline.checkpoint.restoring import load_optimizer
from drumline.checkpoint.state import optimizer_state
from drumline.config import GPTConfig, OptimConfig
from drumline.model.gpt import GPT
from drumline.optim.muon import FIRST_MOMENTUM, MOMENTUM_STEPS, Muon, momentum_at, orthogonal, row_factors
from drumline.optim.optimizers import make_optimizer

MODEL = GPTConfig(vocab_size=64, max_position_embeddings=8, n_layers=2, n_heads=2, d_model=16, d_ff=32)
OPTIM = OptimConfig(lr=0.02, optimizer="muon", embedding_lr=0.3, head_lr=0.004, weight_decay=0.1)


def random_matrices(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def direction(gradient: Tensor) -> Tensor:
    """Of the first update: singular values near 1, then rows of one length."""
    update = orthogonal(gradient[None])[0]
    rows = torch.nn.functional.normalize(update)
    return rows * update.norm() / rows.norm()


@pytest.mark.parametrize("shape", [(24, 24), (16, 48), (48, 16)], ids=["square", "wide", "tall"])
def test_an_update_is_the_momentum_with_all_singular_values_near_1(shape: tuple[int, int]) -> None:
    matrices = random_matrices(3, *shape)
    u, _, v = torch.linalg.svd(matrices.double(), full_matrices=False)
    ours = orthogonal(matrices).double()
    # In the directions of the decomposition it is a diagonal matrix: the singular values that were reached.
    reached = u.mT @ ours @ v.mT
    values = reached.diagonal(dim1=1, dim2=2)
    assert (reached - torch.diag_embed(values)).abs().max() < 1e-4
    assert values.max() < 1.7 and values.median().item() == pytest.approx(1.0, abs=0.4)
    assert torch.nn.functional.cosine_similarity(ours.flatten(1), (u @ v).flatten(1)).min() > 0.9


def test_the_scale_of_a_gradient_does_not_matter_and_zeros_stay_zeros() -> None:
    matrices = random_matrices(2, 8, 12)
    torch.testing.assert_close(orthogonal(1e-3 * matrices), orthogonal(matrices), rtol=1e-3, atol=1e-3)
    assert orthogonal(torch.zeros(1, 8, 12)).abs().max() == 0


def test_matrices_of_one_shape_in_one_batch_are_updated_as_one_by_one() -> None:
    matrices = random_matrices(5, 24, 40)
    alone = torch.cat([orthogonal(matrix[None]) for matrix in matrices])
    torch.testing.assert_close(orthogonal(matrices), alone, rtol=1e-5, atol=1e-5)


def test_queries_keys_and_values_are_updated_each_for_itself() -> None:
    torch.manual_seed(0)
    model = GPT(replace(MODEL, n_kv_heads=1))
    weight = model.blocks[0].attention.qkv.weight
    before = weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    assert weight.grad is not None
    weight.grad[16:24] *= 1e-3  # the keys'
    make_optimizer(model, replace(OPTIM, weight_decay=0.0)).step()
    moved = (before - weight.detach()) / OPTIM.lr
    for rows in ((0, 16), (16, 24), (24, 32)):
        expected = direction(weight.grad[slice(*rows)])
        torch.testing.assert_close(moved[slice(*rows)], expected, rtol=1e-3, atol=1e-3)


def test_momentum_grows_to_its_setting() -> None:
    assert momentum_at(0, 0.95) == FIRST_MOMENTUM
    assert momentum_at(MOMENTUM_STEPS // 2, 0.95) == pytest.approx(0.9)
    assert momentum_at(MOMENTUM_STEPS, 0.95) == momentum_at(10**6, 0.95) == pytest.approx(0.95)


def test_a_step_is_the_rate_times_the_orthogonal_update_after_the_decay() -> None:
    matrix = torch.nn.Parameter(random_matrices(12, 6))
    before = matrix.detach().clone()
    optimizer = Muon([matrix], torch.optim.AdamW([{"params": []}]), lr=0.1, momentum=0.95, weight_decay=0.5)
    matrix.grad = random_matrices(1, 12, 6)[0]
    optimizer.step()
    expected = before * (1 - 0.1 * 0.5) - 0.1 * 2**0.5 * direction(matrix.grad)  # 12 rows, 6 columns
    torch.testing.assert_close(matrix.detach(), expected, rtol=1e-5, atol=1e-5)


def trained(steps: int, *, resumed_at: int | None = None) -> GPT:
    """A GPT after some steps, with its optimizer rebuilt from what a checkpoint holds in between."""
    torch.manual_seed(0)
    model = GPT(MODEL)
    optimizer = make_optimizer(model, OPTIM)
    for step in range(steps):
        if step == resumed_at:
            tensors, scalars = optimizer_state(model, optimizer)
            optimizer = make_optimizer(model, OPTIM)
            load_optimizer({name: tensor.clone() for name, tensor in tensors.items()}, scalars, model, optimizer)
        ids = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(ids, targets=ids)[1].backward()
        optimizer.step()
    return model


def test_its_state_has_the_names_and_shapes_of_the_weights_and_resumes_to_the_same_bits() -> None:
    whole, resumed = trained(6), trained(6, resumed_at=3)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    optimizer = make_optimizer(whole, OPTIM)
    for parameter in whole.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors, _ = optimizer_state(whole, optimizer)
    weight = "blocks.0.attention.qkv.weight"
    assert tensors[f"momentum/{weight}"].shape == (48, 16) and tensors[f"updates/{weight}"] == 1
    assert tensors["exp_avg/token_embedding.weight"].shape == (64, 16)


def test_a_state_dict_given_to_another_one_goes_on_alike() -> None:
    torch.manual_seed(0)
    first, second = GPT(MODEL), GPT(MODEL)
    second.load_state_dict(first.state_dict())
    optimizers = [make_optimizer(model, OPTIM) for model in (first, second)]
    for step in range(4):
        if step == 2:
            optimizers[1].load_state_dict(deepcopy(optimizers[0].state_dict()))
            second.load_state_dict(first.state_dict())
        for model, optimizer in zip((first, second), optimizers, strict=True):
            ids = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(ids, targets=ids)[1].backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_rows_whose_updates_have_been_large_of_late_are_held_back_and_the_matrix_keeps_its_norm() -> None:
    variances = [torch.zeros(6)]
    usual, large = random_matrices(1, 6, 8), random_matrices(1, 6, 8)
    large[0, 2] *= 10
    for number in range(30):
        row_factors(large, variances, torch.tensor(float(number)))
    factors = row_factors(usual, variances, torch.tensor(30.0))
    assert factors[0, 2] < 0.3 * factors[0, [0, 1, 3, 4, 5]].min()
    torch.testing.assert_close((usual * factors[..., None]).norm(), usual.norm())
    before = variances[0].clone()
    row_factors(usual, variances, torch.tensor(31.0), skipped=torch.ones(()))
    assert torch.equal(variances[0], before)
    assert row_factors(torch.zeros(1, 6, 8), [torch.zeros(6)], torch.zeros(())).isfinite().all()
