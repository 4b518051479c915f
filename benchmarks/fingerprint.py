"""What the fingerprint of the weights in each record costs, as a part of the steps between two records.

    python benchmarks/fingerprint.py [--presets tiny gpt2] [--log_every 10]

Target: less than 0.2 % of the steps. Of a large model, the step is of one sequence: with more, the part is smaller.
Both are measured in one process, in turn, with all cores.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from header import header

from drumline.checkpoint import weights_fingerprint
from drumline.config import ModelSettings, TrainConfig, resolved
from drumline.config import preset as of_preset
from drumline.model import build_model
from drumline.optim import make_optimizer

WHOLE = ("tiny", "modern-tiny")
"""Presets whose whole batch takes no long time; of the others, one sequence is measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["tiny", "gpt2"])
    parser.add_argument("--log_every", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    header()
    for preset in args.presets:
        measure(preset, log_every=args.log_every, repeat=args.repeat)


def measure(preset: str, *, log_every: int, repeat: int) -> None:
    config = resolved(TrainConfig(model=ModelSettings(preset=preset)))
    vocab_size, context = config.data.vocab_size or 50304, config.model.context or 0
    sequences = of_preset(preset).batch_size if preset in WHOLE else 1
    model = build_model(config, vocab_size=vocab_size)
    optimizer = make_optimizer(model, config.optim)
    batch = torch.randint(vocab_size, (sequences, context + 1))
    steps_s, fingerprints_s = [], []
    for _ in range(repeat + 1):
        since = time.perf_counter()
        optimizer.zero_grad()
        model(batch[:, :-1], targets=batch[:, 1:].contiguous())[1].backward()
        optimizer.step()
        steps_s.append(time.perf_counter() - since)
        since = time.perf_counter()
        weights_fingerprint(model)
        fingerprints_s.append(time.perf_counter() - since)
    step_s, own_s = median(steps_s[1:]), median(fingerprints_s[1:])
    parameters = sum(p.numel() for p in model.parameters())
    part = own_s / (log_every * step_s)
    print(
        f"{preset:8} {parameters / 1e6:7.1f}M weights  step of {sequences} x {context} tokens {step_s * 1e3:8.1f} ms  "
        f"fingerprint {own_s * 1e3:7.2f} ms  {part:.3%} of {log_every} steps"
    )


if __name__ == "__main__":
    main()
