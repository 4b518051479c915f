"""A run that is refused before its first step leaves its folder as it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from drumline.files.disk import replace_text
from drumline.files.private import refuse_links
from drumline.files.run_folder import RunFolder

Contents = dict[str, bytes | int | None]
"""What is in a run folder, by name: the bytes of a file that is replaced, the size of one that only grows."""


def contents(folder: RunFolder) -> Contents:
    """What `undo` needs to know about a folder that exists, whose files must be in it."""
    refuse_links(folder)
    hidden = (folder.identity, folder.resumed, folder.lock)
    replaced = (folder.config, folder.trainer, folder.tokenizer, folder.data, *hidden)
    there: Contents = {}
    for path in folder.path.iterdir():
        there[path.name] = None
        with suppress(OSError):
            if path in replaced:
                there[path.name] = path.read_bytes()
            elif path in (folder.log, folder.metrics, folder.events):
                there[path.name] = path.stat().st_size
    return there


def undo(folder: RunFolder, before: Contents, missing: Sequence[Path]) -> None:
    """Put back what was there, and remove what a run writes and was not there, but never a checkpoint.

    missing: the folder, and those that it is in, if they had to be made; the innermost first
    """
    of_runs = (folder.config, folder.tokenizer, folder.data, folder.log, folder.metrics, folder.events, folder.status)
    for path in (
        *of_runs,
        folder.trainer,
        folder.identity,
        folder.resumed,
        folder.lock,
        folder.checkpoints,
        folder.tensorboard,
        folder.pretrained,
        folder.path / "wandb",
    ):
        with suppress(OSError):
            if path.name not in before:
                _remove(path, folder)
    for name, content in before.items():
        path = folder.path / name
        with suppress(OSError):
            if isinstance(content, bytes) and (not path.exists() or path.read_bytes() != content):
                _put_back(path, content, is_lock=path == folder.lock)
            elif isinstance(content, int) and path.stat().st_size > content:
                os.truncate(path, content)
    for path in missing:
        with suppress(OSError):  # not empty: other hosts wait there
            path.rmdir()


def _remove(path: Path, folder: RunFolder) -> None:
    if path == folder.checkpoints:
        path.rmdir()
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _put_back(path: Path, content: bytes, *, is_lock: bool) -> None:
    if is_lock:  # the same file: others may be waiting for it
        path.write_bytes(content)
    else:
        replace_text(path, content.decode())
