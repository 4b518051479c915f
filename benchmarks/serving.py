"""Tokens per second of generated text: `generate`, the engine of `drumline serve`, and transformers' generate.

    python benchmarks/serving.py            # GPT-2's shape, random weights, batch 1 and 8, greedy
    python benchmarks/serving.py --vllm PYTHON  # and vLLM's, on the same model, by the Python of its own environment

All have the same weights and prompts and take turns, so that what else the machine does slows all of them. The texts
must be equal. "by rows" is the engine with weights as they are trained, not packed by oneDNN. Needs transformers.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from header import header
from transformers import GPT2Config, GPT2LMHeadModel

from drumline.config.model import GPTConfig
from drumline.generate.engine import Reason, Request, Scored, make_engine
from drumline.generate.sample import SampleConfig, generate
from drumline.generate.storing import store_for_cpu
from drumline.model.gpt import GPT

PROMPT_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="tokens per text (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default 5)")
    parser.add_argument("--processor", action="store_true", help="processor seconds of one thread, on a busy machine")
    parser.add_argument("--vllm", help="Python of an environment with vLLM (vllm_worker.py)")
    arguments = parser.parse_args()
    now_s = time.process_time if arguments.processor else time.perf_counter
    if arguments.processor:
        torch.set_num_threads(1)
    ours, theirs = models()
    by_rows = copy.deepcopy(ours)
    store_for_cpu(ours)  # as drumline sample, chat and serve do
    header()
    vllm = Vllm(arguments.vllm, theirs, by_processor=arguments.processor) if arguments.vllm else None
    print(f"load      {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} threads")
    unit = ", processor seconds" if arguments.processor else ""
    print(f"GPT-2 shape, float32, {PROMPT_TOKENS} tokens of prompt, {arguments.tokens} generated, greedy{unit}")
    for batch in (1, 8):
        generator = torch.Generator().manual_seed(batch)
        prompts = torch.randint(50257, (batch, PROMPT_TOKENS), generator=generator).tolist()
        ways: dict[str, Callable[[], list[list[int]]]] = {
            "transformers": lambda p=prompts: by_transformers(theirs, p, arguments.tokens),  # type: ignore[misc]
            "by rows": lambda p=prompts: by_engine(by_rows, p, arguments.tokens),  # type: ignore[misc]
            "engine": lambda p=prompts: by_engine(ours, p, arguments.tokens),  # type: ignore[misc]
        }
        if batch == 1:
            ways["generate"] = lambda p=prompts: by_generate(ours, p, arguments.tokens)  # type: ignore[misc]
        if vllm is not None:
            vllm(prompts, 1)  # a batch of another size may compile first
            ways["vLLM"] = lambda p=prompts: vllm(p, arguments.tokens)  # type: ignore[misc]
        turns: dict[str, list[float]] = {name: [] for name in ways}
        texts = {}
        for _ in range(arguments.rounds):
            for name, way in ways.items():
                began_s = now_s()
                texts[name] = way()
                took_s = now_s() - began_s
                turns[name].append(vllm.seconds if vllm is not None and name == "vLLM" else took_s)
        for name, each_s in turns.items():
            # The median of ratios within a round: what else the machine does changes from one round to the next.
            ratio = statistics.median(t / own for t, own in zip(turns["transformers"], each_s, strict=True))
            same = "" if texts[name] == texts["transformers"] else ", OTHER TEXT"
            speed = batch * arguments.tokens / statistics.median(each_s)
            print(f"batch {batch}: {name:12} {speed:7.1f} tokens/s, {ratio:.2f}x{same}")
    print(f"load      {os.getloadavg()[0]:.1f}")


class Vllm:
    """vLLM in a process of its own, which says how long it took."""

    def __init__(self, python: str, model: GPT2LMHeadModel, *, by_processor: bool) -> None:
        self._folder = tempfile.TemporaryDirectory()
        model.save_pretrained(self._folder.name)
        worker = Path(__file__).with_name("vllm_worker.py")
        words = [python, str(worker), self._folder.name, *(["--processor"] if by_processor else [])]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seconds = 0.0
        print(f"vllm      {self._answer()}")

    def __call__(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "tokens": tokens}), file=self._process.stdin, flush=True)
        answer = self._answer()
        self.seconds = answer["seconds"]
        return list(answer["texts"])

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("vLLM has ended; see what it says above")
        return json.loads(line)


def models() -> tuple[GPT, GPT2LMHeadModel]:
    """The same weights twice. Large ones, so that the likeliest token is clearly the likeliest."""
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(initializer_range=0.06, bos_token_id=None, eos_token_id=None)).eval()
    ours = GPT(GPTConfig()).eval()
    state = theirs.transformer.state_dict()
    names = {
        "token_embedding": "wte",
        "position_embedding": "wpe",
        "final_norm": "ln_f",
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "feed_forward_norm": "ln_2",
        "feed_forward.up": "mlp.c_fc",
        "feed_forward.down": "mlp.c_proj",
    }
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            path, _, kind = name.rpartition(".")
            block, number, part = path.split(".", 2) if path.startswith("blocks.") else ("", "", path)
            value = state[f"{f'h.{number}.' if block else ''}{names[part]}.{kind}"]
            parameter.copy_(value.T if kind == "weight" and "." in part else value)
    return ours, theirs


def by_transformers(model: GPT2LMHeadModel, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        written = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens
        )
    return [row[PROMPT_TOKENS:] for row in written.tolist()]


def by_generate(model: GPT, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    settings = SampleConfig(temperature=0.0, max_tokens=tokens)
    return [list(generate(model, prompt, settings, end_of_text=None)) for prompt in prompts]


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


def by_engine(model: GPT, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    engine = make_engine(model, slots=len(prompts), context=model.config.max_position_embeddings, ends=())
    settings = SampleConfig(temperature=0.0)
    readers = [Collected() for _ in prompts]
    for prompt, reader in zip(prompts, readers, strict=True):
        engine.submit(Request(prompt=prompt, settings=settings, max_tokens=tokens, reader=reader))
    while engine.active or engine.waiting:
        engine.step()
    return [reader.ids for reader in readers]


if __name__ == "__main__":
    main()
