"""What fits where: the predicted memory of a rank, by preset and by how its state is spread. No GPU is needed.

    python benchmarks/what_fits.py --context 2048 --batch_size 1

In bfloat16 with AdamW, several GPUs with --shard full, without the Triton kernels of Hopper GPUs, which take less.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Literal

import torch

from drumline.bench.estimates import Memory, estimate
from drumline.config import ModelSettings, OptimConfig, RanksConfig, RunConfig, TrainConfig, resolved

WAYS: tuple[tuple[Literal["none", "block"], Literal["none", "optimizer"]], ...] = (
    ("none", "none"),
    ("block", "none"),
    ("block", "optimizer"),
)
"""--activation_checkpointing and --offload."""


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["gpt2-xl", "llama-1b", "llama-3b", "llama-8b"])
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2, 4, 8, 32])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batch_size", type=int, default=1)
    args = parser.parse_args(words)
    print(f"GB per GPU, {args.batch_size} x {args.context} tokens a micro-batch")
    print("| preset | parameters | " + " | ".join(str(gpus) for gpus in args.gpus) + " |")
    print("| --- | --- |" + " --- |" * len(args.gpus))
    for preset in args.presets:
        cells = []
        for gpus in args.gpus:
            sizes = []
            for checkpointing, offload in WAYS:
                memory = predicted(preset, gpus, checkpointing, offload, args)
                sizes.append(f"{memory.peak_bytes / 1e9:.0f}")
            cells.append(" / ".join(sizes))
        print(f"| `{preset}` | {memory.parameters / 1e9:.2f} B | " + " | ".join(cells) + " |")


def predicted(
    preset: str,
    gpus: int,
    checkpointing: Literal["none", "block"],
    offload: Literal["none", "optimizer"],
    args: argparse.Namespace,
) -> Memory:
    gpt2 = preset.startswith("gpt2")
    config = resolved(
        TrainConfig(
            model=ModelSettings(preset=preset, context=min(args.context, 1024) if gpt2 else args.context),
            optim=OptimConfig(optimizer="adamw", lr=1e-4, embedding_lr=1e-4, head_lr=1e-4),
            run=RunConfig(activation_checkpointing=checkpointing, offload=offload),
            ranks=RanksConfig(shard="none" if gpus == 1 and offload == "none" else "full"),
        )
    )
    return estimate(
        config,
        tokens=args.batch_size * (config.model.context or 0),
        vocab_size=50304 if gpt2 else 128256,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        ranks=gpus,
        kernels=False,
    )


if __name__ == "__main__":
    main()
