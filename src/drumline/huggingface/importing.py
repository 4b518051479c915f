"""A model from elsewhere -> a run: its architecture as settings, and its weights as the checkpoint of step 0.

From there on it is a run like any other: on any number of ranks, resumed, with --bitwise, after a crash.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path

import tokenizers
import torch
from torch import Tensor, nn

from drumline.checkpoint import (
    Checkpoint,
    RunState,
    checkpoint_paths,
    commit,
    load,
    load_shares,
    open_checkpoint,
    weights,
)
from drumline.config import PRETRAINED as PRESET
from drumline.config import GPTConfig, TrainConfig, to_toml, with_preset
from drumline.data import Data, Tokenizer, is_tokens
from drumline.errors import CheckpointError, ConfigError
from drumline.files import RunFolder, flush, replace_text, stored_config
from drumline.huggingface.companions import CONFIG, KEPT
from drumline.huggingface.families import sizes
from drumline.huggingface.sources import Source, Tensors, folder_source, inside, open_source
from drumline.huggingface.tensors import Mapped, mapped, shapes
from drumline.huggingface.weights import DTYPES, shards, write_shards
from drumline.parallel import World, versions
from drumline.pieces import is_spread, stored_in

_CONTEXT = 1024
"""Models with rotary positions may have a hundred times more positions than a step should have tokens."""
_FREE = ("dropout", "init")
"""Options that are not a part of the model that comes."""
_IGNORED = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")
"""Buffers that old versions saved: masks and frequencies, which follow from the config."""
_FILE_BYTES = 5 * 10**9


def with_architecture(config: TrainConfig) -> TrainConfig:
    """The config with the options, vocabulary and tokenizer of the model in init_from; refuses what contradicts it."""
    assert config.model.init_from is not None
    kept = RunFolder(Path(config.run.run_dir)) if config.run.run_dir else None
    if kept is not None and (kept.pretrained / CONFIG).exists():  # the run has begun: it needs the model no more
        source = folder_source(config.model.init_from, kept.pretrained)
        tokenizer = kept.tokenizer if kept.tokenizer.exists() else None
    else:
        _check_unbegun(kept, config.model.init_from)
        source = open_source(config.model.init_from)
        tokenizer = source.tokenizer
    if config.model.preset not in (PRESET, TrainConfig().model.preset):
        raise ConfigError(
            f"--preset {config.model.preset} and --init_from {source.name} both set the model options",
            fix="drop --preset",
        )
    if config.model.model != "gpt":
        raise ConfigError(
            f"--init_from {source.name} is for drumline's own GPT, not for --model {config.model.model}",
            fix="drop --model, or load the weights in your own function",
        )
    check_architecture(config, source)
    wanted = config.data.tokenizer or (str(tokenizer) if tokenizer else None)
    if wanted is None and not is_tokens(config.data.train_data_path):
        raise ConfigError(
            f"{source.name} has no tokenizer.json, so text cannot be tokenized as it was for this model",
            fix="give it with --tokenizer FILE, or train on tokens; transformers writes one with save_pretrained",
        )
    found = {option.name: getattr(source.config, option.name) for option in fields(source.config)}
    options = {name: found[name] for name in vars(config.model) if name in found and name not in _FREE}
    context = config.model.context or _default_context(source.config)
    return replace(
        config,
        model=replace(config.model, preset=PRESET, context=context, **options),
        data=replace(config.data, tokenizer=wanted, vocab_size=source.config.vocab_size),
    )


def _check_unbegun(run: RunFolder | None, name: str) -> None:
    stored = stored_config(run) if run is not None else None
    if run is not None and stored is not None and stored.model.init_from != name:
        raise ConfigError(
            f"{run.path} is a run that did not begin with {name}",
            fix="choose another --run_dir for a new run, or drop --init_from to resume this one",
        )


def _default_context(config: GPTConfig) -> int:
    positions = config.max_position_embeddings
    return positions if config.positions == "learned" else min(positions, _CONTEXT)


def check_architecture(config: TrainConfig, source: Source) -> None:
    """Refuse settings that contradict a model."""
    model, there = config.model, source.config
    what_none_is = sizes(there)
    given = {name: getattr(model, name) for name in vars(model) if hasattr(there, name) and name not in _FREE}
    given |= {"vocab_size": config.data.vocab_size}
    for name, value in given.items():
        has = getattr(there, name)
        if value is not None and value not in (has, what_none_is.get(name, has)):
            raise ConfigError(
                f"--{name} {value} contradicts {source.name}, which has {what_none_is.get(name, has)}",
                fix=f"drop --{name}: the model determines it",
            )
    if (model.context or 1) > there.max_position_embeddings:
        raise ConfigError(
            f"a context of {model.context} exceeds the {there.max_position_embeddings} positions of {source.name}",
            fix=f"use --context {there.max_position_embeddings}, or less",
        )


@contextmanager
def started_from(
    config: TrainConfig, folder: RunFolder, data: Data, world: World, say: Callable[[str], None]
) -> Iterator[None]:
    """The run folder of a config with init_from has the model's weights as its first checkpoint.

    A run that has a checkpoint, or resumes from another one, does not read the model again.
    """
    made: list[Path] = []
    if config.run.resume_from == "auto":
        made = [Path(path) for path in world.on_rank0(lambda: _begin(config, folder, data, say))]
    try:
        yield
    finally:
        if not folder.began and world.is_rank0:  # it was refused: nothing of it stays
            for path in made:
                shutil.rmtree(path, ignore_errors=True)


def _begin(config: TrainConfig, folder: RunFolder, data: Data, say: Callable[[str], None]) -> list[str]:
    """The folders that were made."""
    name, context = str(config.model.init_from), config.model.context or 1
    if (folder.pretrained / CONFIG).exists():
        kept = folder_source(name, folder.pretrained)
        check_architecture(config, kept)
        _check_tokens(name, kept.config.vocab_size, folder.tokenizer, data)
    if checkpoints := checkpoint_paths(folder.checkpoints):
        _check_positions(checkpoints[-1], config)
        return []
    source = open_source(name)
    _check_tokens(name, source.config.vocab_size, source.tokenizer, data)
    made = [folder.checkpoint(0), *([] if folder.pretrained.exists() else [folder.pretrained])]
    write_model(source, folder, context=context)
    positions = source.config.max_position_embeddings
    cut = source.config.positions == "learned" and context < positions
    say(f"from   {name}: {source.family.name}" + (f", {context} of its {positions} positions" if cut else ""))
    return list(map(str, made))


def begin_again(config: TrainConfig, folder: RunFolder, model: nn.Module, world: World) -> None:
    """No valid checkpoint is left: the weights are those of the model that the run began from."""

    def read() -> Checkpoint | None:
        if not world.is_rank0:
            return None
        path = write_model(open_source(str(config.model.init_from)), folder, context=config.model.context or 1)
        return open_checkpoint(path)

    checkpoint = world.on_all_ranks(read)
    if is_spread(model.parameters()):
        load_shares(checkpoint, world, model=model, optimizer=None)
        return
    world.on_rank0(lambda: load(checkpoint, model=model, optimizer=None) if checkpoint else None)
    world.broadcast(list(weights(model).values()))


def _check_positions(checkpoint: Path, config: TrainConfig) -> None:
    """A model that was imported has all its positions; only one that begins with --init_from can leave some out."""
    _, stored = stored_in(checkpoint, "model-").shapes.get("position_embedding.weight", (None, None))
    if stored and stored[0] != config.model.context:
        raise ConfigError(
            f"a context of {config.model.context} is not the {stored[0]} that the imported model has learned",
            fix="drop --context, or begin a new run with --init_from and --context, which leaves out the others",
        )


def _check_tokens(name: str, vocab_size: int, tokenizer: Path | None, data: Data) -> None:
    if data.vocab_size > vocab_size:
        raise ConfigError(
            f"the data have a vocabulary of {data.vocab_size}, but {name} has {vocab_size} tokens",
            fix="tokenize the text with the tokenizer of the model: drop --tokenizer, and train on text",
        )
    made_by = data.train.tokenizer_path
    if tokenizer is None or not tokenizer.exists() or made_by is None:
        return
    if _ids(made_by) != _ids(tokenizer):
        raise ConfigError(
            f"{data.train.path} was made with another tokenizer than that of {name}",
            fix=f"tokenize the text again: drumline prepare TEXT --out FOLDER --tokenizer {tokenizer}",
        )


def _ids(tokenizer: Path) -> dict[str, int]:
    """The id of each token."""
    Tokenizer.load(tokenizer)  # refuses what is none
    ids: dict[str, int] = tokenizers.Tokenizer.from_file(str(tokenizer)).get_vocab(with_added_tokens=True)
    return ids


def import_model(name: str, out: Path) -> tuple[Source, RunFolder]:
    """A run folder with the weights of a model, which `drumline train --run_dir` trains further."""
    folder = RunFolder(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists", fix="choose another folder: -o RUN, or remove it")
    settings = TrainConfig()
    settings = replace(settings, model=replace(settings.model, init_from=name))
    source = open_source(name)
    if source.tokenizer is None:  # it may be trained on tokens
        settings = replace(settings, data=replace(settings.data, train_data_path="tokens.bin"))
    missing = [path for path in (out, *out.absolute().parents) if not path.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        config = with_preset(settings)
        write_model(source, folder, context=config.model.context or 1)
        if source.tokenizer is not None:
            Tokenizer.load(source.tokenizer).save(folder.tokenizer)
        data = replace(config.data, tokenizer=str(folder.tokenizer.absolute()) if source.tokenizer else None)
        replace_text(folder.config, to_toml(replace(config, data=data, run=replace(config.run, run_dir=str(out)))))
        folder.write_status("imported", step=0, total_steps=0)
    except BaseException as error:
        for part in (folder.checkpoints, folder.pretrained):
            shutil.rmtree(part, ignore_errors=True)
        for file in (folder.config, folder.tokenizer, folder.status):
            with suppress(OSError):
                file.unlink()
        for path in missing:
            with suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError):
            raise ConfigError(
                f"{out} is not writable ({error.strerror})", fix="choose another folder: -o RUN"
            ) from None
        raise
    return source, folder


def write_model(source: Source, folder: RunFolder, *, context: int) -> Path:
    """The weights as a checkpoint of step 0, and the small files that an export gives back."""
    read = reader(source)
    config = replace(source.config, max_position_embeddings=min(context, source.config.max_position_embeddings))
    own = [Mapped(ours=name, theirs=(name,), shape=s, rows=s[:1]) for name, s in shapes(config).items()]
    final = folder.checkpoint(0)
    aside = folder.checkpoints / f".{final.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        every = shards(own, torch.float32, largest_bytes=_FILE_BYTES, numbered=True)
        sha256s = write_shards(
            every, aside, torch.float32, read=lambda each: read(each.ours, each.shape), indexed=False
        )
        files = {name: {"bytes": (aside / name).stat().st_size, "sha256": sha256} for name, sha256 in sha256s.items()}
        # No facts: it fits any data and batch size. A loss scaler, if the run has one, begins anew.
        state = RunState(step=0, facts={}, scaler=torch.amp.GradScaler("cpu").state_dict())
        commit(aside, final, state, files, about={"versions": versions()}, later=True)
        keep_files(source, folder, dtype=_dtype(source.tensors()))
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def reader(source: Source) -> Callable[[str, tuple[int, ...]], Tensor]:
    """Reads our tensors by name, each in float32 when it is asked for, without positions beyond its shape."""
    tensors = source.tensors()
    names = checked_names(source, tensors)
    theirs = {each.ours: each for each in mapped(source.family, source.config)}

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        there = theirs[name]
        whole = there.to_ours([tensors.read(names[each]) for each in there.theirs])
        return whole[: shape[0]].float()

    return read


def keep_files(source: Source, folder: RunFolder, *, dtype: str) -> None:
    folder.pretrained.mkdir(exist_ok=True)
    for name in KEPT[1:]:
        if source.path.is_dir() and (source.path / name).is_file():
            shutil.copyfile(inside(source.path, name), folder.pretrained / name)
    replace_text(folder.pretrained / CONFIG, json.dumps({**source.content, "dtype": dtype}, indent=2) + "\n")
    flush(folder.pretrained)


def _dtype(tensors: Tensors) -> str:
    """That of most tensors."""
    kinds = list(tensors.dtypes.values())
    most = max(sorted(set(kinds)), key=kinds.count)
    return next(ours for ours, theirs in DTYPES.items() if theirs == most)


def checked_names(source: Source, tensors: Tensors) -> dict[str, str]:
    """The name of each tensor of the class in the files, which may have left out the prefix of the model."""
    family, where = source.family, source.name
    prefix = family.modules.get("token_embedding", "").partition(".")[0] + "."
    names: dict[str, str] = {}
    wrong: list[str] = []
    for each in mapped(family, source.config):
        for name, shape in zip(each.theirs, each.their_shapes, strict=True):
            stored = name if name in tensors.shapes else name.removeprefix(prefix)
            names[name] = stored
            if stored not in tensors.shapes:
                wrong.append(f"{name} is missing")
            elif tensors.shapes[stored] != shape:
                wrong.append(f"{stored} has shape {tensors.shapes[stored]}, not {shape}")
    unread = sorted(set(tensors.shapes) - set(names.values()))
    tied = ("lm_head.weight",) if source.config.tie_embeddings else ()
    wrong += [f"{name} is unknown" for name in unread if not name.endswith((*_IGNORED, *tied))]
    if wrong:
        raise CheckpointError(
            f"the weights of {where} are not those of a {family.name} with its {CONFIG}: {wrong[0]}"
            + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""),
            fix="copy or download it again; a model with other layers or biases is another class",
        )
    others = sorted({tensors.dtypes[name] for name in names.values()} - set(DTYPES.values()))
    if others:
        raise CheckpointError(
            f"the weights of {where} are {', '.join(others)}: quantized, which drumline does not read",
            fix="use the version of the model in float32, bfloat16 or float16",
        )
    return names
