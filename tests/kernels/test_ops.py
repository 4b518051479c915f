"""The Triton kernels equal the plain PyTorch beside them: on a GPU, or else through Triton's interpreter."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.interpreted import HAS_TRITON, INTERPRETED, MODERN, WHY_NOT, give_programs_more_rows
from helpers.ranks import run_ranks
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from drumline.config.model import GPTConfig
from drumline.kernels import gpt as fused_gpt
from drumline.kernels.gpt import FusedGPT, fits
from drumline.model.gpt import GPT
from drumline.model.loss import IGNORED, cross_entropy_reference
from drumline.optim import muon, muon_owners
from drumline.optim.muon import Muon
from drumline.parallel.world import join
from drumline.snapshots.sums import piece_sums_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEEDS_TRITON = pytest.mark.skipif(
    not HAS_TRITON or (DEVICE.type == "cpu" and not INTERPRETED),
    reason=WHY_NOT,
)
NEEDS_HOPPER = pytest.mark.skipif(
    DEVICE.type != "cuda" or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
RECIPE = replace(MODERN, tie_embeddings=False, norm_weights=False, softcap=15.0, value_tables=2, smear=True)
EXACT_TO = 8e-3
"""Relative error of bf16 results; Triton's interpreter rounds them towards zero."""


@pytest.fixture(scope="module")
def kernels() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of kernels. oneDNN's bf16 products trap on some virtual machines."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield lambda name: importlib.import_module(f"drumline.kernels.{name}")


def normal(*shape: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * std).to(DEVICE, dtype)


def positive(width: int) -> Tensor:
    """A norm's weight."""
    return normal(width, dtype=torch.float32).abs() + 0.5


def error(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm())


def check(operation: Callable[..., Any], reference: Callable[..., Any], *arguments: Tensor) -> None:
    """Results and all gradients, against the reference in float64."""
    given = [a.clone().requires_grad_() for a in arguments]
    exact = [a.double().requires_grad_() for a in arguments]
    results, wanted = operation(*given), reference(*exact)
    if isinstance(results, Tensor):
        results, wanted = (results,), (wanted,)
    incoming = [normal(*result.shape) for result in results]
    gradients = torch.autograd.grad(results, given, incoming)
    wanted_gradients = torch.autograd.grad(wanted, exact, [g.double() for g in incoming])
    for got, want in zip((*results, *gradients), (*wanted, *wanted_gradients), strict=True):
        assert got.shape == want.shape and error(got, want) < EXACT_TO


@NEEDS_TRITON
@pytest.mark.parametrize("rows", [3, 64])
def test_residual_sum_and_norm_equal_the_plain_ones(kernels: Callable[[str], ModuleType], rows: int) -> None:
    ops = kernels("ops")
    check(ops.add_rms_norm, ops.add_rms_norm_reference, normal(rows, 96), normal(rows, 96, std=2.0))
    check(lambda x: ops.add_rms_norm(x, None), lambda x: ops.add_rms_norm_reference(x, None), normal(rows, 96))


@NEEDS_TRITON
@pytest.mark.parametrize("shape", [(192, 64), (100, 300)])
def test_a_norms_weights_in_a_matrix_are_those_of_the_plain_product(
    kernels: Callable[[str], ModuleType], shape: tuple[int, int]
) -> None:
    ops = kernels("ops")
    matrix = normal(*shape, dtype=torch.float32)
    check(ops.times_columns, ops.times_columns_reference, matrix, positive(shape[1]))


TOKENS = 6 * 24
"""Of six sequences: more than the 128 that one program turns, and no whole number of its tiles."""


def rope() -> Tensor:
    table: Tensor = GPT(MODERN).rope[:, :24].to(DEVICE)  # type: ignore[index]
    return table


@NEEDS_TRITON
def test_normalised_and_turned_queries_and_keys_equal_the_plain_ones(kernels: Callable[[str], ModuleType]) -> None:
    ops = kernels("ops")
    given = normal(TOKENS, 32), normal(96, 32, std=0.2), positive(16), positive(16)
    check(
        lambda *args: ops.qkv(*args, None, rope(), heads=2),
        lambda *args: ops.qkv_reference(*args, None, rope().double(), heads=2),
        *given,
    )
    check(
        lambda *args: ops.qkv(*args, rope(), heads=2),
        lambda *args: ops.qkv_reference(*args, rope().double(), heads=2),
        *given,
        normal(6, 24, 2, 16).transpose(1, 2),
    )


@NEEDS_TRITON
def test_norms_without_weights_are_norms_of_ones(kernels: Callable[[str], ModuleType]) -> None:
    ops = kernels("ops")
    ones = torch.ones(16, device=DEVICE)
    check(
        lambda *args: ops.qkv(*args, None, None, None, rope(), heads=2),
        lambda *args: ops.qkv_reference(*args, ones, ones, None, rope().double(), heads=2),
        normal(TOKENS, 32),
        normal(96, 32, std=0.2),
    )


