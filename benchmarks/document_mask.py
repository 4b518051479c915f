"""What --document_mask costs on a GPU: steps with and without it, in bfloat16 and --fp8, with CUDA graphs.

    python benchmarks/document_mask.py              # under 2 minutes on an H200
    python benchmarks/document_mask.py --miniature  # every line of it on a CPU, without kernels, to see that it works

The 124M modern preset with its recipe, 32 sequences of 1024 random tokens. A step is the whole of drumline's own,
forward to update, with batches that differ in where documents begin, so that one captured graph serves many of them.
Documents have log-normal lengths with the given median, in tokens. Each case takes turns with one without the mask, a
few steps each, so that a clock that falls as the GPU warms up falls for both. First, losses and gradients are compared
with those of the plain model with a plain mask. Target: at most 3 % slower than without the mask.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from header import header
from torch import Tensor

from drumline.config.model import GPTConfig, ModelSettings
from drumline.config.presets import gpt_config, with_preset
from drumline.config.settings import OptimConfig, TrainConfig
from drumline.kernels.cuda_graphs import RecordedBackward, with_graphs
from drumline.kernels.gpt import Float8GPT, FusedGPT, fastest_attention
from drumline.model.build import token_objective
from drumline.model.gpt import GPT
from drumline.optim.optimizers import make_optimizer
from drumline.parallel.hardware import allow_tf32
from drumline.parallel.strategies import Plain
from drumline.train.step import Backward, Gradient, Precision
from drumline.train.step import Step as TrainStep

MEDIANS = {"no mask": 0, "median 100": 100, "median 400": 400, "median 3000": 3000}
TARGET = 1.03
BATCHES = 16
Batch = tuple[Tensor, Tensor, Tensor | None]


def documents_of(median: int, shape: tuple[int, int], draw: torch.Generator) -> Tensor:
    """Ids of documents of log-normal lengths, one after another: int64 (B, T)."""
    tokens = shape[0] * shape[1]
    lengths = torch.exp(torch.randn(tokens, generator=draw) * 1.1 + torch.log(torch.tensor(float(median))))
    ends = lengths.long().clamp(min=2).cumsum(0)
    return torch.bucketize(torch.arange(tokens), ends, right=True).view(shape)


def batches_of(median: int, shape: tuple[int, int], vocabulary: int) -> list[Batch]:
    draw = torch.Generator().manual_seed(median)
    made: list[Batch] = []
    for _ in range(BATCHES):
        ids = torch.randint(vocabulary, shape, generator=draw)
        made.append((ids, ids.roll(-1, 1), documents_of(median, shape, draw) if median else None))
    return made


class Case:
    """A model with its optimizer, and steps as the loop makes them: the next is started before the loss is read."""

    def __init__(self, model: GPT, optim: OptimConfig, batches: list[Batch], device: torch.device) -> None:
        precision = Precision.of(device, torch.bfloat16)
        optimizer, strategy = make_optimizer(model, optim), Plain(model)
        self.backward = with_graphs(Backward(token_objective, precision, batches[0][0].numel()), model, strategy)
        self.step_of = TrainStep(model, optimizer, strategy, self.backward, precision, optim.grad_clip or 0.0)
        self.batches, self.at, self.lr, self.device = batches, 0, optim.lr, device
        self.computed: list[Gradient] = []
        self.seconds: list[float] = []

    def gradient(self) -> Gradient:
        self.at += 1
        return self.step_of.gradient([self.batches[self.at % BATCHES]])

    def step(self) -> float:
        read = self.step_of.update(self.computed.pop() if self.computed else self.gradient(), lr=self.lr)
        if self.backward.runs_ahead:
            self.computed.append(self.gradient())
        return read().loss

    def timed(self, steps: int) -> None:
        synchronize(self.device)
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize(self.device)
        self.seconds.append((time.perf_counter() - began) / steps)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def compare(shape: GPTConfig, size: tuple[int, int], device: torch.device) -> None:
    """Loss and gradients with the mask, of the fused model and of the plain one with the same weights."""
    torch.manual_seed(0)
    fused, plain = FusedGPT(shape).to(device), GPT(shape).to(device)
    for weight in fused.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.02)
    plain.load_state_dict(fused.state_dict())
    print("| documents | loss, fused | plain | difference | gradients differ by |\n| --- | --- | --- | --- | --- |")
    for name, median in MEDIANS.items():
        ids, targets, documents = (
            None if part is None else part.to(device) for part in batches_of(median, size, shape.vocab_size)[0]
        )
        losses, gradients = [], []
        for model in (fused, plain):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = model(ids, targets=targets, document_ids=documents)[1] / ids.numel()
            losses.append(loss.item())
            gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
        off = ((gradients[0] - gradients[1]).norm() / gradients[1].norm()).item()
        print(f"| {name} | {losses[0]:.5f} | {losses[1]:.5f} | {abs(losses[0] / losses[1] - 1):.1e} | {off:.2%} |")


def attention_alone(device: torch.device, size: tuple[int, int]) -> None:
    """Forward and backward of one layer's attention, 12 heads of 64: causal, and by document."""
    from drumline.kernels.attention import document_attention, document_spans

    buffer = torch.randn(*size, 3, 12, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "no mask": lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    }
    for name, median in MEDIANS.items():
        if median:
            ids = documents_of(median, size, torch.Generator().manual_seed(0)).to(device)
            spans = document_spans(ids)
            ways[name] = lambda q, k, v, spans=spans: document_attention(q, k, v, spans).transpose(1, 2)
    print("attention of one layer, forward and backward:", end="")
    for name, attend in ways.items():
        print(f"  {name} {in_a_graph(attend, buffer):.3f} ms", end="")
    print(flush=True)


