"""What others may have prepared: names in folders that all users share, and links in a run folder from elsewhere."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from drumline.errors import ConfigError
from drumline.files.run_folder import RunFolder


def is_own_folder(path: Path) -> bool:
    """Whether this is a folder of this user, and not a link to one."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def make_private(path: Path) -> bool:
    """Make a folder for this user alone, or close one that others can look into; False if it is not this user's."""
    with suppress(OSError):  # without room or a place for it, there is nothing of others in it either
        path.mkdir(mode=0o700)
    if not os.path.lexists(path):
        return True
    if not is_own_folder(path):
        logging.getLogger(__name__).warning("%s is not used: it is a link, or belongs to another user", path)
        return False
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)
    return True


def refuse_links(folder: RunFolder) -> None:
    """Refuse to write into a run folder, or delete from it, through links that lead out of it."""
    inside = folder.path.resolve()
    for path in refuse_pipes(folder):
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            raise ConfigError(
                f"{path} is a link to {os.readlink(path)}, outside of the run folder",
                fix="put in its place what it leads to, or remove it; to use another disk, choose a --run_dir there",
            )


def refuse_pipes(folder: RunFolder) -> list[Path]:
    """Refuse to read from what is neither file nor folder, which may never end; returns what a run reads and writes."""
    found = list(_of_runs(folder))
    for path in found:
        with suppress(OSError):  # a link to nowhere
            kind = stat.S_IFMT(path.stat().st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFDIR):
                raise ConfigError(
                    f"{path} is neither a file nor a folder, but a pipe, a socket or a device",
                    fix="remove it; a run folder from somebody you do not know is better not used",
                )
    return found


def _of_runs(folder: RunFolder) -> Iterator[Path]:
    """What is in a run folder and has a name of drumline's, also one that is written first or set aside."""
    own = {path.name for path in vars(folder).values() if isinstance(path, Path) and path != folder.path} | {"wandb"}
    for path in folder.path.glob("*"):
        if path.name.startswith((".", *own)):
            yield path
    yield from folder.checkpoints.glob("*")
    for inside in (folder.evals, folder.leader, folder.tensorboard, folder.pretrained, folder.path / "wandb"):
        yield from inside.rglob("*")
