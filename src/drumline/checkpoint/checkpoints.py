"""Checkpoints: atomic, verified before they are loaded, and without pickle.

    step-00005000/
      model-00001-of-00002.safetensors       weights, split over the ranks that write (storage.py)
      optimizer-00001-of-00002.safetensors   optimizer state
      run.json                               step and everything that is not a tensor
      manifest.json                          size and sha256 of every file above, versions, and its own sha256

A checkpoint is written to a temporary folder, flushed, hashed and renamed. Background writing is up to saver.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from drumline.checkpoint.storage import SUFFIX, FileFacts
from drumline.errors import CheckpointError
from drumline.files import CHECKPOINT_PREFIX, RunFolder, file_sha256, flush

RUN, MANIFEST = "run.json", "manifest.json"
FORMAT = 2
_FILE_NAME = re.compile(rf"(?:model|optimizer)-\d+-of-\d+{re.escape(SUFFIX)}|{re.escape(RUN)}")
"""Every file that a manifest may list. None of them can be outside its folder."""
_NOT_JSON_OF_OURS = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class OtherFormatError(CheckpointError):
    """A valid checkpoint of another format version: never renamed, since the version that wrote it can read it."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What a run needs to resume, besides its tensors."""

    step: int
    facts: dict[str, Any]
    """What must not change when the run is resumed."""
    scaler: dict[str, Any] = field(default_factory=dict)
    """float16's loss scaler; {} for other dtypes."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Optimizer state that is not a tensor, by "kind/parameter"."""
    detours: list[list[int]] = field(default_factory=list)
    """[step, number of steps whose data are skipped from there on]: from rollbacks."""
    losses: list[float] = field(default_factory=list)
    """Losses of recent steps, if spikes are detected."""
    valid_loss: float | None = None
    """Validation loss of these weights, if it was computed at this step."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    state: RunState
    tensors: dict[str, Tensor] | None = None
    """Tensors of a single file, which is read as a whole; None: loaded later from the folder."""

    @property
    def step(self) -> int:
        return self.state.step


def commit(
    aside: Path,
    final: Path,
    state: RunState,
    files: FileFacts,
    *,
    about: dict[str, Any],
    later: bool = False,
    reached: Callable[[str], None] = lambda point: None,
) -> Checkpoint:
    """Turn the files in `aside` into a checkpoint: verified, and complete with one rename.

    later: the files have been, or will be, read back by who calls this
    """
    text = (json.dumps({"format": FORMAT, **asdict(state)}, indent=2) + "\n").encode()
    (aside / RUN).write_bytes(text)
    files = {**files, RUN: {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}}
    reached(RUN)
    manifest = {"format": FORMAT, "step": state.step, **about, "files": dict(sorted(files.items()))}
    (aside / MANIFEST).write_text(_sealed(manifest), encoding="utf-8")
    reached(MANIFEST)
    with ThreadPoolExecutor() as threads:  # a slow disk flushes them in the time of one
        list(threads.map(flush, (aside / RUN, aside / MANIFEST, aside)))
    verified = open_checkpoint(aside, read=(RUN,) if later else None)
    reached("before the rename")
    if final.exists():  # a run that rolled back gets here again
        from drumline.checkpoint.newest import set_aside

        set_aside(final, "superseded")
    aside.rename(final)
    reached("after the rename")
    flush(final.parent)
    return Checkpoint(final, verified.state)


def open_checkpoint(path: Path, *, read: Collection[str] | None = None) -> Checkpoint:
    """Verify a checkpoint against its manifest; CheckpointError says what is wrong.

    read: the files to read; None: all of them
    """
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
        version, seal = manifest["format"], manifest.pop("sha256", None)
        if version == FORMAT:
            files = {str(name): (int(f["bytes"]), str(f["sha256"])) for name, f in manifest["files"].items()}
            step = int(manifest["step"])
    except _NOT_JSON_OF_OURS as error:
        raise _damaged(path, f"its {MANIFEST} cannot be read ({type(error).__name__}: {error})") from None
    if version != FORMAT and seal in (None, _seal(manifest)):
        raise OtherFormatError(
            f"{path} has format {version}, this drumline reads {FORMAT}", fix="use the drumline version that wrote it"
        )
    if text != _sealed(manifest) or (path / MANIFEST).is_symlink():
        raise _damaged(path, f"{MANIFEST} does not match its own hash")
    if path.name.removeprefix(CHECKPOINT_PREFIX).isdecimal() and path.name != RunFolder.checkpoint_name(step):
        raise _damaged(path, f"it is of step {step}, not of the step in its name")
    try:
        _check_files(path, files, files if read is None else read)
    except OSError as error:  # a failing disk
        raise _damaged(path, f"it cannot be read ({error})") from None
    state = read_state(path)
    if state.step != step:
        raise _damaged(path, f"{RUN} is of step {state.step}, {MANIFEST} of step {step}")
    return Checkpoint(path, state)


def _check_files(path: Path, files: dict[str, tuple[int, str]], read: Collection[str]) -> None:
    if RUN not in files:
        raise _damaged(path, f"its {MANIFEST} does not list {RUN}")

    def check(name: str, size: int, sha256: str) -> None:
        file = path / name
        if not _FILE_NAME.fullmatch(name):
            raise _damaged(path, f"its {MANIFEST} lists {name!r}, which is not a file of a checkpoint")
        if file.is_symlink() or not file.is_file():
            raise _damaged(path, f"{name} is missing")
        if file.stat().st_size != size:
            raise _damaged(path, f"{name} has {file.stat().st_size} bytes, not {size}")
        if name in read and file_sha256(file) != sha256:
            raise _damaged(path, f"{name} does not match its hash in the manifest")

    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda name: check(name, *files[name]), files))
    unknown = sorted(file.name for file in path.glob(f"*{SUFFIX}") if file.name not in files)
    if unknown:
        raise _damaged(path, f"it contains {unknown[0]}, which its {MANIFEST} does not list")


def read_state(path: Path) -> RunState:
    """run.json, with exactly the fields of a RunState."""
    try:
        run = json.loads((path / RUN).read_text(encoding="utf-8"))
        if run.pop("format") != FORMAT:
            raise ValueError("another format")
        state = RunState(**run)
        if not isinstance(state.step, int) or not all(isinstance(v, dict) for v in (state.facts, state.optimizer)):
            raise TypeError("wrong types")
        return state
    except _NOT_JSON_OF_OURS as error:
        raise _damaged(path, f"its {RUN} cannot be read ({type(error).__name__}: {error})") from None


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sealed(manifest: dict[str, Any]) -> str:
    """The exact text of a manifest.json."""
    return json.dumps({**manifest, "sha256": _seal(manifest)}, indent=2) + "\n"


def checkpoint_paths(folder: Path) -> list[Path]:
    """Complete checkpoints by name, oldest first; not verified."""
    numbers = {path: path.name.removeprefix(CHECKPOINT_PREFIX) for path in folder.glob(f"{CHECKPOINT_PREFIX}*")}
    return sorted((path for path, number in numbers.items() if number.isdecimal()), key=lambda path: int(numbers[path]))


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint {path} is damaged: {what}", fix="resume from another checkpoint of the run")
