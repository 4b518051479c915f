"""What a run prints at its start and at its end."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import torch

from drumline.config import TrainConfig, preset
from drumline.data import Data, TokenBatches
from drumline.files import RunFolder
from drumline.lazy import room
from drumline.report import Records, command
from drumline.signals import raising
from drumline.train.loop import FitResult
from drumline.train.setup import Setup
from drumline.units import count


def introduction(config: TrainConfig, data: Data, setup: Setup, *, total_steps: int) -> list[str]:
    batches, plan, precision = setup.batches, setup.batches.plan, setup.step.precision
    parameters = sum(p.numel() for p in setup.step.model.parameters())
    held_out = f"{count(len(data.valid))} tokens for validation" if data.valid is not None else "no validation data"
    optim, note, short = config.optim, data.note, ""
    lr = f"{optim.lr:g} at its peak by adamw"
    if (optim.optimizer, optim.scale_lr, optim.embedding_lr, optim.head_lr) != ("adamw", "none", None, None):
        from drumline.optim import lr_formula

        lr = lr_formula(optim, plan.sequences, muon_lr=preset(config.model.preset).muon_lr)
    if config.data.train_data_path != "builtin":
        from drumline.data import data_note

        note += data_note(config.data, data.skipped)
    if isinstance(batches, TokenBatches) and batches.short_steps:
        short = f"; the first {batches.short_steps:,} with a context of {batches.context_of(0)}"
    lines = [
        f"run    {setup.folder.path}",
        f"model  {config.model.preset}: {count(parameters)} parameters, context {batches.tokens_per_item}, "
        f"on {precision.device.type} in {str(precision.dtype).removeprefix('torch.')}"
        f"{' and float8' if config.run.fp8 else ''}",
        f"data   {config.data.train_data_path}: {count(len(data.train))} tokens, {held_out}, "
        f"vocabulary {data.vocab_size:,}{note}",
        f"step   {plan.formula(setup.world.size)} = {plan.sequences} sequences "
        f"= {plan.sequences * batches.tokens_per_item:,} tokens",
        f"lr     {lr}",
        f"steps  {total_steps:,}, which is {total_steps * plan.sequences / batches.items:.2f} epochs{short}",
    ]
    if config.model.positions == "rope" or config.model.recipe == "modern":
        lines.append(f"export {room('huggingface').export_note(config.model)}")
    others = config.ranks.shard != "none" or os.getloadavg()[0] > (os.cpu_count() or 1)
    if "LOCAL_WORLD_SIZE" in os.environ or config.batch.minutes or others:
        from drumline.train.advice import advice

        lines += advice(config, setup.step, total_steps=total_steps)
    is_fused: Any = getattr(setup.step.model, "is_fused", None)
    if config.run.compile or (is_fused and is_fused(precision.device, precision.dtype)):
        lines.append("compiling: the first step will take a while")
    return lines


def conclude(config: TrainConfig, data: Data, setup: Setup, records: Records, result: FitResult) -> FitResult:
    """How the run ended, with everything shown at its end, unless a signal interrupts that; all ranks call it."""
    again = command("train", "--run_dir", setup.folder.path)
    if result.state != "finished":
        records.say(f"stopped at step {result.step:,}, everything is saved; to resume:\n  {again}")
        return result
    if math.isnan(result.loss):  # not a step was left to do
        longer = f"{again} --total_steps {2 * result.step} --allow_change total_steps"
        records.say(f"this run had finished already, at step {result.step:,}; to train it further:\n  {longer}")
    try:
        text = setup.last_text()
        if setup.world.is_rank0:
            with raising(), torch.compiler.set_stance("force_eager"):  # to compile for a text takes longer than it
                _show_results(config, data, setup, records, result, text)
    except KeyboardInterrupt:
        records.say(f"stopped after the last step, everything is saved; to see the results:\n  {again}")
        return replace(result, state="stopped")
    return result


def write_report(folder: RunFolder, records: Records) -> None:
    """report.html, by a process that loads what this takes."""
    if records.flush(patient=True):
        words = [sys.executable, "-P", "-m", "drumline", "report", str(folder.path)]
        records.attempt(str(folder.report), lambda: subprocess.run(words, check=True, capture_output=True, timeout=60))


def _show_results(
    config: TrainConfig, data: Data, setup: Setup, records: Records, result: FitResult, text: str | None
) -> None:
    """text: what a sharded model has written"""
    folder, generate = setup.folder, room("generate")
    next_steps = [*([] if data.valid is None else [command("evaluate", folder.path)]), command("runs")]
    model, prompt, tokenizer = setup.step.model, config.records.sample_prompt, data.tokenizer
    if text is None and tokenizer is not None and generate.can_write(model):
        settings, end = generate.SampleConfig(max_tokens=120, seed=config.run.seed), tokenizer.end_of_text
        limits = {"end_of_text": end, "context": config.model.context, "vocabulary": tokenizer.vocab_size}
        text = tokenizer.decode([*generate.generate(model, tokenizer.encode(prompt), settings, **limits)])
    if text is not None:
        records.line(folder.samples, {"step": result.step, "prompt": prompt, "text": text})
        records.say("\n  | ".join(["\nsample:", *(prompt + text).translate(generate.VISIBLE).splitlines()]))
        example = ["--prompt", "def "] if config.data.train_data_path == "builtin" else []
        next_steps.insert(0, command("sample" if data.train.targets is None else "chat", folder.path, *example))
    write_report(folder, records)
    records.say(
        f"\nfinished: {folder.path} (report: {folder.report})\nweights sha256 {result.weights_sha256}\n"
        + "\n  ".join(["next:", *next_steps])
    )
