"""Float8: as near to plain arithmetic as its few bits allow, kernels equal to their references, refused where it fails.

On a CPU the references compute, and the kernels run through Triton's interpreter, if there is a Triton.
"""

import importlib
import importlib.util
import inspect
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import interpreted
from helpers.interpreted import HAS_TRITON, INTERPRETED, WHY_NOT, give_programs_more_rows
from torch import Tensor

from drumline.cli.app import run_command
from drumline.config.model import GPTConfig, ModelSettings
from drumline.config.presets import with_preset
from drumline.config.settings import RunConfig, TrainConfig
from drumline.config.toml_file import differences
from drumline.errors import ConfigError
from drumline.kernels import fp8 as fused_fp8
from drumline.kernels import gpt as fused_gpt
from drumline.kernels.fp8 import E4M3, E5M2, float8_weights, relu2_mlp
from drumline.kernels.fp8_loss import cross_entropy_to_float8_reference, float8_linear_cross_entropy
from drumline.kernels.gpt import Float8GPT, FusedGPT, check_fp8, with_kernels
from drumline.model.build import build_model
from drumline.model.gpt import GPT, FeedForward
from drumline.model.loss import IGNORED
from drumline.model.whole_logits import linear_cross_entropy_reference
from drumline.report.records import read_metrics

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DEVICE = torch.device("cuda" if HOPPER else "cpu")
NEEDS_TRITON = pytest.mark.skipif(
    not HAS_TRITON or (not HOPPER and not INTERPRETED),
    reason=WHY_NOT,
)
NEEDS_HOPPER = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
MODERN = replace(interpreted.MODERN, n_layers=2)
CAPS = pytest.mark.parametrize("softcap", [0.0, 15.0])


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of kernels, and lets the interpreter round to float8 as a GPU does.

    Its own rounding loses the carry into an odd exponent, and wraps round where a GPU stays at the largest number.
    """
    if INTERPRETED:
        import numpy as np
        import triton.language as tl
        from triton.runtime import interpreter

        convert, formats = interpreter._convert_float, {tl.float8e4nv: E4M3, tl.float8e5: E5M2}

        def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
            if target not in formats:
                return convert(data, source, target, rounding)
            assert source == tl.float32
            exact = torch.from_numpy(np.ascontiguousarray(data))
            return fused_fp8.rounded(exact, formats[target]).view(torch.uint8).numpy()

        monkeypatch.setattr(interpreter, "_convert_float", converted)
    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN's bf16 products trap on some virtual machines
        yield lambda name: importlib.import_module(f"drumline.kernels.{name}")


def normal(*shape: int, std: float = 1.0, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * std).to(DEVICE, dtype)


def normed(rows: int, width: int) -> Tensor:
    return F.rms_norm(normal(rows, width), (width,))


def number(value: float) -> Tensor:
    return torch.tensor(value, device=DEVICE)


def error(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm())


def same_bits(got: Tensor, wanted: Tensor) -> bool:
    return got.dtype is wanted.dtype and torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return relu2_mlp(x, up, down, *float8_weights([up, down]))


@pytest.mark.parametrize("scale", [1.0, 1e-7], ids=["large gradients", "small gradients"])
def test_a_feed_forward_part_is_off_by_6_percent_and_its_gradients_by_less_than_10(scale: float) -> None:
    given = [normed(512, 128), normal(512, 128, std=128**-0.5, seed=1), normal(128, 512, std=0.02, seed=2)]
    gradient = normal(512, 128, std=scale, seed=3)
    own, exact = ([each.clone().requires_grad_() for each in given] for _ in range(2))
    got, wanted = mlp(*own), F.linear(F.relu(F.linear(exact[0], exact[1])).square(), exact[2])
    assert 0.04 < error(got, wanted) < 0.065
    gradients, exact_gradients = torch.autograd.grad(got, own, gradient), torch.autograd.grad(wanted, exact, gradient)
    for mine, right in zip(gradients, exact_gradients, strict=True):
        assert mine.dtype is torch.float32 and 0.05 < error(mine, right) < 0.1


@CAPS
def test_the_heads_loss_is_off_by_less_than_a_ten_thousandth_and_its_gradients_by_3_percent(softcap: float) -> None:
    hidden, weight = normed(4112, 128).requires_grad_(), normal(512, 128, std=0.03, seed=1).requires_grad_()
    targets = torch.randint(512, (4112,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    targets[::3] = IGNORED
    got = float8_linear_cross_entropy(hidden, weight, targets, softcap=softcap, rows_at_once=4096)
    wanted = linear_cross_entropy_reference(hidden, weight, targets, softcap=softcap)
    assert got.dtype is torch.float32 and error(got, wanted) < 1e-4
    # The true scale of the gradient arrives only in backward, and may be far below what float8 can hold.
    gradients = torch.autograd.grad(got * 1e-9, (hidden, weight))
    for mine, right in zip(gradients, torch.autograd.grad(wanted * 1e-9, (hidden, weight)), strict=True):
        assert mine.dtype is torch.float32 and 0.02 < error(mine, right) < 0.04
    assert gradients[0][::3].abs().max() == 0.0


def test_weights_of_any_size_fill_the_format_and_their_copies_follow_them() -> None:
    weights = [normal(32, 48, std=1e-6), normal(16, 32, std=30.0), torch.zeros(16, 16, device=DEVICE)]
    for weight, copy in zip(weights, float8_weights(weights), strict=True):
        assert copy.inverse.data_ptr() % 16 == 0
        assert same_bits(copy.turned, copy.straight.view(torch.uint8).t().contiguous().view(E4M3))
        if weight.abs().max() > 0:
            assert copy.straight.float().abs().max() == 448.0
            assert error(copy.straight.float() * copy.inverse, weight) < 0.04
    before = float8_weights(weights)[0].inverse
    assert error(float8_weights([weights[0] * 2])[0].inverse, before * 2) < 1e-6


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_what_is_too_large_becomes_the_largest_number_and_what_is_no_number_stays_none(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    given = torch.tensor([top * 3, -torch.inf, top, torch.nan])
    assert fused_fp8.rounded(given, dtype).float().tolist()[:3] == [top, -top, top]
    assert fused_fp8.rounded(given, dtype).float()[3].isnan()


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_is_not_hidden_by_float8(bad: float) -> None:
    given = [each.requires_grad_() for each in (normed(128, 64), normal(256, 64, seed=1), normal(64, 256, seed=2))]
    gradient = normal(128, 64, seed=3)
    gradient[3, 5] = bad
    assert all(not each.isfinite().all() for each in torch.autograd.grad(mlp(*given), given, gradient))


class EmulatedGPT(GPT):
    """What a Float8GPT computes, on the references."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        for part in [part for part in self.modules() if isinstance(part, FeedForward)]:
            part.forward = lambda x, part=part: mlp(  # type: ignore[method-assign, misc]
                x.flatten(0, 1), part.up.weight, part.down.weight
            ).view_as(x)

    def summed_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return float8_linear_cross_entropy(
            hidden, self.head_weight, targets, softcap=self.config.softcap, rows_at_once=4096
        )


