"""drumline's step against a bare PyTorch DDP loop of the same model, batch and optimizer, in one run.

    torchrun --nproc_per_node=2 benchmarks/ddp_overhead.py        # 2 gloo ranks on CPUs: target at most 1.03
    python benchmarks/ddp_overhead.py --preset modern --nccl      # one GPU: DDP on 1 rank against no wrapper, 1.02

Both loops run interleaved, a block of steps each in turn, so that whatever else the machine does meets them alike. The
ratio is between the medians of the blocks. `--bitwise` also measures that mode against the default.
"""

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from header import header
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drumline.config.model import ModelSettings
from drumline.config.presets import gpt_config, with_preset
from drumline.config.settings import OptimConfig, TrainConfig
from drumline.data.batches import BatchPlan
from drumline.model.build import token_objective
from drumline.model.gpt import GPT
from drumline.optim.optimizers import make_optimizer
from drumline.parallel.strategies import make_strategy
from drumline.parallel.world import World, join, leave
from drumline.train.step import Backward, Precision
from drumline.train.step import Step as TrainStep

OPTIM = OptimConfig(lr=1e-3)
Batches = list[tuple[torch.Tensor, torch.Tensor]]
Step = Callable[[], None]


def build(arguments: argparse.Namespace, world: World) -> GPT:
    torch.manual_seed(0)
    config = with_preset(TrainConfig(model=ModelSettings(preset=arguments.preset)))
    return GPT(gpt_config(config.model, vocab_size=arguments.vocab_size)).to(world.device)


def bare_loop(model: nn.Module, batches: Batches, precision: Precision) -> Step:
    """What one would write by hand: DDP, no_sync while accumulating, clipping, AdamW, the loss read each step."""
    optimizer = make_optimizer(model, OPTIM)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for number, (inputs, targets) in enumerate(batches):
            last = number == len(batches) - 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                with precision.autocast():
                    loss = wrapped(inputs, targets=targets)[1] / targets.numel() / len(batches)
                loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def drumline_loop(model: nn.Module, batches: Batches, precision: Precision, world: World, *, bitwise: bool) -> Step:
    optimizer = make_optimizer(model, OPTIM)
    plan = BatchPlan(batches[0][0].size(0), world.size * len(batches))
    strategy = make_strategy(model, plan, world, bitwise=bitwise)
    backward = Backward(token_objective, precision, plan.sequences * batches[0][0].size(1), strategy.scale)
    trained = TrainStep(model, optimizer, strategy, backward, precision, grad_clip=1.0)

    def step() -> None:
        gradient = trained.gradient((inputs, targets, None) for inputs, targets in batches)
        trained.update(gradient, lr=1e-3)()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="modern-tiny")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--vocab_size", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8, help="steps per block")
    parser.add_argument("--bitwise", action="store_true", help="also measure --bitwise")
    parser.add_argument("--nccl", action="store_true", help="one GPU: DDP at world size 1 against no wrapper")
    arguments = parser.parse_args()
    if arguments.nccl:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    world = join(device="cuda" if arguments.nccl else "cpu")
    precision = Precision.of(world.device, torch.bfloat16 if arguments.nccl else torch.float32)
    shape = (arguments.batch_size, arguments.context + 1)
    blocks = [torch.randint(arguments.vocab_size, shape, device=world.device) for _ in range(arguments.accumulate)]
    batches = [(block[:, :-1].contiguous(), block[:, 1:].contiguous()) for block in blocks]

    model = build(arguments, world)
    if arguments.nccl:
        alone = World(world.place, world.device)  # without a store there is nobody to wrap the model for
        steps = {"no wrapper": drumline_loop(model, batches, precision, alone, bitwise=False)}
    else:
        steps = {"bare DDP": bare_loop(model, batches, precision)}
    steps["drumline DDP"] = drumline_loop(build(arguments, world), batches, precision, world, bitwise=False)
    if arguments.bitwise:
        steps["drumline --bitwise"] = drumline_loop(build(arguments, world), batches, precision, world, bitwise=True)
    took = measure(steps, arguments, world)
    if world.is_rank0:
        header()
        base = statistics.median(took[next(iter(steps))])
        print(
            f"{world.size} ranks, {arguments.preset}, batch {shape[0]} x {arguments.accumulate}, context {shape[1] - 1}"
        )
        for name, times in took.items():
            low, median, high = (value * 1e3 for value in statistics.quantiles(times, n=4))
            print(f"{name:20s} {median:8.2f} ms/step (quartiles {low:.2f}-{high:.2f})  ratio {median / base / 1e3:.3f}")
    leave()


def measure(steps: dict[str, Step], arguments: argparse.Namespace, world: World) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {name: [] for name in steps}
    for block in range(arguments.blocks + 1):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(arguments.steps):
                step()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            if block:  # the first block warms up
                took[name].append((time.perf_counter() - start) / arguments.steps)
    return took


if __name__ == "__main__":
    main()
