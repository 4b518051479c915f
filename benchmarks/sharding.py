"""What sharding costs and saves: a step with --shard against one without, and peak memory against the prediction.

    python benchmarks/sharding.py --preset gpt2-xl --batch_size 8                           # one GPU, none and full
    python benchmarks/sharding.py --preset gpt2-xl --batch_size 32 --compile --steps 7
    python benchmarks/sharding.py --preset llama-8b --batch_size 4 --accumulated 8 --compile \\
        --activation_checkpointing selective --any_weights --shards full --steps 2
    torchrun --standalone --nproc_per_node=4 benchmarks/sharding.py --preset tiny --shards none full 2

Each row is a process of its own on a single GPU; under torchrun, one after the other in the same processes.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
from gpu_throughput import kernels
from torch import nn

from drumline.bench.estimates import estimate
from drumline.bench.memory import peak_memory
from drumline.config import BatchConfig, ModelSettings, OptimConfig, RanksConfig, RunConfig, TrainConfig, resolved
from drumline.data import BatchPlan, TokenBatches, TokenFile
from drumline.kernels import with_kernels
from drumline.model import build_model, flops_per_token
from drumline.parallel import World, join, leave, peak_flops, pick_dtype
from drumline.sharding import undrawn
from drumline.sharding.weights import local
from drumline.train.pretraining import _step
from drumline.train.step import Step

VOCABULARY = 50304
_WARM_UPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2-xl")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--accumulated", type=int, default=1)
    parser.add_argument("--context", type=int)
    parser.add_argument("--vocab_size", type=int, default=VOCABULARY)
    parser.add_argument("--activation_checkpointing", default="none")
    parser.add_argument("--offload", default="none")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--any_weights", action="store_true", help="drawn on the GPU, in seconds: not as a run does it")
    parser.add_argument("--profile", action="store_true", help="show the kernels that a step's time goes to")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--shards", nargs="+", default=["none", "full"])
    args = parser.parse_args()
    alone = "RANK" not in os.environ
    if alone and len(args.shards) > 1:  # so that one does not leave memory to the next
        at = sys.argv.index("--shards") if "--shards" in sys.argv else len(sys.argv)
        for shard in args.shards:
            words = [*sys.argv[1:at], *sys.argv[at + 1 + len(args.shards) :], "--shards", shard]
            subprocess.run([sys.executable, __file__, *words], check=False)
        return
    for shard in args.shards:
        measure(args, shard)
    leave()


def one_step(step: Step, batches: TokenBatches, world: World, number: int) -> float:
    share = batches.plan.share(world.rank, world.size)
    gradient = step.gradient(batches.micro_batch(number, index) for index in share)
    return step.update(gradient, lr=1e-4)().loss


def measure(args: argparse.Namespace, shard: str) -> None:
    world = join()
    config = resolved(
        TrainConfig(
            model=ModelSettings(preset=args.preset, context=args.context),
            batch=BatchConfig(batch_size=args.batch_size),
            optim=OptimConfig(optimizer="adamw", lr=1e-4, embedding_lr=1e-4, head_lr=1e-4),
            run=RunConfig(
                activation_checkpointing=args.activation_checkpointing,
                offload=args.offload if shard != "none" else "none",
                compile=args.compile,
            ),
            ranks=RanksConfig(shard=int(shard) if shard.isdigit() else shard),  # type: ignore[arg-type]
        )
    )
    config = replace(config, data=replace(config.data, vocab_size=args.vocab_size))
    context = config.model.context or 0
    plan = BatchPlan(args.batch_size, world.size * args.accumulated)
    drawn = np.random.default_rng(0).integers(args.vocab_size, size=1 << 20, dtype=np.uint32)
    batches = TokenBatches(TokenFile(path=Path("random.bin"), tokens=drawn), plan, context=context, seed=0)
    dtype = pick_dtype("auto", world.device)
    built = with_kernels(config, world.device) if world.device.type == "cuda" else config
    if shard == "none" and world.device.type == "cuda":
        # The same arithmetic: without its kernels for whole models, which a sharded one cannot use.
        built = with_kernels(replace(config, ranks=replace(config.ranks, shard="full")), world.device)
    # The prediction is of tensors; on a CPU, torch and Python have their memory already.
    before = psutil.Process().memory_info().rss if world.device.type == "cpu" else 0
    with peak_memory(world.device) as peak:

        def make() -> nn.Module:
            torch.manual_seed(0)
            return build_model(built, vocab_size=args.vocab_size)

        if shard == "none":
            model, initialize = make().to(world.device), lambda: None
        else:
            model, initialize = undrawn(make, world)  # as a run does
        flops = flops_per_token(model, context=context)
        step = _step(config, model, batches, world)
        if args.any_weights:
            for parameter in model.parameters():
                nn.init.normal_(local(parameter), std=0.02)
        else:
            initialize()
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # how the weights came here is another question
        times = []
        for number in range(_WARM_UPS + args.steps):
            began = time.perf_counter()
            loss = one_step(step, batches, world, number)
            times.append(time.perf_counter() - began)
        peak_bytes = max(world.gather(peak() - before))
    predicted = estimate(
        config,
        tokens=args.batch_size * context,
        vocab_size=args.vocab_size,
        device=world.device,
        dtype=dtype,
        ranks=world.size,
        rounds=args.accumulated,
    )
    seconds = sorted(times[_WARM_UPS:])[args.steps // 2]
    tokens = plan.sequences * context
    top = peak_flops(world.device, dtype)
    mfu = f"{flops * tokens / seconds / (top * world.size):.1%}" if top else "-"
    if world.is_rank0:
        print(
            f"{args.preset} --shard {shard} --offload {args.offload} --activation_checkpointing "
            f"{args.activation_checkpointing}{' --compile' if args.compile else ''}, "
            f"{world.size} x {args.accumulated} x {args.batch_size} x {context}: step {1000 * seconds:.1f} ms, "
            f"{tokens / seconds / world.size:,.0f} tokens/s a rank, mfu {mfu}, "
            f"peak {peak_bytes / 1e9:.2f} GB, predicted "
            f"{predicted.peak_bytes / 1e9:.2f} GB, loss {loss:.3f}",
            flush=True,
        )
    if args.profile:
        rows = kernels(partial(one_step, step, batches, world, 0))
        if world.is_rank0:
            print(*(f"    {ms:8.2f} ms {count:7.0f}  {kernel[:110]}" for kernel, count, ms in rows[:25]), sep="\n")
    del step, model
    gc.collect()


if __name__ == "__main__":
    main()