@NEEDS_TRITON
def test_the_gradient_of_a_float32_weight_is_not_rounded_to_bf16(kernels: Callable[[str], ModuleType]) -> None:
    ops = kernels("products")
    x, weight = normal(256, 64), normal(96, 64, dtype=torch.float32).requires_grad_()
    check(ops.linear, ops.linear_reference, x, normal(96, 64))
    (gradient,) = torch.autograd.grad(ops.linear(x, weight).sum(), weight)
    exact = x.double().sum(0).expand(96, 64)
    assert gradient.dtype == torch.float32 and error(gradient, exact) < 1e-6


@NEEDS_HOPPER
@pytest.mark.parametrize("rows", [128, 1000])
def test_squared_relu_inside_the_products_equals_the_plain_one(kernels: Callable[[str], ModuleType], rows: int) -> None:
    ops = kernels("products")
    check(
        ops.relu2_mlp,
        ops.relu2_mlp_reference,
        normal(rows, 192),
        normal(768, 192, std=0.1),
        normal(192, 768, std=0.1),
    )


@NEEDS_TRITON
def test_embeddings_smeared_over_the_next_token_equal_the_plain_ones(kernels: Callable[[str], ModuleType]) -> None:
    ops = kernels("embedding")
    for shape in ((3, 20, 96), (9, 2, 64)):
        check(ops.smeared, ops.smeared_reference, normal(*shape), normal(shape[2], dtype=torch.float32))


@NEEDS_TRITON
def test_embeddings_are_not_smeared_into_another_document(kernels: Callable[[str], ModuleType]) -> None:
    ops, draw = kernels("embedding"), torch.Generator().manual_seed(5)
    for shape in ((3, 20, 96), (9, 2, 64)):
        documents = torch.randint(2, shape[:2], generator=draw).cumsum(1).to(DEVICE)
        check(
            lambda x, weights, documents=documents: ops.smeared(x, weights, documents),
            lambda x, weights, documents=documents: ops.smeared_reference(x, weights, documents),
            normal(*shape),
            normal(shape[2], dtype=torch.float32),
        )


@NEEDS_TRITON
def test_the_gradient_of_a_row_looked_up_twice_is_the_sum(kernels: Callable[[str], ModuleType]) -> None:
    ops = kernels("embedding")
    ids = torch.tensor([[0, 3, 3], [8, 3, 0]], device=DEVICE)
    check(
        lambda table: ops.embedding(ids, table),
        lambda table: torch.nn.functional.embedding(ids, table),
        normal(9, 24, dtype=torch.float32),
    )


@NEEDS_TRITON
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("vocab", [300, 20_000])
def test_losses_and_gradients_of_logits_equal_the_plain_ones(
    kernels: Callable[[str], ModuleType], vocab: int, softcap: float
) -> None:
    logits, targets = normal(6, vocab, std=3.0), torch.tensor([0, 7, IGNORED, 299, 2, IGNORED], device=DEVICE)
    in_place = kernels("cross_entropy").cross_entropy_in_place
    own, exact = logits.clone(), logits.double()
    losses = in_place(own, targets, ignored=IGNORED, softcap=softcap, gradient=True)
    wanted = cross_entropy_reference(exact, targets, softcap=softcap, gradient=True)
    fast = softcap > 0 and DEVICE.type == "cuda"
    assert error(losses, wanted) < (3e-4 if fast else 1e-5) and error(own, exact) < EXACT_TO
    assert losses[2] == 0.0 and own[2].abs().max() == 0.0
    untouched = logits.clone()
    again = in_place(untouched, targets, ignored=IGNORED, softcap=softcap, gradient=False)
    assert error(again, wanted) < 1e-5 and torch.equal(untouched, logits)


@NEEDS_TRITON
@pytest.mark.parametrize("far", [-1e4, 1e4], ids=["below", "above"])
def test_logits_may_be_as_far_from_the_first_ones_as_they_like(
    kernels: Callable[[str], ModuleType], far: float
) -> None:
    logits, targets = normal(2, 10_000), torch.tensor([9_000, 5], device=DEVICE)
    logits[:, 5_000:] += far
    exact = logits.double()
    losses = kernels("cross_entropy").cross_entropy_in_place(
        logits, targets, ignored=IGNORED, softcap=0.0, gradient=True
    )
    wanted = cross_entropy_reference(exact, targets, softcap=0.0, gradient=True)
    assert error(losses, wanted) < 1e-5 and error(logits, exact) < EXACT_TO


