"""drumline's sharded step against a bare FSDP2 loop of the same model, batch and optimizer, in one run.

    torchrun --standalone --nproc_per_node=2 benchmarks/sharded_overhead.py   # gloo on CPUs, at most 1.05

Both loops run interleaved, a block of steps each in turn, so that whatever else the machine does meets them alike. The
ratio is between the medians of the blocks. A bare loop keeps freed memory, as glibc does by itself; drumline gives it
back, and a bare loop that does so too is measured as well.
"""

import argparse
import ctypes
import statistics
from collections.abc import Callable

import torch
from ddp_overhead import OPTIM, Batches, Step, build, measure
from header import header
from torch.distributed.fsdp import fully_shard

from drumline.data.batches import BatchPlan
from drumline.model.build import token_objective
from drumline.model.gpt import GPT
from drumline.optim.optimizers import make_optimizer
from drumline.parallel.world import World, join, leave
from drumline.sharding.mesh import make_mesh
from drumline.sharding.step import ShardedBackward, dealt
from drumline.sharding.strategy import Sharded, ShardedBitwise
from drumline.sharding.wrapping import How
from drumline.train.step import Backward, Precision
from drumline.train.step import Step as TrainStep

KEPT, GIVEN_BACK = 32 << 20, 16 << 20
"""Tensors up to this size are kept when they are freed: what glibc's limit grows to, and drumline's."""


def bare_loop(model: GPT, batches: Batches, world: World) -> Step:
    """What one would write by hand: a unit for each block and one for the rest, clipping, AdamW, the loss read."""
    mesh = make_mesh(world.size, world)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model, OPTIM)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for inputs, targets in batches:
            loss = model(inputs, targets=targets)[1] / targets.numel() / len(batches)
            loss.backward()
            loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def drumline_loop(model: GPT, batches: Batches, world: World, *, bitwise: bool) -> Step:
    precision = Precision.of(world.device, torch.float32)
    plan = dealt(BatchPlan(batches[0][0].size(0), world.size * len(batches)), bitwise=bitwise)
    how = How(make_mesh(world.size, world), bitwise=bitwise)
    strategy = (ShardedBitwise if bitwise else Sharded)(model, plan, world, how)
    backward = Backward(token_objective, precision, plan.sequences * batches[0][0].size(1))
    optimizer = make_optimizer(model, OPTIM)
    trained = TrainStep(model, optimizer, strategy, ShardedBackward(backward, strategy), precision, grad_clip=1.0)

    def step() -> None:
        gradient = trained.gradient((inputs, targets, None) for inputs, targets in batches)
        trained.update(gradient, lr=1e-3)()

    return step


def keeping(size: int, step: Step) -> Step:
    mallopt: Callable[[int, int], int] = ctypes.CDLL(None).mallopt

    def with_limit() -> None:
        mallopt(-3, size)  # M_MMAP_THRESHOLD
        mallopt(-1, 2 * size)  # M_TRIM_THRESHOLD
        step()

    return with_limit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="modern-tiny")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--vocab_size", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="steps per block")
    arguments = parser.parse_args()
    world = join(device="cpu")
    shape = (arguments.batch_size, arguments.context + 1)
    drawn = [torch.randint(arguments.vocab_size, shape) for _ in range(arguments.accumulate)]
    batches = [(block[:, :-1].contiguous(), block[:, 1:].contiguous()) for block in drawn]
    bare = bare_loop(build(arguments, world), batches, world)
    plain, bits = (drumline_loop(build(arguments, world), batches, world, bitwise=each) for each in (False, True))
    steps = {
        "bare FSDP2": keeping(KEPT, bare),
        "bare FSDP2, giving back": keeping(GIVEN_BACK, bare),
        "drumline --shard full": keeping(GIVEN_BACK, plain),
        "drumline --bitwise": keeping(GIVEN_BACK, bits),
    }
    took = measure(steps, arguments, world)
    if world.is_rank0:
        header()
        base = statistics.median(took["bare FSDP2"])
        print(
            f"{world.size} ranks, {arguments.preset}, batch {shape[0]} x {arguments.accumulate}, context {shape[1] - 1}"
        )
        for name, times in took.items():
            low, median, high = (value * 1e3 for value in statistics.quantiles(times, n=4))
            print(f"{name:24s} {median:8.2f} ms/step (quartiles {low:.2f}-{high:.2f})  ratio {median / base / 1e3:.3f}")
    leave()


if __name__ == "__main__":
    main()
