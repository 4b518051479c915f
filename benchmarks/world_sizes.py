"""Time and memory of the same step on 1, 2 and 4 ranks, and the share of it spent waiting for gradients.

    python benchmarks/world_sizes.py             # gloo ranks on this machine's CPUs

The step is the same everywhere: 4 micro-batches. Ranks share the machine's cores, one thread each, so more ranks than
cores gain nothing; what shows is what the ranks themselves cost. The wait is the time that a step takes longer than the
same step without synchronisation (`no_sync` throughout), measured in turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from header import header
from torch.nn.parallel import DistributedDataParallel

from drumline.config.model import ModelSettings
from drumline.config.presets import gpt_config, with_preset
from drumline.config.settings import OptimConfig, TrainConfig
from drumline.data.batches import BatchPlan
from drumline.model.build import token_objective
from drumline.model.gpt import GPT
from drumline.optim.optimizers import make_optimizer
from drumline.parallel.hardware import peak_memory_bytes
from drumline.parallel.strategies import make_strategy
from drumline.parallel.world import join, leave
from drumline.train.step import Backward, Precision, Step

PLAN, CONTEXT, VOCAB = BatchPlan(8, 4), 128, 2048


def rank(blocks: int, steps: int) -> None:
    """What one rank measures; rank 0 prints it as JSON."""
    world = join(device="cpu")
    torch.manual_seed(0)
    config = with_preset(TrainConfig(model=ModelSettings(preset="modern-tiny")))
    model = GPT(gpt_config(config.model, vocab_size=VOCAB))
    optimizer = make_optimizer(model, OptimConfig(lr=1e-3))
    strategy = make_strategy(model, PLAN, world, bitwise=False)
    share = PLAN.share(world.rank, world.size)
    batches = [torch.randint(VOCAB, (PLAN.micro_batch_size, CONTEXT + 1)) for _ in share]
    micro_batches = [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous(), None) for batch in batches]
    wrapped = strategy.model if isinstance(strategy.model, DistributedDataParallel) else None
    precision = Precision.of(world.device, torch.float32)
    backward = Backward(token_objective, precision, PLAN.sequences * CONTEXT, strategy.scale)
    trained = Step(model, optimizer, strategy, backward, precision, grad_clip=1.0)
    times: dict[str, list[float]] = {"step": [], "without": []}
    for block in range(blocks + 1):
        for name, taken in times.items():
            if world.is_group:
                dist.barrier()
            with wrapped.no_sync() if wrapped is not None and name == "without" else nullcontext():
                start = time.perf_counter()
                for _ in range(steps):
                    trained.update(trained.gradient(micro_batches), lr=1e-3)()
                if block:
                    taken.append((time.perf_counter() - start) / steps)
    if world.is_rank0:
        medians = {name: statistics.median(values) for name, values in times.items()}
        print(json.dumps({**medians, "memory": peak_memory_bytes(world.device)}), flush=True)
    leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6, help="steps per block")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        rank(arguments.blocks, arguments.steps)
        return
    header()
    step = f"{PLAN.micro_batches} micro-batches of {PLAN.micro_batch_size} x {CONTEXT} tokens"
    print(f"modern-tiny, {step}, 1 thread per rank")
    print("ranks   ms/step   waiting for gradients   peak memory of rank 0")
    for size in (1, 2, 4):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}"]
        flags = [f"--blocks={arguments.blocks}", f"--steps={arguments.steps}"]
        done = subprocess.run(
            [*torchrun, __file__, *flags],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        figures = json.loads(done.stdout.splitlines()[-1])
        waiting = max(0.0, 1 - figures["without"] / figures["step"])
        print(f"{size:5d} {figures['step'] * 1e3:9.1f} {waiting:23.1%} {figures['memory'] / 1e6:20.0f} MB")


if __name__ == "__main__":
    main()