@NEEDS_TRITON
def test_a_target_that_is_no_token_makes_the_loss_not_finite(kernels: Callable[[str], ModuleType]) -> None:
    losses = kernels("cross_entropy").cross_entropy_in_place(
        normal(3, 50), torch.tensor([50, -1, 4], device=DEVICE), ignored=IGNORED, softcap=0.0, gradient=False
    )
    assert losses.isnan().tolist() == [True, True, False]


@NEEDS_TRITON
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("config", [MODERN, RECIPE], ids=["modern", "recipe"])
def test_a_fused_gpt_has_the_loss_and_gradients_of_a_plain_one(
    kernels: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, config: GPTConfig, masked: bool
) -> None:
    give_programs_more_rows(monkeypatch, kernels("ops"))
    if DEVICE.type == "cpu":  # the interpreter cannot multiply bf16 tiles
        monkeypatch.setattr(kernels("products"), "relu2_mlp", kernels("products").relu2_mlp_reference)
        attention = kernels("attention")
        monkeypatch.setattr(attention, "document_attention", attention.document_attention_reference)
    monkeypatch.setattr(fused_gpt, "has_kernels", lambda device: True)
    monkeypatch.setattr(FusedGPT, "is_fused", lambda self, device, dtype: True)
    torch.manual_seed(0)
    fused, plain = FusedGPT(config).to(DEVICE), GPT(config).to(DEVICE)
    for weight in fused.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.1)
    plain.load_state_dict(fused.state_dict())
    ids = torch.randint(512, (2, 64), device=DEVICE)
    documents = (torch.rand(2, 64, device=DEVICE) < 0.1).cumsum(1) if masked else None
    losses, gradients = [], []
    for model in (fused, plain):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=DEVICE.type == "cuda" or model is fused):
            losses.append(model(ids, targets=ids, document_ids=documents)[1])
        gradients.append(torch.autograd.grad(losses[-1], list(model.parameters())))
    assert error(*losses) < 0.01
    for (name, _), got, want in zip(plain.named_parameters(), *gradients, strict=True):
        assert got.dtype is torch.float32 and error(got, want) < 0.06, name


def test_a_fused_gpt_without_its_kernels_is_a_gpt_to_the_bit() -> None:
    torch.manual_seed(0)
    fused, plain = FusedGPT(RECIPE), GPT(RECIPE)
    plain.load_state_dict(fused.state_dict())
    ids = torch.randint(512, (2, 64))
    assert torch.equal(fused(ids, targets=ids)[1], plain(ids, targets=ids)[1])


@pytest.mark.parametrize(
    "change",
    [
        {"activation": "swiglu"},
        {"dropout": 0.1},
        {"n_kv_heads": 2},
        {"bias": True},
        {"norm": "layernorm"},
        {"positions": "learned"},
        {"qk_norm": False},
        {"d_model": 96, "n_heads": 2},
    ],
    ids=str,
)
def test_kernels_are_not_used_for_a_model_that_they_do_not_compute(change: dict[str, Any]) -> None:
    assert fits(MODERN) and fits(RECIPE)
    assert not fits(replace(MODERN, **change))


@NEEDS_TRITON
@pytest.mark.parametrize("rows", [40, 96])
def test_muons_kernels_equal_its_plain_update_and_leave_a_skipped_step_alone(
    kernels: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    kernels("muon")
    matrices = [normal(rows, 64, dtype=torch.float32) * (1 + number) for number in range(3)]
    gradients = [[normal(rows, 64 + step + i, dtype=torch.float32)[:, :64] for i in range(3)] for step in range(3)]
    left = []
    for by_kernels in (True, False):
        monkeypatch.setattr("drumline.optim.muon.suits_kernels", lambda matrix, by_kernels=by_kernels: by_kernels)
        monkeypatch.setattr("drumline.optim.muon.raised", lambda x: x)  # would make rounding errors larger
        weights = [torch.nn.Parameter(matrix.clone()) for matrix in matrices]
        optimizer: Any = Muon(weights, torch.optim.AdamW([{"params": []}]), lr=0.1, momentum=0.95, weight_decay=0.1)
        for step in range(3):
            for weight, gradient in zip(weights, gradients[step], strict=True):
                weight.grad = gradient * (4.0 if by_kernels else 1.0)
            if by_kernels:
                optimizer.grad_scale = torch.full((), 4.0, device=DEVICE)
                optimizer.found_inf = torch.full((), float(step == 1), device=DEVICE)
            if by_kernels or step != 1:
                optimizer.step()
        moved = [weight.detach() - matrix for weight, matrix in zip(weights, matrices, strict=True)]
        left.append([*moved, *(optimizer.state[weight]["momentum"] for weight in weights)])
        assert [optimizer.state[weight]["updates"].item() for weight in weights] == [2.0] * 3
    for ours, plain in zip(*left, strict=True):
        assert error(ours, plain) < EXACT_TO


def muon_by_kernels(*, sharded: bool) -> list[Tensor]:
    """Weights and states after steps of which the second is skipped; of a sharded model, whole."""
    place: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
    if sharded:
        mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
        place = lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])  # noqa: E731
    shapes = (40, 64), (64, 40), (40, 64), (7, 33), (1, 64)
    weights = [torch.nn.Parameter(place(normal(*shape, dtype=torch.float32))) for shape in shapes]
    optimizer: Any = Muon(weights, torch.optim.AdamW([{"params": []}]), lr=0.1, momentum=0.95, weight_decay=0.1)
    for step in range(3):
        for number, (weight, shape) in enumerate(zip(weights, shapes, strict=True)):
            weight.grad = place(
                normal(shape[0] + number + step, shape[1], dtype=torch.float32)[: shape[0]].contiguous()
            )
        optimizer.grad_scale = torch.full((), 4.0, device=DEVICE)
        optimizer.found_inf = torch.full((), float(step == 1), device=DEVICE)
        optimizer.step()
    assert [optimizer.state[weight]["updates"].item() for weight in weights] == [2.0] * len(weights)
    states = [optimizer.state[weight] for weight in weights]
    after: list[Any] = [*weights, *(state[name] for state in states for name in ("momentum", "variance"))]
    return [whole(each) if sharded else each.detach().cpu() for each in after]


