"""Time of the kernels of a step of generation with other divisions of their work, on a GPU.

    python benchmarks/generation_kernels.py               # of the preset modern, batch 1 and 64
    python benchmarks/generation_kernels.py --batches 8

For each matrix and for attention, the divisions that are fastest and the one in use. Each is timed in a CUDA graph that
goes through more weights than the GPU's cache has room for. Kernels are compiled by several processes at first.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from header import header
from torch import Tensor

from drumline.decoding.attending import Attention, Pieces, attend, pieces_for
from drumline.decoding.linear import Linear, Tiles, linear, tiles_for

WIDTH, INNER, VOCABULARY, HEADS, POSITIONS = 768, 3072, 50304, 12, 1024
BYTES = 160 << 20
"""Of weights that a graph reads: several times an H200's cache."""
SHAPES = {
    "qkv": (3 * WIDTH, WIDTH),
    "out": (WIDTH, WIDTH),
    "up": (INNER, WIDTH),
    "down": (WIDTH, INNER),
    "head": (VOCABULARY, WIDTH),
}


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    way: Tiles | Pieces | None
    """None: the one in use."""


def cases(batches: list[int]) -> Iterator[Case]:
    for batch, name in itertools.product(batches, SHAPES):
        yield Case(name, batch, None)
        columns = (32, 64, 128) if name == "head" else (16, 32)
        depths = (64, 128, 256) if batch > 16 else (128, 256, 512)
        for column, depth, warps, stages in itertools.product(columns, depths, (2, 4, 8), (3, 5)):
            rows = 16 if batch <= 16 else 64
            if (column + rows) * depth * 2 * (stages - 1) <= 200_000:
                yield Case(name, batch, Tiles(rows=rows, columns=column, depth=depth, warps=warps, stages=stages))
    for batch in batches:
        yield Case("attend", batch, None)
        for programs, block, warps, stages in itertools.product((128, 256, 512), (32, 64, 128), (2, 4), (2, 3)):
            if batch * HEADS < programs or programs == 256:
                yield Case("attend", batch, Pieces(programs=programs, block=block, warps=warps, stages=stages))


def once(case: Case, *, copies: int) -> Callable[[], None]:
    """Calls that go through so many copies of what the kernel reads."""

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * std

    if case.name == "attend":
        caches = torch.zeros(
            copies, 2, case.batch, HEADS, POSITIONS, WIDTH // HEADS, device="cuda", dtype=torch.bfloat16
        )
        rope = torch.rand(2, POSITIONS, WIDTH // HEADS // 2, device="cuda")
        table = normal(64, WIDTH)
        qkv, out = normal(case.batch, 3 * WIDTH), normal(case.batch, WIDTH)
        lengths = torch.full((case.batch,), 400, device="cuda")
        ids = torch.zeros(case.batch, dtype=torch.int64, device="cuda")
        layers = [
            Attention(cache=cache, heads=HEADS, norm_eps=1e-6, query_norm=None, key_norm=None, rope=rope, table=table)
            for cache in caches
        ]
        more = {} if case.way is None else {"pieces": case.way}

        def attention() -> None:
            for layer in layers:
                attend(qkv, layer, out, lengths=lengths, ids=ids, positions=512, **more)  # type: ignore[arg-type]

        return attention
    outputs, columns = SHAPES[case.name]
    weights = [normal(outputs, columns, std=columns**-0.5) for _ in range(copies)]
    eps = 1e-6 if case.name in ("qkv", "up", "head") else None
    activation = "relu2" if case.name == "up" else "none"
    x = normal(case.batch, columns)
    result = torch.float32 if case.name == "head" else torch.bfloat16
    out = torch.empty(case.batch, outputs, device="cuda", dtype=result)
    residual = normal(case.batch, outputs) if eps is None else None
    softcap = 15.0 if case.name == "head" else 0.0

    def products() -> None:
        for weight in weights:
            layer = Linear(weight=weight, eps=eps, activation=activation, softcap=softcap)  # type: ignore[arg-type]
            linear(x, layer, out, residual=residual, tiles=case.way)  # type: ignore[arg-type]

    return products


def compiled(case: Case) -> str:
    try:
        once(case, copies=1)()
        torch.cuda.synchronize()
    except Exception as error:
        return type(error).__name__
    return ""


def copies_of(case: Case) -> int:
    size = (
        case.batch * POSITIONS * WIDTH * 4 if case.name == "attend" else 2 * SHAPES[case.name][0] * SHAPES[case.name][1]
    )
    return max(2, min(40, BYTES // size))


def timed_us(case: Case) -> float:
    """Microseconds of one call, the best of some replays."""
    copies = copies_of(case)
    calls = once(case, copies=copies)
    calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    times = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / copies)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--best", type=int, default=5, help="divisions to show of each (default 5)")
    arguments = parser.parse_args()
    header()
    every = list(cases(arguments.batches))
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 2)) as pool:
        failed = dict(zip(every, pool.map(compiled, every, chunksize=4), strict=True))
    times: dict[tuple[int, str], list[tuple[float, Case]]] = {}
    for case in every:
        if not failed[case]:
            times.setdefault((case.batch, case.name), []).append((timed_us(case), case))
    for (batch, name), measured in times.items():
        used_us = next((each for each, case in measured if case.way is None), float("nan"))
        used = pieces_for(batch * HEADS) if name == "attend" else tiles_for(batch, *SHAPES[name])
        print(f"batch {batch}, {name}: {used_us:.2f} us in use ({used})")
        for each_us, case in sorted(measured, key=lambda each: each[0])[: arguments.best]:
            print(f"    {each_us:8.2f} us  {case.way or 'in use'}")
    print(f"{sum(map(bool, failed.values()))} of {len(every)} divisions do not fit: {set(failed.values()) - {''}}")


if __name__ == "__main__":
    main()