def last_losses(model: GPT, *, steps: int) -> float:
    """The mean loss of the last ten steps on a text of bytes."""
    text = torch.frombuffer(bytearray(inspect.getsource(tokenize).encode()), dtype=torch.uint8).long()
    windows = text[: len(text) // 65 * 65].view(-1, 65)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        chosen = torch.arange(step * 8, step * 8 + 8) * 7 % len(windows)
        loss = model(windows[chosen, :-1], targets=windows[chosen, 1:])[1] / 512
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return float(sum(losses[-10:]) / 10)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_model_trained_in_float8_ends_with_nearly_the_same_loss(tied: bool) -> None:
    config = replace(MODERN, vocab_size=256, tie_embeddings=tied)
    torch.manual_seed(0)
    plain, emulated = GPT(config), EmulatedGPT(config)
    emulated.load_state_dict(plain.state_dict())
    wanted, got = (last_losses(model, steps=60) for model in (plain, emulated))
    assert wanted < 3.2  # of ln 256 = 5.55: it has learned something
    assert got == pytest.approx(wanted, rel=5e-3) and got != wanted


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (304, 176)])
def test_both_orders_have_the_bits_of_the_reference(
    kernels: Callable[[str], ModuleType], rows: int, columns: int, dtype: torch.dtype
) -> None:
    ops = kernels("fp8")
    x, scale = (
        normal(rows, columns, dtype=torch.bfloat16),
        number(torch.finfo(dtype).max / 3),
    )  # the largest pass the end
    straight, turned = ops.both_orders_by_kernel(x, scale, dtype)
    wanted = ops.both_orders_reference(x, scale, dtype)
    assert same_bits(straight, wanted[0]) and same_bits(turned, wanted[1])
    assert same_bits(ops.transposed_by_kernel(turned), straight)
    assert straight.float().abs().max() == torch.finfo(dtype).max