def whole(tensor: DTensor) -> Tensor:
    """What full_tensor() gives, which ends in a segmentation fault for CUDA tensors of a gloo group (torch 2.11)."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensor.to_local().detach().cpu())
    return torch.cat(parts)


def muon_of_owners() -> list[bool]:
    muon.suits_kernels = lambda matrix: True  # type: ignore[assignment]
    muon_owners.PRICES = dict.fromkeys(("cpu", "cuda"), muon_owners.Price(0.0, 0.0))
    torch.use_deterministic_algorithms(True)
    with torch.backends.mkldnn.flags(enabled=False):
        alone = muon_by_kernels(sharded=False)
        join(device="cuda" if DEVICE.type == "cuda" else "cpu", backend="gloo")
        ways = [muon_by_kernels(sharded=sharded) for sharded in (False, True)]
    return [torch.equal(one, other) for way in ways for one, other in zip(way, alone, strict=True)]


@NEEDS_TRITON
def test_owners_of_muons_matrices_get_the_bits_of_one_process_by_the_kernels_too() -> None:
    outcomes = run_ranks(muon_of_owners, [()] * 2)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].err
    assert all(all(outcome.value) and outcome.value for outcome in outcomes)


@NEEDS_TRITON
@pytest.mark.parametrize("betas", [(0.8, 0.999), (0.0, 0.95)])
def test_the_one_pass_adamw_equals_torchs_and_leaves_a_skipped_step_alone(
    kernels: Callable[[str], ModuleType], betas: tuple[float, float]
) -> None:
    ours = kernels("adamw").OnePassAdamW
    starts = [normal(*shape, dtype=torch.float32) for shape in ((40, 130), (64,), (3, 5), (9000, 1))]
    gradients = [[normal(*start.shape, dtype=torch.float32) for start in starts] for _ in range(4)]
    left = []
    for way in (ours, torch.optim.AdamW):
        weights = [torch.nn.Parameter(start.clone()) for start in starts]
        groups = [{"params": weights[:2], "weight_decay": 0.1}, {"params": weights[2:], "lr": 0.02}]
        optimizer = way(groups, lr=0.1, betas=betas, eps=1e-6, weight_decay=0.0)
        for step in range(4):
            for number, (weight, gradient) in enumerate(zip(weights, gradients[step], strict=True)):
                late = number == 1 and step == 0  # this weight's first step is the second of the others
                weight.grad = None if late else gradient * (4.0 if way is ours else 1.0)
            if way is ours:
                optimizer.grad_scale = torch.full((), 4.0, device=DEVICE)
                optimizer.found_inf = torch.full((), float(step == 2), device=DEVICE)
            if way is ours or step != 2:
                optimizer.step()
        moved = [weight.detach() - start for weight, start in zip(weights, starts, strict=True)]
        states = [optimizer.state[weight] for weight in weights]
        left.append([*moved, *(state["exp_avg"] for state in states), *(state["exp_avg_sq"] for state in states)])
        assert [state["step"].item() for state in states] == [3.0, 2.0, 3.0, 3.0]
    for one, other in zip(*left, strict=True):
        assert error(one, other) < 1e-5


@NEEDS_TRITON
@pytest.mark.parametrize("size", [256, 16 << 10, 5 * 16384 + 256])
def test_checksums_of_memory(kernels: Callable[[str], ModuleType], size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    wanted = torch.cat([piece_sums_reference(piece) for piece in data.split(16384)])
    assert torch.equal(kernels("sums").piece_sums(data.to(DEVICE), piece_bytes=16384).cpu(), wanted)
