"""Load a trained model from a run folder."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from drumline.checkpoint import Checkpoint, carried, newest_readable, open_checkpoint, open_single_file
from drumline.checkpoint import load as load_checkpoint
from drumline.config import TrainConfig, from_settings
from drumline.data import Tokenizer
from drumline.errors import CheckpointError
from drumline.files import RunFolder, check_code, run_of, stored_config
from drumline.lazy import room
from drumline.model import build_model
from drumline.report import to_stderr


@dataclass(frozen=True)
class FoundRun:
    """A run and its verified checkpoint; the model is not built yet."""

    folder: RunFolder
    config: TrainConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    vocab_size: int
    warnings: tuple[str, ...] = ()
    """About newer checkpoints, which are damaged."""

    @property
    def step(self) -> int:
        return self.checkpoint.step

    def model(self) -> nn.Module:
        model = build_model(self.config, vocab_size=self.vocab_size)
        load_checkpoint(self.checkpoint, model=model, optimizer=None)
        return model


@dataclass(frozen=True)
class LoadedRun:
    folder: RunFolder
    config: TrainConfig
    step: int
    model: nn.Module
    tokenizer: Tokenizer | None
    vocab_size: int

    @property
    def is_model(self) -> bool:
        """Whether it is the folder of a Hugging Face model: there is no run."""
        return self.folder.path.is_dir() and not self.folder.config.exists()


def load_run(path: Path, *, trusts: bool = False) -> LoadedRun:
    """The newest valid checkpoint of a run, or the checkpoint, exported file or folder of Hugging Face at `path`, with
    model and tokenizer.

    trusts: run the code that its config names, even if this user has not used it before
    """
    if (path / "config.json").is_file() and not RunFolder(path).config.exists():
        return room("huggingface").load_model(path)  # type: ignore[no-any-return]
    run = find_run(path, trusts=trusts)
    for problem in run.warnings:
        to_stderr(f"warning: {problem}")
    return LoadedRun(run.folder, run.config, run.step, run.model(), run.tokenizer, run.vocab_size)


def find_run(path: Path, *, trusts: bool = False) -> FoundRun:
    """What `load_run` loads."""
    if path.suffix == ".pt" and path.is_file():
        return _find_file(path, trusts=trusts)
    folder = run_of(path)
    config = stored_config(folder)
    if folder.trainer.exists():
        raise CheckpointError(
            f"{folder.path} was trained by a script with Trainer, and only the script has its model",
            fix="give Trainer a valid_dataset, or load the weights in a script: resume_from=" + repr(str(path)),
        )
    if config is None or config.data.vocab_size is None:
        raise CheckpointError(
            f"{path} is neither a run nor a checkpoint of one", fix="`drumline runs` lists the runs here"
        )
    check_code({"model": config.model.model}, folder.path, trusts=trusts)
    is_run = path == folder.path
    checkpoint, damaged = newest_readable(folder.checkpoints) if is_run else (open_checkpoint(path), [])
    if checkpoint is None and damaged:
        fix = "see what is left: drumline checkpoint list " + shlex.quote(str(path))
        raise CheckpointError(f"the run {path} has no valid checkpoint", fix=fix, details=damaged)
    if checkpoint is None:
        raise CheckpointError(f"the run {path} has no checkpoint yet", fix="train until its first save (--save_every)")
    tokenizer = Tokenizer.load(folder.tokenizer) if folder.tokenizer.exists() else None
    vocab_size = tokenizer.vocab_size if tokenizer else int(checkpoint.state.facts.get("vocab_size") or 0)
    warnings = tuple(f"{problem}; using {checkpoint.path.name} instead" for problem in damaged)
    return FoundRun(folder, config, checkpoint, tokenizer, vocab_size or config.data.vocab_size, warnings)


def _find_file(path: Path, *, trusts: bool) -> FoundRun:
    checkpoint, extras = open_single_file(path), carried(path)
    if "settings" not in extras:
        raise CheckpointError(
            f"{path} does not have the settings of its model", fix="write it with `drumline checkpoint export RUN`"
        )
    config = from_settings(extras["settings"])
    check_code({"model": config.model.model}, path, trusts=trusts)
    tokenizer = Tokenizer(extras["tokenizer"].encode(), origin=str(path)) if "tokenizer" in extras else None
    vocab_size = tokenizer.vocab_size if tokenizer else config.data.vocab_size or 0
    return FoundRun(RunFolder(path), config, checkpoint, tokenizer, vocab_size)
