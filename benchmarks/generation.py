"""Tokens per second of generated text on a GPU: drumline's engine, step by step, beside transformers' generate.

    python benchmarks/generation.py --preset modern --device cuda            # batch 1, 8 and 64: some minutes
    python benchmarks/generation.py --preset modern --device cuda --verbose  # and the time of each kernel
    python benchmarks/generation.py --preset modern-tiny --device cpu

Random weights. "ahead" is what `drumline sample`, `chat` and `serve` run on a GPU: steps as CUDA graphs, tokens sampled
on the device; "torch" is the same without the kernels of drumline.decoding, "cached" one step after the other without
graphs. A run's time includes its prompts. "gpu us" and "kernels" are of one step, by torch's profiler; the floor is the
time that the weights and caches of a step take to be read at --bandwidth.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from header import header

from drumline.config import GPTConfig, ModelSettings, TrainConfig, gpt_config, with_preset
from drumline.generate import Engine, Reason, Request, SampleConfig, Scored, make_engine
from drumline.generate.slots import CachedSlots
from drumline.generate.storing import store_as, store_for_cpu
from drumline.model import GPT

GREEDY = SampleConfig(temperature=0.0)
Texts = list[list[int]]


class Collected:
    """A reader that keeps the ids."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def prompt_scored(self, tokens: list[Scored]) -> None:
        """Not asked for."""

    def token(self, token: Scored) -> bool:
        self.ids.append(token.token)
        return True

    def ended(self, reason: Reason, token: Scored | None) -> None:
        """All are there."""


@dataclass(frozen=True)
class Row:
    name: str
    batch: int
    tokens: int
    seconds: float
    first_s: float
    texts: Texts
    kernels: str = ""

    def __str__(self) -> str:
        per_step_us = self.seconds / self.tokens * 1e6
        speed = self.batch * self.tokens / self.seconds
        first = f"{self.first_s:6.1f}" if self.first_s else "      "
        return f"{self.batch:5} {self.name:22} {speed:10,.0f} {per_step_us:10,.0f} {first} {self.kernels}"


def main() -> None:
    arguments = parsed()
    device = torch.device(arguments.device)
    header()
    torch.manual_seed(0)
    config = shape(arguments.preset, arguments.context)
    model = lively(config, device)
    weights = sum(p.numel() for p in model.parameters())
    print(f"{arguments.preset}, {weights / 1e6:.0f} M parameters, context {config.max_position_embeddings}, greedy,")
    print(f"{arguments.prompt} tokens of prompt, {arguments.tokens} generated; first: seconds of the first run")
    if device.type == "cuda":
        compare_float32(model, arguments)
        store_as(model, torch.bfloat16)
    print(f"{'batch':>5} {'way':22} {'tokens/s':>10} {'us/step':>10} {'first':>6} kernels, gpu us, floor us")
    theirs = exported(model) if arguments.transformers else None
    if device.type == "cpu":
        store_for_cpu(model)
    for batch in arguments.batches:
        own = of_batch(model, batch, arguments)
        if theirs is not None:
            beside(theirs, prompts_of(model, batch, arguments.prompt), own, arguments)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="modern")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt (default 32)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each text (default 256)")
    parser.add_argument("--few", type=int, default=64, help="tokens of each text in the slow ways (default 64)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes/s that can be read (default: an H200's)")
    parser.add_argument("--no-transformers", dest="transformers", action="store_false")
    parser.add_argument("--verbose", action="store_true", help="the time of each kernel of a step, the top 25")
    return parser.parse_args()


def shape(preset: str, context: int) -> GPTConfig:
    settings = with_preset(TrainConfig(model=ModelSettings(preset=preset, context=context)))
    assert settings.data.vocab_size is not None
    return gpt_config(settings.model, vocab_size=settings.data.vocab_size)


