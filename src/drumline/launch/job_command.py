"""What a job runs on each of its hosts: the user's drumline command, plus flags that the launcher fills in.

Training runs under drumline's own supervisor on every host: crashed or hung ranks are restarted within the job, and
exit codes keep their meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.config import flag
from drumline.errors import ConfigError
from drumline.files import replace_text

Check = Callable[[Sequence[str]], Any]
"""Parses a drumline command line without running it, and raises what that would raise."""

_COMMANDS = ("train", "bench", "doctor")
_RANKS = ("nproc", "nnodes", "rdzv_endpoint")


@dataclass(frozen=True, kw_only=True)
class JobCommand:
    """A drumline command and the hosts to run it on."""

    words: tuple[str, ...]
    """The arguments of `drumline`."""
    nodes: int
    gpus_per_node: int
    """0: hosts without GPUs, with one rank each unless the command has --nproc."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 0:
            raise ConfigError(
                f"--nodes {self.nodes} --gpus_per_node {self.gpus_per_node} is not a valid size",
                fix="as in --nodes 2 --gpus_per_node 8; hosts without GPUs: --gpus_per_node 0",
            )
        if self.words[:1] not in [(name,) for name in _COMMANDS]:
            given = f"{self.words[0]!r} cannot be run as a job" if self.words else "there is no command to run"
            raise ConfigError(given, fix=f"end with the command, as in -- train --run_dir ...: {', '.join(_COMMANDS)}")
        for word in self.words:
            if "\0" in word or not _is_text(word):
                raise ConfigError(f"{word!r} is not valid UTF-8, which a job script needs", fix="use UTF-8")
        for name in _RANKS:
            # Only on hosts without GPUs is the number of ranks not fixed.
            if flag(self.words, name) is not None and (name, self.gpus_per_node) != ("nproc", 0):
                raise ConfigError(
                    f"--{name} is set by the launcher, from --nodes {self.nodes} and "
                    f"--gpus_per_node {self.gpus_per_node}",
                    fix=f"drop --{name}",
                )
        if self.is_training and not flag(self.words, "run_dir"):
            raise ConfigError(
                "a job needs --run_dir to find its run again after a requeue",
                fix="add --run_dir with a folder that all hosts share, as in -- train --run_dir /shared/runs/big",
            )

    @property
    def is_training(self) -> bool:
        return self.words[0] == "train"

    @property
    def run_dir(self) -> str | None:
        return flag(self.words, "run_dir")

    @property
    def ranks_per_node(self) -> int:
        """One per GPU; on hosts without GPUs, as many as the command says."""
        given = flag(self.words, "nproc") or ""
        return self.gpus_per_node or (max(1, int(given)) if given.isdecimal() else 1)

    def on_each_host(self, *, endpoint: str | None = None) -> list[str]:
        """The arguments of `drumline`, the same on every host.

        endpoint: HOST:PORT; None if hosts connect through the run folder, or by srun's variables
        """
        added: list[str] = []
        if self.words[0] in ("train", "bench") and flag(self.words, "nproc") is None:
            added += ["--nproc", str(self.ranks_per_node)]
        if self.nodes > 1 and (self.is_training or (self.words[0] == "doctor" and endpoint)):
            added += ["--nnodes", str(self.nodes)]
            added += ["--rdzv_endpoint", endpoint] if endpoint else []
        return [self.words[0], *added, *self.words[1:]]


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def write_file(path: Path, text: str) -> None:
    """Write a launcher's output file atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", fix="choose another folder") from None
