"""Tokens per second of text generation, with the key/value cache and recomputing everything for each token.

    python benchmarks/sampling.py                # GPT-2 124M, 512 tokens, on the CPU: a few minutes
    python benchmarks/sampling.py --tokens 128

Random weights, greedy: the texts must be equal, and only the time may differ.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import islice

import torch
from header import header

from drumline.config.model import GPTConfig
from drumline.generate.sample import SampleConfig, generate
from drumline.model.flops import num_parameters
from drumline.model.gpt import GPT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="tokens to generate (default 512)")
    tokens = parser.parse_args().tokens

    torch.manual_seed(0)
    model = GPT(GPTConfig())
    header()
    print(f"load      {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} threads")
    print(f"GPT-2 shape, {num_parameters(model) / 1e6:.0f} M parameters, float32, {tokens} tokens, batch 1, greedy")
    cached, recomputed = measure(model, tokens)
    for name, run in (("cache", cached), ("recompute", recomputed)):
        print(f"{name:9} {tokens / run.seconds:8.1f} tokens/s")
    print(f"ratio     {recomputed.seconds / cached.seconds:8.1f}x (target: at least 3x)")
    print(f"{'texts are equal' if cached.text == recomputed.text else 'TEXTS DIFFER'}, load {os.getloadavg()[0]:.1f}")


class Run:
    """A text that grows in turns, and the seconds its turns took."""

    def __init__(self, model: GPT, tokens: int, *, use_cache: bool) -> None:
        settings = SampleConfig(temperature=0.0, max_tokens=tokens)
        self.ids = generate(model, list(range(100, 108)), settings, end_of_text=None, use_cache=use_cache)
        self.text: list[int] = []
        self.seconds = 0.0

    def turn(self, tokens: int) -> None:
        began_s = time.perf_counter()
        self.text.extend(islice(self.ids, tokens))
        self.seconds += time.perf_counter() - began_s


def measure(model: GPT, tokens: int) -> tuple[Run, Run]:
    """With the cache and without, 16 tokens in turn: what else the machine does then slows both, not one of them."""
    for use_cache in (True, False):
        Run(model, 4, use_cache=use_cache).turn(4)  # warm up
    cached, recomputed = Run(model, tokens, use_cache=True), Run(model, tokens, use_cache=False)
    for _ in range(0, tokens, 16):
        cached.turn(16)
        recomputed.turn(16)
    return cached, recomputed


if __name__ == "__main__":
    main()