@NEEDS_TRITON
@pytest.mark.parametrize(("tokens", "inner", "width"), [(128, 256, 64), (272, 512, 192)])
def test_squared_relu_inside_a_float8_product_equals_the_reference(
    kernels: Callable[[str], ModuleType], tokens: int, inner: int, width: int
) -> None:
    ops = kernels("fp8")
    x, _ = ops.both_orders_reference(normal(tokens, width), number(4.0), E4M3)
    gradient, _ = ops.both_orders_reference(normal(tokens, width, seed=1), number(16.0), E5M2)
    weight, _ = ops.both_orders_reference(normal(inner, width, std=width**-0.5, seed=2), number(100.0), E4M3)
    inverses = number(0.25), number(0.01)
    squared, _ = ops.relu2_product_reference(x, weight, *inverses, None)
    for a, kept in ((x, None), (gradient, squared)):
        got = ops.relu2_product_by_kernel(a, weight, *inverses, kept)
        for mine, right in zip(got, ops.relu2_product_reference(a, weight, *inverses, kept), strict=True):
            assert mine.dtype is right.dtype and mine.is_contiguous() and error(mine.float(), right.float()) < 0.01


@NEEDS_TRITON
@CAPS
@pytest.mark.parametrize("vocab", [304, 20_000])
def test_losses_and_float8_gradients_of_logits_equal_the_reference(
    kernels: Callable[[str], ModuleType], vocab: int, softcap: float
) -> None:
    logits = normal(6, vocab, std=3.0, dtype=torch.bfloat16)
    targets = torch.tensor([0, 7, IGNORED, 299, 2, IGNORED], device=DEVICE)
    before = logits.clone()
    losses, gradient = kernels("cross_entropy").cross_entropy_to_float8(
        logits, targets, ignored=IGNORED, softcap=softcap, scale=1024.0
    )
    wanted = cross_entropy_to_float8_reference(logits, targets, softcap=softcap, scale=1024.0)
    fast = softcap > 0 and DEVICE.type == "cuda"
    assert error(losses, wanted[0]) < (3e-4 if fast else 1e-5) and torch.equal(logits, before)
    assert gradient.dtype is E5M2 and error(gradient.float(), wanted[1].float()) < 0.01
    assert losses[2] == 0.0 and gradient[2].float().abs().max() == 0.0


@NEEDS_HOPPER
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_a_float8_product_on_the_gpu_equals_the_reference(dtype: torch.dtype, fast: bool) -> None:
    a, _ = fused_fp8.both_orders_reference(normal(272, 1024), number(16.0), dtype)
    b, _ = fused_fp8.both_orders_reference(normal(144, 1024, seed=1), number(16.0), E4M3)
    given = a, b, number(1 / 16), number(1 / 16)
    assert error(fused_fp8.product(*given, fast=fast), fused_fp8.product_reference(*given)) < 0.01


@NEEDS_TRITON
@pytest.mark.parametrize("recipe", [False, True], ids=["classic recipe", "modern recipe"])
def test_a_float8_gpt_trains_in_float8_and_is_judged_in_bfloat16(
    kernels: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, recipe: bool
) -> None:
    give_programs_more_rows(monkeypatch, kernels("ops"))
    if DEVICE.type == "cpu":  # the interpreter cannot multiply bf16 tiles
        monkeypatch.setattr(kernels("products"), "relu2_mlp", kernels("products").relu2_mlp_reference)
    monkeypatch.setattr(FusedGPT, "is_fused", lambda self, device, dtype: True)
    changes: dict[str, Any] = {
        "tie_embeddings": False,
        "norm_weights": False,
        "softcap": 15.0,
        "value_tables": 1,
        "smear": True,
    }
    config = replace(MODERN, n_layers=1, **(changes if recipe else {}))
    torch.manual_seed(0)
    models = [kind(config).to(DEVICE) for kind in (Float8GPT, FusedGPT)]
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(512, (2, 64), device=DEVICE)

    def loss(model: GPT) -> Tensor:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            result: Tensor = model(ids, targets=ids)[1]
        return result

    losses = [loss(model) for model in models]
    assert error(*losses) < 1e-3 and not torch.equal(*losses)
    gradients = [
        torch.autograd.grad(each, list(model.parameters())) for each, model in zip(losses, models, strict=True)
    ]
    for (name, _), got, wanted in zip(models[0].named_parameters(), *gradients, strict=True):
        assert got.dtype is torch.float32 and error(got, wanted) < 0.2, name
    for model in models:
        model.eval()
    assert torch.equal(*[loss(model) for model in models])


