"""Whole training steps on one GPU: tokens/s, MFU, peak memory, and how long the first step takes.

    python benchmarks/gpu_throughput.py                  # everything, some minutes
    python benchmarks/gpu_throughput.py modern nanogpt   # some of it
    python benchmarks/gpu_throughput.py modern --profile # and which kernels its time goes to

A step is drumline's own (forward, backward, clipping, optimizer) on random tokens of context 1024, timed by
the host's clock over all steps, synchronised at both ends. `nanogpt` is the baseline: nanoGPT's model and settings (no
biases, exact GELU, autocast, torch.compile of the whole model, fused AdamW) in a bare loop. Each runs in a process of
its own; the first step starts from empty compiler caches, `again` from filled ones. MFU is against the data sheet's
dense bf16 peak.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from header import header
from nanogpt import NanoGPT
from torch import Tensor

from drumline.config.model import GPTConfig, ModelSettings
from drumline.config.presets import gpt_config, with_preset
from drumline.config.settings import OptimConfig, TrainConfig
from drumline.kernels.cuda_graphs import with_graphs
from drumline.kernels.gpt import Float8GPT, FusedGPT
from drumline.model.build import token_objective
from drumline.model.flops import flops_per_token
from drumline.model.gpt import GPT
from drumline.optim.optimizers import make_optimizer
from drumline.parallel.hardware import allow_tf32, peak_flops
from drumline.parallel.strategies import Plain
from drumline.train.step import Backward, Gradient, Precision
from drumline.train.step import Step as TrainStep

CONTEXT, VOCAB = 1024, 50304
Step = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Case:
    preset: str
    batch_size: int = 32
    recipe: Any = "classic"
    compile: bool = False
    plain: bool = False
    """Without fused kernels."""
    fp8: bool = False
    steps: int = 60


CASES = {
    "classic": Case(preset="gpt2", compile=True),
    "modern": Case(preset="modern"),
    "modern-fp8": Case(preset="modern", fp8=True),
    "modern-recipe": Case(preset="modern", recipe="modern"),
    "modern-recipe-fp8": Case(preset="modern", recipe="modern", fp8=True),
    "modern-plain": Case(preset="modern", plain=True, compile=True),
    "modern-medium": Case(preset="modern-medium", batch_size=16, steps=40),
    "modern-xl": Case(preset="modern-xl", batch_size=16, steps=12),
    "nanogpt": Case(preset="gpt2", compile=True, plain=True),
}
FIRST_STEP_AGAIN = ("classic", "modern")


def nanogpt_step(config: GPTConfig, ids: Tensor, targets: Tensor) -> Step:
    model = NanoGPT(config).to(ids.device)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    model.compile()

    def step() -> float:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return 0.0  # nanoGPT reads the loss once in a while only

    return step


def drumline_step(model: GPT, optim: OptimConfig, ids: Tensor, targets: Tensor) -> Step:
    precision = Precision.of(torch.device("cuda"), torch.bfloat16)
    optimizer, strategy = make_optimizer(model, optim), Plain(model)
    backward = with_graphs(Backward(token_objective, precision, ids.numel()), model, strategy)
    trained = TrainStep(model, optimizer, strategy, backward, precision, optim.grad_clip or 0.0)
    batches = [(ids, targets, None)]
    computed: list[Gradient] = []

    def step() -> float:
        """As the loop does it: what comes next is started before the loss is read."""
        read = trained.update(computed.pop() if computed else trained.gradient(batches), lr=optim.lr)
        if backward.runs_ahead:
            computed.append(trained.gradient(batches))
        return read().loss

    return step


def build(case: Case, device: torch.device) -> tuple[GPT, OptimConfig]:
    settings = ModelSettings(preset=case.preset, recipe=case.recipe, context=CONTEXT)
    config = with_preset(TrainConfig(model=settings))
    shape = gpt_config(config.model, vocab_size=VOCAB)
    torch.manual_seed(0)
    with device:
        model = (GPT if case.plain else Float8GPT if case.fp8 else FusedGPT)(shape)
    return model, replace(config.optim, lr=3e-4) if case.recipe == "classic" else config.optim


def kernels(step: Step, *, steps: int = 5) -> list[tuple[str, float, float]]:
    """Name, times a step and ms a step of each kernel, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    rows = [(e.key, e.count / steps, e.self_device_time_total / 1000 / steps) for e in profile.key_averages()]
    return sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2])