def lively(config: GPTConfig, device: torch.device) -> GPT:
    """A model whose texts are no repetitions: what a recipe begins with at zero has weights too."""
    with device:
        model = GPT(config)
    model = model.to(device).eval()  # rotary angles are made on the CPU
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                table = "embedding" in name or "tables" in name
                parameter.normal_(std=0.5 if table else 1.0 / parameter.size(1) ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def prompts_of(model: GPT, batch: int, tokens: int) -> Texts:
    generator = torch.Generator().manual_seed(batch)
    ids: Texts = torch.randint(model.config.vocab_size, (batch, tokens), generator=generator).tolist()
    return ids


def written(engine: Engine, prompts: Texts, tokens: int, settings: SampleConfig = GREEDY) -> Texts:
    readers = [Collected() for _ in prompts]
    for prompt, reader in zip(prompts, readers, strict=True):
        engine.submit(Request(prompt=prompt, settings=settings, max_tokens=tokens, reader=reader))
    while engine.active or engine.waiting:
        engine.step()
    return [reader.ids for reader in readers]


def engine_of(model: GPT, way: str, slots: int) -> Engine:
    context = model.config.max_position_embeddings
    if way == "cached":
        return Engine(CachedSlots(model, slots), context=context, ends=[])
    if way == "torch":
        from drumline.decoding import AheadEngine

        return AheadEngine(model, slots=slots, context=context, ends=[], fused=False)
    return make_engine(model, slots=slots, context=context, ends=[])


def timed(way: Callable[[], Texts]) -> tuple[float, Texts]:
    began_s = time.perf_counter()
    texts = way()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began_s, texts


def of_batch(model: GPT, batch: int, arguments: argparse.Namespace) -> Texts:
    prompts, tokens = prompts_of(model, batch, arguments.prompt), arguments.tokens
    rows: list[Row] = []

    def measure(name: str, way: str, tokens: int, settings: SampleConfig = GREEDY, *, profile: bool = False) -> Row:
        engine = engine_of(model, way, batch)
        first_s, _ = timed(lambda: written(engine, prompts, tokens, settings))
        best_s, texts = min(timed(lambda: written(engine, prompts, tokens, settings)) for _ in range(2))
        kernels = (
            profiled(engine, model, prompts, arguments) if profile and model.token_embedding.weight.is_cuda else ""
        )
        rows.append(Row(name, batch, tokens, best_s, first_s, texts, kernels))
        print(rows[-1], flush=True)
        return rows[-1]

    if not model.token_embedding.weight.is_cuda:
        return measure("engine", "engine", tokens).texts
    own = measure("ahead", "ahead", tokens, profile=True)
    measure("ahead, temperature", "ahead", tokens, SampleConfig(temperature=0.8))
    measure("ahead, top_k, top_p", "ahead", tokens, SampleConfig(temperature=0.8, top_k=50, top_p=0.9))
    plain = measure("torch", "torch", tokens, profile=True)
    cached = measure("cached", "cached", min(tokens, arguments.few))
    for other in (plain, cached):
        alike = agreement(own.texts, other.texts)
        print(f"      ahead and {other.name}: equal for {alike} of {other.tokens} tokens (bfloat16, median over texts)")
    return own.texts


def agreement(texts: Texts, others: Texts) -> int:
    """The tokens before the first one that differs, in the median text."""
    alike = []
    for text, other in zip(texts, others, strict=True):
        length = min(len(text), len(other))
        alike.append(next((place for place in range(length) if text[place] != other[place]), length))
    return sorted(alike)[len(alike) // 2]


def compare_float32(model: GPT, arguments: argparse.Namespace) -> None:
    """Greedy text in float32, to the end of the context and beyond, of which all ways must have the same."""
    tokens = min(64, arguments.tokens)
    prompts = prompts_of(model, 4, model.config.max_position_embeddings - tokens // 2)
    texts = {way: written(engine_of(model, way, 4), prompts, tokens) for way in ("ahead", "cached")}
    alike = agreement(texts["ahead"], texts["cached"])
    same = "equal" if texts["ahead"] == texts["cached"] else f"OTHER TEXT, median equal for {alike} of {tokens}"
    print(f"float32, greedy, 4 texts of {tokens} tokens: ahead and cached are {same}")


def profiled(engine: Engine, model: GPT, prompts: Texts, arguments: argparse.Namespace) -> str:
    """Kernels and their time in a step, in the middle of the texts."""
    readers = [Collected() for _ in prompts]
    for prompt, reader in zip(prompts, readers, strict=True):
        engine.submit(Request(prompt=prompt, settings=GREEDY, max_tokens=arguments.tokens, reader=reader))
    for _ in range(arguments.tokens // 2):
        engine.step()
    torch.cuda.synchronize()
    steps = 16
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    while engine.active or engine.waiting:
        engine.step()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    by_name: dict[str, list[float]] = {}
    for event in kernels:
        by_name.setdefault(event.name, []).append(event.time_range.elapsed_us())
    gpu_us = sum(map(sum, by_name.values())) / steps
    if arguments.verbose:
        for name, times in sorted(by_name.items(), key=lambda each: -sum(each[1]))[:25]:
            each_us = sum(times) / len(times)
            print(f"      {sum(times) / steps:8.1f} us {len(times) / steps:6.1f} x {each_us:6.2f} us  {name[:90]}")
    floor_us = floor_bytes(model, len(prompts), arguments.prompt + arguments.tokens // 2) / arguments.bandwidth * 1e6
    return f"{len(kernels) / steps:5.0f} {gpu_us:8.0f} {floor_us:8.0f}"


def floor_bytes(model: GPT, batch: int, length: int) -> int:
    """Weights that each step reads whole, and keys and values."""
    config, size = model.config, model.token_embedding.weight.element_size()
    weights = sum(p.numel() for p in model.blocks.parameters()) + model.head_weight.numel()
    return size * (weights + batch * length * 2 * config.n_layers * config.kv_heads * config.head_width)


def beside(theirs: Any, texts: Texts, own: Texts, arguments: argparse.Namespace) -> None:
    """transformers' generate with the same weights."""
    batch, prompts = len(texts), torch.tensor(texts, device=arguments.device)
    on_gpu = prompts.is_cuda
    for name, more in {"transformers": {}, "transformers, static": {"cache_implementation": "static"}}.items():
        if more and not on_gpu:
            continue
        tokens = min(arguments.tokens, arguments.few) if on_gpu else arguments.tokens

        def way(more: dict[str, Any] = more, tokens: int = tokens) -> Texts:
            with torch.inference_mode():
                made = theirs.generate(
                    prompts,
                    attention_mask=torch.ones_like(prompts),
                    do_sample=False,
                    min_new_tokens=tokens,
                    max_new_tokens=tokens,
                    disable_compile=True,
                    pad_token_id=0,
                    eos_token_id=None,
                    **more,
                )
            texts: Texts = made[:, arguments.prompt :].tolist()
            return texts

        try:
            first_s, _ = timed(way)
            seconds, texts = timed(way)
        except Exception as error:
            print(f"{batch:5} {name:22} failed: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
            continue
        print(
            Row(name, batch, tokens, seconds, first_s, texts), f"equal for {agreement(own, texts)} tokens", flush=True
        )


def exported(model: GPT) -> Any:
    """The model as transformers loads it from an export."""
    import transformers

    from drumline.huggingface.families import OWN, OWN_FILE, config_json, native_family
    from drumline.huggingface.tensors import mapped
    from drumline.huggingface.weights import shards, write_shards

    transformers.logging.set_verbosity_error()
    config, weight = model.config, model.token_embedding.weight
    family, state = native_family(config) or OWN, model.state_dict()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        every = shards(mapped(family, config), weight.dtype, largest_bytes=50 << 30)
        write_shards(every, folder, weight.dtype, read=lambda each: None if each.fill else state[each.ours].cpu())
        write_config(folder, config_json(family, config), weight.dtype)
        if family is OWN:
            shutil.copyfile(Path(__file__).parents[1] / "src/drumline/huggingface" / OWN_FILE, folder / OWN_FILE)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=family is OWN, dtype=weight.dtype
        )
    return loaded.to(weight.device).eval()


def write_config(folder: Path, content: dict[str, Any], dtype: torch.dtype) -> None:
    import json

    (folder / "config.json").write_text(json.dumps({**content, "dtype": str(dtype).removeprefix("torch.")}))


if __name__ == "__main__":
    main()