MY_MODEL = "drumline.model.gpt:GPT"


@pytest.mark.parametrize(
    ("flags", "problem", "fix"),
    [
        ("", "needs a Hopper GPU (H100, H200), but this run uses the cpu", "train on one"),
        ("--preset gpt2", "activation gelu instead of relu2", "use the model options of --preset modern"),
        ("--n_heads 16", "heads 48 wide", "use the model options of --preset modern"),
        ("--d_ff 3000", "d_ff 3000, not a multiple of 256", "use the model options of --preset modern"),
        ("--dropout 0.1", "dropout 0.1 instead of 0.0", "use the model options of --preset modern"),
        ("--context 1000", "a multiple of 128 tokens, not 1000", "choose another --context, as 1024"),
        ("--bitwise", "is not bitwise reproducible", "drop --bitwise"),
        ("--dtype float32", "not float32", "use --dtype bfloat16"),
        (f"--model {MY_MODEL}", f"not for --model {MY_MODEL}", "use --model gpt"),
    ],
)
def test_fp8_is_refused_in_two_lines_where_it_cannot_be(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    problem: str,
    fix: str,
) -> None:
    if flags:  # without a GPU that is all there is to say
        monkeypatch.setattr(fused_gpt, "is_hopper", lambda device: True)
    preset = [] if "--preset" in flags else ["--preset", "modern"]
    command = ["train", *preset, "--device", "cpu", "--doctor", "off", "--train_data_path", "text", "--fp8"]
    assert run_command([*command, *flags.split()]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: --fp8 ") and problem in first
    assert second == f"  fix: {fix}, or drop --fp8"
    assert not Path("runs").exists() and not Path("data").exists()


def fp8_run(**model: Any) -> TrainConfig:
    return with_preset(TrainConfig(model=ModelSettings(preset="modern", **model), run=RunConfig(fp8=True)))


def test_fp8_without_triton_is_refused_and_with_all_it_needs_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(fused_gpt, "is_hopper", lambda device: True)
    monkeypatch.setattr(fused_gpt, "has_kernels", lambda device: False)
    with pytest.raises(ConfigError, match="--fp8 needs Triton") as refused:
        check_fp8(fp8_run(), device)
    assert refused.value.fix == "pip install triton, or drop --fp8"
    monkeypatch.setattr(fused_gpt, "has_kernels", lambda device: True)
    for model in ("gpt", "drumline.kernels.gpt:FusedGPT"):
        check_fp8(fp8_run(model=model), device)


def test_fp8_trains_a_gpt_with_the_same_weights_and_is_part_of_what_a_run_is() -> None:
    config = fp8_run(n_layers=1, d_model=64, n_heads=1, d_ff=256)
    plain = replace(config, run=replace(config.run, fp8=False))
    models = []
    for each in (config, plain):
        torch.manual_seed(0)
        models.append(build_model(with_kernels(each, torch.device("cpu")), vocab_size=300))
    assert isinstance(models[0], Float8GPT) and type(models[1]) is GPT
    states = [model.state_dict() for model in models]
    assert states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][key], states[1][key]) for key in states[0]
    )
    assert differences(plain, config) == {"fp8": (False, True)}


@NEEDS_HOPPER
def test_a_run_in_float8_learns(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = "--n_layers 2 --n_heads 2 --d_model 128 --d_ff 512 --context 128 --vocab_size 300 --batch_size 4"
    flags = f"--preset modern {shape} --total_steps 60 --log_every 1 --train_data_path text --run_dir run --fp8"
    assert run_command(["train", *flags.split()]) == 0
    assert "in bfloat16 and float8" in capsys.readouterr().out
    losses = [record["loss"] for record in read_metrics(Path("run/metrics.jsonl")) if "loss" in record]
    assert losses[-1] < losses[0] - 1.0
