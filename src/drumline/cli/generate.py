"""What a trained run is good for: `drumline evaluate`, `sample`, `chat` and `serve`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from drumline.config import Device
from drumline.errors import ConfigError


def evaluate(
    run: Path,
    /,
    *,
    data: str | None = None,
    split: Literal["train", "valid"] = "valid",
    tasks: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    include_path: Path | None = None,
    batch_size: int = 8,
    device: Device = "auto",
    trust: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Validation loss of a run's newest checkpoint, or its results in tasks.

    The loss with perplexity and bits per byte; with --tasks, a table that is also
    written to evals/ in the run folder.

    Parameters
    ----------
    run
        Run folder, one of its checkpoints, or the folder of a Hugging Face model.
    data
        Tokens to evaluate on: a prepared folder or .bin file with the run's tokenizer. Default: the run's data.
    split
        Split of a prepared folder.
    tasks
        builtin (made from the held-out text), or tasks of lm-evaluation-harness, separated by commas.
    limit
        Items per task, at most.
    num_fewshot
        Examples in the prompt of each item. Default: the task's.
    include_path
        Folder with your own tasks for lm-evaluation-harness (.yaml).
    batch_size
        Sequences per batch.
    device
        auto: CUDA, then MPS, then the CPU.
    trust
        Run installed code that the config of a run from elsewhere names (package.module:name).
    """
    if tasks is not None:
        from drumline.evals import TaskSettings, evaluate_tasks, rows_of
        from drumline.report import print_table

        settings = TaskSettings(
            tasks=tasks, limit=limit, num_fewshot=num_fewshot, include_path=include_path, data=data, split=split
        )
        step, results, stored = evaluate_tasks(run, settings, batch_size=batch_size, device=device, trusts=trust)
        print(f"{run} at step {step:,}:")
        print_table(["task", "metric", "value", "stderr", "items"], rows_of(results))
        if stored is not None:
            print(f"written to {stored}")
        return 0
    for name, value in (("limit", limit), ("num_fewshot", num_fewshot), ("include_path", include_path)):
        if value is not None:
            raise ConfigError(f"--{name} {value} is for tasks, and none is named", fix="add --tasks builtin, or others")
    from drumline.generate import evaluate_run

    step, evaluation = evaluate_run(run, data=data, split=split, batch_size=batch_size, device=device, trusts=trust)
    bits = f"{evaluation.bits_per_byte:.4f}" if evaluation.bits_per_byte else "unknown for this file"
    print(f"{run} at step {step:,}, over {evaluation.tokens:,} tokens:")
    print(f"  loss           {evaluation.loss:.4f} nats per token")
    print(f"  perplexity     {evaluation.perplexity:,.2f}")
    print(f"  bits per byte  {bits}")
    for name, own in getattr(evaluation, "sources", {}).items():
        bits = f", {own.bits_per_byte:.4f} bits per byte" if own.bits_per_byte else ""
        print(f"  {name}: loss {own.loss:.4f} over {own.tokens:,} tokens, perplexity {own.perplexity:,.2f}{bits}")
    return 0


def sample(
    run: Path,
    /,
    *,
    prompt: str = "",
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    max_tokens: int = 200,
    device: Device = "auto",
    trust: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Generate text with a run's newest checkpoint.

    Parameters
    ----------
    run
        Run folder, one of its checkpoints, or the folder of a Hugging Face model.
    prompt
        Text to continue. Default: start a new document.
    temperature
        Sampling temperature; 0: greedy.
    top_k
        Sample from the k most likely tokens.
    top_p
        Sample from the smallest set of tokens whose probabilities add up to p (nucleus sampling).
    seed
        Random seed; the same seed generates the same text.
    max_tokens
        Maximum number of tokens to generate.
    device
        auto: CUDA, then MPS, then the CPU.
    trust
        Run installed code that the config of a run from elsewhere names (package.module:name).
    """
    from drumline.generate import VISIBLE, SampleConfig, sample_run

    settings = SampleConfig(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, max_tokens=max_tokens)
    for piece in sample_run(run, prompt, settings, device=device, trusts=trust):
        print(piece.translate(VISIBLE), end="", flush=True)
    print()
    return 0


def chat(
    run: Path,
    /,
    *,
    system: str = "",
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    max_tokens: int = 200,
    device: Device = "auto",
    trust: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Talk to a run's newest checkpoint in the terminal.

    Parameters
    ----------
    run
        Run folder, one of its checkpoints, or the folder of a Hugging Face model.
    system
        Message that comes before the conversation.
    temperature
        Sampling temperature; 0: greedy.
    top_k
        Sample from the k most likely tokens.
    top_p
        Sample from the smallest set of tokens whose probabilities add up to p (nucleus sampling).
    seed
        Random seed; the same seed and messages give the same answers.
    max_tokens
        Maximum number of tokens of an answer.
    device
        auto: CUDA, then MPS, then the CPU.
    trust
        Run installed code that the config of a run from elsewhere names (package.module:name).
    """
    from drumline.generate import VISIBLE, Conversation, SampleConfig, writing_run

    settings = SampleConfig(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, max_tokens=max_tokens)
    loaded = writing_run(run, device=device, trusts=trust)
    conversation = Conversation(loaded, settings, system=system)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(f"{run} at step {loaded.step:,}. /clear starts again, /exit or Ctrl-D ends, Ctrl-C stops an answer.")
    while (line := _line("> " if is_terminal else "")) not in (None, "/exit"):
        if line == "/clear":
            conversation.clear()
        elif line:
            for piece in conversation.answer(line):
                print(piece.translate(VISIBLE), end="", flush=True)
            print()
    return 0


def _line(prompt: str) -> str | None:
    """The next message; None at the end of the input."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None


def serve(
    run: Path,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    slots: int = 16,
    max_tokens: int = 1024,
    max_waiting: int = 512,
    max_body_bytes: int = 1 << 20,
    timeout_s: float = 600.0,
    device: Device = "auto",
    trust: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Serve a run's newest checkpoint: OpenAI's API, and a page to talk to the model.

    Parameters
    ----------
    run
        Run folder, one of its checkpoints, or the folder of a Hugging Face model.
    host
        Address to listen at. Other machines can reach it only at an address other than 127.0.0.1, with --api_key.
    port
        Port to listen at; 0: any that is free.
    api_key
        Key that clients must send. Default: the variable DRUMLINE_API_KEY, which other users cannot see.
    slots
        Number of texts that are generated at the same time; others wait.
    max_tokens
        Most tokens that a request may ask for.
    max_waiting
        Most texts that may wait; more are refused with 429.
    max_body_bytes
        Largest body of a request.
    timeout_s
        Seconds until a request that is not done is refused with 503.
    device
        auto: CUDA, then MPS, then the CPU.
    trust
        Run installed code that the config of a run from elsewhere names (package.module:name).
    """
    from drumline.serve import Limits, ServeConfig, serve_run

    limits = Limits(max_tokens=max_tokens, max_waiting=max_waiting, max_body_bytes=max_body_bytes, timeout_s=timeout_s)
    key = api_key or os.environ.get("DRUMLINE_API_KEY") or None
    config = ServeConfig(host=host, port=port, api_key=key, slots=slots, limits=limits)
    serve_run(run, config, device=device, trusts=trust, say=lambda line: print(line, flush=True))
    return 0
