"""Every Triton kernel compiles for a Hopper GPU in each way that it is launched; this needs no GPU.

Triton's interpreter runs only the lines that a launch comes to, and a compiler reads the others too.
"""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was compiled in one way is not compiled in the same way again."""
    return tmp_path_factory.mktemp("triton")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[set[str]]:
    """The names of kernels that were launched: each is compiled, and not run."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction
    from triton.tools.tensor_descriptor import TensorDescriptor

    names: set[str] = set()

    def kind(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"*{TYPES[value.dtype]}"
        if isinstance(value, TensorDescriptor):
            return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
        return {int: "i32", float: "fp32"}[type(value)]

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        fixed = {p.name for p in self.params if p.is_constexpr} | {n for n, value in given.items() if value is None}
        signature = {name: "constexpr" if name in fixed else kind(given[name]) for name in self.arg_names}
        constants = {(self.arg_names.index(name),): given[name] for name in fixed}
        source = ASTSource(fn=self, signature=signature, constexprs=constants)
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        names.add(self.__name__)

    monkeypatch.setattr(JITFunction, "run", compile_only)
    with torch.backends.mkldnn.flags(enabled=False):
        yield names


def bf16(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True)


def through(operation: Callable[..., Any], *arguments: Any) -> None:
    """Forward and backward."""
    results = operation(*arguments)
    results = (results,) if isinstance(results, Tensor) else results
    given = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    torch.autograd.grad(results, given, [torch.zeros_like(result) for result in results])


@pytest.mark.parametrize("learns", [True, False], ids=["learned weights", "no weights"])
@pytest.mark.parametrize("more", [True, False], ids=["more", "alone"])
def test_norms_and_turns_compile(compiled: set[str], learns: bool, more: bool) -> None:
    from drumline.kernels.embedding import embedding, smeared
    from drumline.kernels.ops import add_rms_norm, qkv, times_columns

    through(add_rms_norm, bf16(64, 768), bf16(64, 768) if more else None)
    through(times_columns, torch.zeros(2304, 768, requires_grad=True), torch.ones(768, requires_grad=True))
    norm = torch.ones(64, requires_grad=True) if learns else None
    extra, rope = bf16(2, 12, 32, 64) if more else None, torch.zeros(2, 32, 32)
    matrix = torch.zeros(2304, 768, requires_grad=True)
    through(lambda *given: qkv(*given, rope, heads=12), bf16(64, 768), matrix, norm, norm, extra)
    through(embedding, torch.zeros(2, 4, dtype=torch.int64), torch.zeros(9, 768, requires_grad=True))
    through(smeared, bf16(2, 4, 768), torch.zeros(768, requires_grad=True))
    assert compiled == {
        "_add_rms_norm_kernel",
        "_add_rms_norm_backward_kernel",
        "_times_columns_backward_kernel",
        "_norm_turn_kernel",
        "_norm_turn_backward_kernel",
        "_scatter_kernel",
        "_smear_kernel",
        "_smear_backward_kernel",
    }


@pytest.mark.parametrize("softcap", [0.0, 15.0])
def test_cross_entropy_compiles(compiled: set[str], softcap: float) -> None:
    from drumline.kernels.cross_entropy import cross_entropy_in_place, cross_entropy_to_float8

    logits, targets = bf16(4, 50304).detach(), torch.zeros(4, dtype=torch.int64)
    for gradient in (True, False):
        cross_entropy_in_place(logits, targets, ignored=-100, softcap=softcap, gradient=gradient)
    cross_entropy_to_float8(logits, targets, ignored=-100, softcap=softcap, scale=1024.0)
    assert compiled == {"_cross_entropy_kernel"}


def test_squared_relu_and_float8_compile(compiled: set[str]) -> None:
    from drumline.kernels import fp8 as fused_fp8
    from drumline.kernels import products as fused_products

    through(fused_products.relu2_mlp, bf16(128, 768), bf16(3072, 768), bf16(768, 3072))
    one = torch.ones(())
    straight, turned = fused_fp8.both_orders_by_kernel(bf16(128, 768), one, fused_fp8.E4M3)
    gradient, _ = fused_fp8.both_orders_by_kernel(bf16(128, 768), one, fused_fp8.E5M2)
    fused_fp8.transposed_by_kernel(turned)
    weight = torch.zeros(3072, 768).to(fused_fp8.E4M3)
    squared, _ = fused_fp8.relu2_product_by_kernel(straight, weight, one, one, None)
    fused_fp8.relu2_product_by_kernel(gradient, weight, one, one, squared)
    assert compiled == {"_relu2_product_kernel", "_both_orders_kernel", "_transpose_kernel"}


def test_muons_passes_compile(compiled: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from drumline.optim.muon import Muon

    monkeypatch.setattr("drumline.optim.muon.suits_kernels", lambda matrix: True)
    matrix = torch.nn.Parameter(torch.zeros(96, 64))
    matrix.grad = torch.zeros(96, 64)
    Muon([matrix], torch.optim.AdamW([{"params": []}]), lr=0.1, momentum=0.9, weight_decay=0.0).step()
    assert compiled == {"_look_ahead_kernel", "_squares_kernel", "_normalise_kernel", "_apply_kernel"}


def test_adamw_compiles(compiled: set[str]) -> None:
    from drumline.kernels.adamw import OnePassAdamW

    weight = torch.nn.Parameter(torch.zeros(96, 64))
    weight.grad = torch.zeros(96, 64)
    OnePassAdamW([weight], lr=0.1, betas=(0.9, 0.95)).step()
    assert compiled == {"_adamw_kernel"}
