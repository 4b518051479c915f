"""Muon's update by owners (each matrix orthogonalized by one rank) against the same update repeated by every rank.

    torchrun --standalone --nproc_per_node=2 benchmarks/muon_ranks.py    # gloo ranks on CPUs
    torchrun --nproc_per_node=8 benchmarks/muon_ranks.py --nccl          # the GPUs of a host
    python benchmarks/muon_ranks.py --nccl                               # one GPU: what messages to itself cost

Each line is a model: the matrices of `--layers` blocks of a width (queries, keys and values, projection, and an MLP of
four times the width). "divided" is for ranks that have everything, "sharded" for ranks that have some rows of each
matrix. All are measured in turns, one update each, and the fastest of each counts. The work that a division spares a
rank decides whether ranks divide: `PRICES` in src/drumline/optim/muon_owners.py.
"""

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from header import header

from drumline.optim.muon import Part, Rules, update
from drumline.optim.muon_owners import ROUND_SIZE, Ranks, cost, rows_of_shard, update_by_owners
from drumline.optim.suited import suits_kernels
from drumline.parallel.world import World, join, leave

MOMENTUM, LR = 0.95, 1e-4


def parts_of(width: int, layers: int, world: World, *, sharded: bool) -> list[Part]:
    """All parts of a model; of a sharded one, this rank's rows of them."""
    parts, shapes = [], ((3 * width, width, 3), (width, width, 1), (4 * width, width, 1), (width, 4 * width, 1))
    for _ in range(layers):
        for rows, columns, count in shapes:
            here = rows_of_shard(world.rank, world.size, rows) if sharded else range(rows)
            weight, gradient, momentum = torch.randn(3, len(here), columns, device=world.device).unbind()
            variance = torch.zeros(len(here), device=world.device)
            for number in range(count):
                of = range(number * rows // count, (number + 1) * rows // count)
                cut = slice(*(min(max(row - here.start, 0), len(here)) for row in (of.start, of.stop)))
                tensors = weight[cut], gradient[cut], momentum[cut], variance[cut]
                parts.append(Part(*tensors, torch.zeros((), device=world.device), of, rows))
    return parts


def ways_of(width: int, layers: int, world: World) -> dict[str, Callable[[], None]]:
    everything, rows = (parts_of(width, layers, world, sharded=sharded) for sharded in (False, True))
    kernels = all(suits_kernels(part.weight) for part in everything)
    rules = Rules(MOMENTUM, LR, kept=1.0, divisor=None, skipped=None, by_kernels=kernels)
    group = dist.group.WORLD

    def by_owners(parts: list[Part], ranks: Ranks) -> Callable[[], None]:
        return lambda: update_by_owners(parts, rules, ranks, device=world.device, size=ROUND_SIZE)

    return {
        "repeated": lambda: update(everything, rules),
        "divided": by_owners(everything, Ranks(None, group)),
        "sharded": by_owners(rows, Ranks(group, None)),
    }


def measured(ways: dict[str, Callable[[], None]], world: World, repetitions: int) -> dict[str, float]:
    """Seconds of an update on the slowest rank, the fastest of several."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repetitions + 2):
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            way()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = torch.tensor([time.perf_counter() - start], device=world.device)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if turn >= 2:  # the first ones warm up
                took[name].append(seconds.item())
    return {name: min(times) for name, times in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256, 512, 768])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--nccl", action="store_true", help="on GPUs")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29513")
    if not arguments.nccl:
        torch.set_num_threads(1)
    world = join(device="cuda" if arguments.nccl else "cpu")
    if world.is_rank0:
        header()
        print(f"{world.size} ranks, {arguments.layers} layers, {dist.get_backend()}")
        print("width  million weights  GFLOP  GFLOP spared  repeated ms  divided/repeated  sharded/repeated")
    for width in arguments.widths:
        took = measured(ways_of(width, arguments.layers, world), world, arguments.repetitions)
        squares, oblong = 4 * arguments.layers, 2 * arguments.layers
        flops = squares * cost(width, width) + oblong * cost(width, 4 * width)
        if world.is_rank0:
            repeated = took["repeated"]
            print(
                f"{width:5d} {12 * arguments.layers * width**2 / 1e6:16.2f} {flops / 1e9:6.1f}"
                f" {flops * (1 - 1 / world.size) / 1e9:13.2f} {repeated * 1e3:12.2f}"
                f" {took['divided'] / repeated:17.3f} {took['sharded'] / repeated:17.3f}",
                flush=True,
            )
    leave()


if __name__ == "__main__":
    main()