def measure(name: str, *, steps: int, profile: bool = False) -> dict[str, Any]:
    """One case in this process, as JSON's values; with no steps only the first is timed."""
    case, device = CASES[name], torch.device("cuda")
    allow_tf32()
    torch.zeros(1, device=device)
    began = time.perf_counter()
    model, optim = build(case, device)
    where = "cuda" if name == "nanogpt" else "cpu"  # drumline's step fetches its batches itself
    ids = torch.randint(VOCAB, (case.batch_size, CONTEXT), device=where)
    targets = torch.randint(VOCAB, (case.batch_size, CONTEXT), device=where)
    if case.compile and name != "nanogpt":
        model.compile()
    step = nanogpt_step(model.config, ids, targets) if name == "nanogpt" else drumline_step(model, optim, ids, targets)
    flops = flops_per_token(model, context=CONTEXT)
    if name == "nanogpt":
        del model
    step()
    torch.cuda.synchronize()
    figures: dict[str, Any] = {"first_step_s": time.perf_counter() - began}
    if not steps:
        return figures
    losses = [step() for _ in range(5)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    losses += [step() for _ in range(steps)]
    torch.cuda.synchronize()
    tokens_per_s = steps * ids.numel() / (time.perf_counter() - began)
    peak = peak_flops(device, torch.bfloat16)
    peak_memory = torch.cuda.max_memory_allocated()
    return figures | {
        "kernels": kernels(step) if profile else [],
        "tokens_per_s": tokens_per_s,
        "mfu": tokens_per_s * flops / peak if peak else math.nan,
        "peak_memory_gib": peak_memory / 2**30,
        "losses": losses,
    }


def in_a_process(name: str, caches: str, *, steps: int, profile: bool = False) -> dict[str, Any]:
    environment = os.environ | {
        "TRITON_CACHE_DIR": f"{caches}/{name}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/{name}/inductor",
    }
    command = [sys.executable, __file__, "--here", name, "--steps", str(steps), *(["--profile"] if profile else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name} failed:\n{done.stderr[-2000:]}", flush=True)
        return {}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of: {', '.join(CASES)}. Default: all")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=-1, help="steps to time. Default: what suits the case")
    parser.add_argument("--profile", action="store_true", help="show where the time of each case's steps goes")
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure(arguments.here, steps=arguments.steps, profile=arguments.profile)))
        return
    header()
    print(
        "| case | batch | tokens/s | MFU | peak GiB | first step s | again s | loss |\n" + "| --- " * 8 + "|",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as caches:
        for name in arguments.cases or CASES:
            steps = CASES[name].steps if arguments.steps < 0 else arguments.steps
            figures = in_a_process(name, caches, steps=steps, profile=arguments.profile)
            again = in_a_process(name, caches, steps=0) if name in FIRST_STEP_AGAIN and figures else {}
            cells = [
                f"{figures.get('tokens_per_s', math.nan):,.0f}",
                f"{100 * figures.get('mfu', math.nan):.1f} %",
                f"{figures.get('peak_memory_gib', math.nan):.2f}",
                f"{figures.get('first_step_s', math.nan):.1f}",
                f"{again['first_step_s']:.1f}" if again else "",
                f"{figures['losses'][-1]:.3f}" if figures.get("losses") and name != "nanogpt" else "",
            ]
            print(f"| {name} | {CASES[name].batch_size} | {' | '.join(cells)} |", flush=True)
            for kernel, times, ms in figures.get("kernels", []):
                print(f"    {ms:8.3f} ms {times:6.1f} x  {kernel[:120]}", flush=True)


if __name__ == "__main__":
    main()