def in_a_graph(attend: Callable[[Tensor, Tensor, Tensor], Tensor], buffer: Tensor, times: int = 20) -> float:
    """Milliseconds, without what launching takes, since steps replay a graph too."""

    def both() -> None:
        q, k, v = buffer.permute(2, 0, 3, 1, 4)
        out = attend(q, k, v)
        torch.autograd.grad(out, buffer, out.detach())

    graph = torch.cuda.CUDAGraph()
    with fastest_attention(buffer.device):
        with torch.cuda.stream(torch.cuda.Stream()):
            both()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(times):
                both()
    graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1000 / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--miniature", action="store_true")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="of each case in each round")
    arguments = parser.parse_args()
    header()
    device = torch.device("cpu" if arguments.miniature else "cuda")
    size, context, vocabulary = ((2, 64), 64, 512) if arguments.miniature else ((32, 1024), 1024, 50304)
    more = {"n_layers": 2, "d_model": 64, "n_heads": 4, "d_ff": 256} if arguments.miniature else {}
    config = with_preset(TrainConfig(model=ModelSettings(preset="modern", recipe="modern", context=context, **more)))
    shape = gpt_config(config.model, vocab_size=vocabulary)
    allow_tf32()
    compare(shape, size, device)
    if device.type == "cuda":
        attention_alone(device, size)
    rounds, steps = (2, 1) if arguments.miniature else (arguments.rounds, arguments.steps)
    optim = replace(config.optim, lr=1e-3)
    print("| format | documents | graphs | ms a step without | with the mask | ratio | losses |\n" + "| --- " * 7 + "|")
    for name, kind in {"bfloat16": FusedGPT, **({} if arguments.miniature else {"fp8": Float8GPT})}.items():
        for documents, median in list(MEDIANS.items())[1:]:
            free(device)  # a graph is captured only where there is memory for it
            pair = []
            for each in (0, median):
                torch.manual_seed(0)
                pair.append(Case(kind(shape).to(device), optim, batches_of(each, size, vocabulary), device))
            for case in pair:
                for _ in range(2 if arguments.miniature else 12):
                    case.step()
            for _ in range(rounds):
                for case in pair:
                    case.timed(steps)
            base, own = (statistics.median(case.seconds) for case in pair)
            graphs = " / ".join(
                "yes" if isinstance(case.backward, RecordedBackward) and case.backward.is_recorded else "no"
                for case in pair
            )
            print(
                f"| {name} | {documents} | {graphs} | {base * 1000:.2f} | {own * 1000:.2f} | {own / base:.3f} "
                f"{'met' if own / base <= TARGET else 'MISSED'} | {pair[0].step():.4f} / {pair[1].step():.4f} |",
                flush=True,
            )
            del case, pair


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
