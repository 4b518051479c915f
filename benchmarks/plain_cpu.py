"""`drumline train`'s step on the CPU against the plain way of training the same model, `tiny`.

    python benchmarks/plain_cpu.py

The plain way is what tutorials on DDP show: a GPT with attention written out (scores, mask, softmax), all logits at
once, a DataLoader that gives dictionaries, torch.optim.AdamW as it comes. Both have the same shape, batch, context and
vocabulary, float32, all cores. They are timed in turns; the ratio is of the medians.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from header import header
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from drumline.bench.workload import Workload
from drumline.config.model import GPTConfig, ModelSettings
from drumline.config.presets import gpt_config, with_preset
from drumline.config.settings import BatchConfig, RunConfig, TrainConfig
from drumline.data.batches import BatchPlan
from drumline.parallel.world import join


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, vocab_size: int, context: int) -> None:
        self.vocab_size, self.context = vocab_size, context

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(self.vocab_size, (self.context,))
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones(self.context, dtype=torch.long)}


class Block(nn.Module):
    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.heads = c.n_heads
        self.norms = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(c.d_model, c.d_model) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))
        self.register_buffer("causal", torch.tril(torch.ones(c.max_position_embeddings, c.max_position_embeddings)))

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norms[0](x)
        q, k, v = (
            part(y).view(batch, length, self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(self.causal[:length, :length] == 0, float("-inf"))
        scores = scores.masked_fill(attention_mask[:, None, None, :] == 0, float("-inf"))
        y = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(y)
        return x + self.mlp(self.norms[1](x))


class PlainGPT(nn.Module):
    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.positions = nn.Embedding(c.max_position_embeddings, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x, attention_mask)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))
        return logits, loss


def plain_step(config: TrainConfig, batch_size: int) -> tuple[Callable[[], None], int]:
    """A step the plain way, and how many weights it trains."""
    assert config.data.vocab_size and config.model.context
    model = PlainGPT(gpt_config(config.model, vocab_size=config.data.vocab_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    loader = DataLoader(Samples(config.data.vocab_size, config.model.context), batch_size=batch_size, shuffle=True)

    def batches() -> Iterator[dict[str, Tensor]]:
        while True:
            yield from loader

    endless = batches()

    def step() -> None:
        batch = next(endless)
        optimizer.zero_grad()
        _, loss = model(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return step, sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    header()
    settings = TrainConfig(model=ModelSettings(preset="tiny"), batch=BatchConfig(), run=RunConfig(device="cpu"))
    config = with_preset(settings)
    batch_size = 16
    ours = Workload(config, BatchPlan(batch_size, 1), join(device="cpu"))
    plain, weights = plain_step(config, batch_size)
    times: dict[str, list[float]] = {"drumline": [], "plain": []}
    for turn in range(arguments.turns + 1):
        for name, step in (("drumline", ours.step), ("plain", plain)):
            since = time.perf_counter()
            for _ in range(arguments.steps):
                step()
            if turn:  # the first one warms up
                times[name].append((time.perf_counter() - since) / arguments.steps)
    tokens = batch_size * (config.model.context or 0)
    print(f"weights   drumline {ours.parameters:,}, plain {weights:,}; {tokens:,} tokens a step")
    medians = {name: statistics.median(each) for name, each in times.items()}
    for name, seconds in medians.items():
        print(f"{name:<9} {tokens / seconds:>8,.0f} tokens/s ({seconds * 1e3:.0f} ms a step)")
    print(f"ratio     {medians['plain'] / medians['drumline']:.2f}")


if __name__ == "__main__":
    main()
