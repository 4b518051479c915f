"""A command that ends with an exception: what is printed, such as the command line that was probably meant."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import get_type_hints

from cyclopts import CycloptsError, UnknownOptionError, UnusedCliTokensError

from drumline.cli.app import parser
from drumline.config import TrainConfig, check_whole, flag, whole_numbers
from drumline.errors import EXIT_INTERRUPTED, EXIT_USAGE, EXIT_USER, DrumlineError, UsageError
from drumline.files import stdout_is_unread
from drumline.report import report_error

_MEANT = {
    "data": "train_data_path",
    "dataset": "train_data_path",
    "train_data": "train_data_path",
    "valid_data": "valid_data_path",
    "learning_rate": "lr",
    "steps": "total_steps",
    "max_steps": "total_steps",
    "max_iters": "total_steps",
    "epoch": "epochs",
    "num_epochs": "epochs",
    "block_size": "context",
    "seq_len": "context",
    "n_layer": "n_layers",
    "n_head": "n_heads",
    "n_embd": "d_model",
    "output_dir": "run_dir",
    "out_dir": "run_dir",
    "nproc_per_node": "nproc",
    "resume": "resume_from",
}
"""What other trainers call a setting of a run, and what drumline calls it."""
_POSITIONAL = {"train": "--train_data_path", "sample": "--prompt", "evaluate": "--data"}
"""The flag that an argument without one was most likely meant for."""


def normalized(words: Sequence[str]) -> list[str]:
    """`--compile true` as `--compile=true`, which is how a boolean flag takes its value.

    Refuses a fraction for a whole number of `drumline train`, which would be rounded.
    """
    if words[0].startswith(("--local-rank", "--local_rank")):
        words = words[1:]  # torch.distributed.launch puts it first; the environment has it too
    booleans = {
        field.name
        for section in get_type_hints(TrainConfig).values()
        for field in fields(section)
        if "bool" in str(get_type_hints(section)[field.name])
    }
    if words[0] == "train":
        check_whole({name: flag(words, name) for name in whole_numbers()}, said="--")
    joined: list[str] = []
    for word in words:
        before = joined[-1] if joined else ""
        is_boolean = before.startswith("--") and before[2:].replace("-", "_") in booleans
        if is_boolean and word.lower() in ("true", "false"):
            joined[-1] += f"={word.lower()}"
        else:
            joined.append(word)
    return joined


def exit_code(error: BaseException, argv: Sequence[str]) -> int | None:
    """Explain an error to the user; None: it is a bug, which keeps its traceback."""
    if isinstance(error, CycloptsError):
        return report_error(explained(error, argv), EXIT_USAGE)
    if isinstance(error, DrumlineError):
        return report_error(error, error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return report_error(DrumlineError("interrupted", fix="run the same command again"), EXIT_INTERRUPTED)
    # As in `drumline sample RUN | head -1`. A connection to another host can break, too.
    return EXIT_USER if isinstance(error, BrokenPipeError) and stdout_is_unread() else None


def explained(error: CycloptsError, words: Sequence[str]) -> UsageError:
    """The error with the command that was probably meant."""
    command = words[0] if words and words[0] in parser() else ""
    if command in ("launch", "checkpoint", "data") and len(words) > 1 and words[1] in parser()[command]:
        command = f"{command} {words[1]}"
    help_ = f"see drumline {command} --help" if command else "see drumline --help"
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        rest = shlex.join(error.unused_tokens)
        flag = _POSITIONAL.get(command)
        return UsageError(
            f"drumline {command} does not take the argument {rest}",
            fix=f"{flag} {rest}, if that was meant; {help_}" if flag else help_,
        )
    if isinstance(error, UnknownOptionError) and command == "train":
        name = str(error.token.keyword or error.token.value).lstrip("-").replace("-", "_")
        if name in _MEANT:
            return UsageError(f"there is no option --{name}", fix=f"use --{_MEANT[name]}; {help_}")
    said = re.sub(r"\s+", " ", str(error))
    return UsageError(re.sub(r"\|Literal\[([^]]*)\]", r" or one of: \1", said), fix=help_)
