"""Use a trained run: evaluate it, or generate text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from drumline.config import Device
from drumline.data import TOKENIZER, TokenFile, Tokenizer, open_data, open_tokens
from drumline.errors import ConfigError
from drumline.files import DATA, RunFolder, check_code
from drumline.generate.loading import LoadedRun, load_run
from drumline.generate.sample import SampleConfig, can_write, generate
from drumline.generate.storing import store_as, store_for_cpu
from drumline.generate.streaming import sample_text
from drumline.generate.texts import engine_tokens
from drumline.mixes import MixTokens, evaluate_run_mix
from drumline.model import GPT, token_objective
from drumline.parallel import Place, World, pick_device, pick_dtype
from drumline.report import preparing, progress_of, to_stderr
from drumline.stores import in_stores, mirrored
from drumline.train import Evaluation, Precision, evaluate


def evaluate_run(
    path: Path, *, data: str | None, split: str, batch_size: int, device: Device, trusts: bool = False
) -> tuple[int, Evaluation]:
    """The step of a run's newest checkpoint, and its loss over all of `data`, or over the run's validation data."""
    run = load_run(path, trusts=trusts)
    where = pick_device(device)
    tokens = held_out(run, path, data=data, split=split, trusts=trusts)
    context = run.config.model.context
    assert context is not None
    parts = [tokens] if not isinstance(tokens, MixTokens) else tokens.parts
    batches = sum(math.ceil(part.windows(context) / batch_size) for part in parts)
    measure = evaluate if not isinstance(tokens, MixTokens) else partial(evaluate_run_mix, run.config, run.folder)
    with progress_of("evaluating batch", total=batches) as batch_done:
        evaluation: Evaluation = measure(
            run.model.to(where),
            token_objective,
            tokens,
            context=context,
            batch_size=batch_size,
            precision=Precision.of(where, pick_dtype(run.config.run.dtype, where)),
            world=World(Place(), where),
            document_mask=run.config.data.document_mask,
            each_batch=batch_done,
        )
    return run.step, evaluation


def held_out(run: LoadedRun, path: Path, *, data: str | None, split: str, trusts: bool) -> TokenFile:
    """The tokens to evaluate a run on: a split of `data`, or of the run's own. path: the run, as the user wrote it"""
    if data is not None:
        own_data = replace(run.config.data, train_data_path=data, valid_data_path=None)
        data = mirrored(own_data).train_data_path if in_stores(own_data) else data
        return open_tokens(data, split=split, vocab_size=run.vocab_size, dtype=run.config.data.data_dtype)
    if run.is_model:
        raise ConfigError(
            f"{path} is a model without a run, so it has no held-out text",
            fix="choose tokens to evaluate on: --data FOLDER or FILE.bin, from drumline prepare TEXT --out FOLDER "
            f"--tokenizer {path / TOKENIZER}",
        )
    check_code({name: getattr(run.config.data, name) for name in DATA}, run.folder.path, trusts=trusts)
    with preparing() as progress:
        own = open_data(run.config, run=run.folder, progress=progress)
    if own.note:
        to_stderr(own.note.removeprefix("; "))
    chosen = own.valid if split == "valid" else own.train
    if chosen is None:
        raise ConfigError(
            f"the run {path} has no validation data", fix="choose tokens to evaluate on: --data FOLDER or FILE.bin"
        )
    return chosen


def sample_run(
    path: Path, prompt: str, settings: SampleConfig, *, device: Device, trusts: bool = False
) -> Iterator[str]:
    """The prompt, then the text that the run's newest checkpoint generates, piece by piece."""
    run = writing_run(path, device=device, trusts=trusts)
    yield prompt
    on_gpu = isinstance(run.model, GPT) and run.model.token_embedding.weight.is_cuda
    tokens = engine_tokens if on_gpu else generate
    yield from sample_text(run.model, run.tokenizer, prompt, settings, context=run.context, tokens=tokens)


@dataclass(frozen=True)
class WritingRun:
    """A model on its device, and all that it takes to let it generate text."""

    folder: RunFolder
    step: int
    model: nn.Module
    tokenizer: Tokenizer
    context: int
    """Tokens that the model can read at once."""


def writing_run(path: Path, *, device: Device, trusts: bool = False) -> WritingRun:
    """The newest checkpoint of a run that can generate text."""
    run = load_run(path, trusts=trusts)
    tokenizer = tokenizer_of(run, path, why="generate text")
    if isinstance(run.model, GPT) and not run.config.model.init_from:
        _cut_padding(run.model, vocab_size=run.vocab_size)
    where = pick_device(device)
    model = _placed(run.model, where)
    if isinstance(model, GPT) and where.type != "cpu":
        store_as(model, pick_dtype(run.config.run.dtype, where))
    context = model.config.max_position_embeddings if isinstance(model, GPT) else run.config.model.context
    assert context is not None
    return WritingRun(run.folder, run.step, model, tokenizer, context)


def _cut_padding(model: GPT, *, vocab_size: int) -> None:
    """Remove the rows that only round up the vocabulary, as an export does: no id without a text is generated or has a
    share of the probability."""
    if vocab_size < model.config.vocab_size:
        model.config = replace(model.config, vocab_size=vocab_size)
        for table in (model.token_embedding, model.head):
            if table is not None:
                table.weight = nn.Parameter(table.weight.detach()[:vocab_size].clone())


def scoring_run(run: LoadedRun, path: Path, *, device: Device) -> tuple[nn.Module, Tokenizer]:
    """The model of a run on a device, and its tokenizer, to judge texts with it. path: as the user wrote it"""
    tokenizer = tokenizer_of(run, path, why="make tasks of text")
    return _placed(run.model, pick_device(device)), tokenizer


def _placed(model: nn.Module, where: torch.device) -> nn.Module:
    """The model on a device, for inference in float32 where that is a CPU."""
    model = model.to(where).eval()
    if isinstance(model, GPT) and where.type == "cpu":
        store_for_cpu(model)
    return model


def tokenizer_of(run: LoadedRun, path: Path, *, why: str) -> Tokenizer:
    """The tokenizer of a run whose model is to read or write text; refuses a run that cannot."""
    if run.tokenizer is None:
        raise ConfigError(
            f"{'' if run.is_model else 'the run '}{path} has no {run.folder.tokenizer.name}, which is needed to {why}",
            fix="copy it from where the model is from; transformers writes one with save_pretrained"
            if run.is_model
            else "copy it from the folder of its tokens; if they are .bin files without one, train with --tokenizer",
        )
    if not can_write(run.model):
        raise ConfigError(
            f"the model of {path}, {type(run.model).__name__}, returns no logits without targets",
            fix="let its forward take targets=None and return (logits, loss)",
        )
    return run.tokenizer
