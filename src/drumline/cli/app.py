"""The `drumline` command. A command's module is imported when that command is called.

Exit codes: 0 done, 1 an error that the user can fix, 2 a wrong command line, 3 the run failed, 75 stopped by a signal
with everything saved (run the same command again to resume), 130 interrupted before that.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING

from drumline.config import flag
from drumline.signals import end_at_once

if TYPE_CHECKING:
    from cyclopts import App

PROCESS = SimpleNamespace(is_ours=False)
"""Whether this process runs nothing but the `drumline` command, so that it may fork and exit at any time."""


def main(argv: Sequence[str] | None = None) -> None:
    """The `drumline` command."""
    words = list(sys.argv[1:] if argv is None else argv)
    PROCESS.is_ours = argv is None
    if None in (sys.stdin, sys.stdout, sys.stderr):
        from drumline.files import open_closed_streams

        open_closed_streams()
    if words[:1] == ["train"] and not {"RANK", "SLURM_PROCID"} & set(os.environ):
        # Until the loop or the supervisor takes over, there is nothing to save, so a stop signal simply exits.
        # Ranks keep the default handlers: while blocked in a collective, they would never get to run their own.
        end_at_once()
    code = run_command(words)
    uses_gloo = os.environ.get("WORLD_SIZE", "1") != "1" or words[:1] == ["doctor"]
    if "torch" not in sys.modules or not (PROCESS.is_ours or uses_gloo):
        from drumline.files import stdout_is_unread

        stdout_is_unread()
        sys.exit(code)
    # Everything is saved and printed. Tearing down an interpreter with torch takes a third of a second, and gloo's
    # threads sometimes abort a process that is already done, which would make an elastic launcher repeat the run.
    if not uses_gloo:
        atexit._run_exitfuncs()
    from drumline.report import flush_console

    flush_console()
    os._exit(code)


def run_command(argv: list[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        if any("." in word or word.lower() in ("true", "false") or word.startswith("--local") for word in argv):
            from drumline.cli.usage import normalized

            argv = normalized(argv)
        if argv in ([], ["--help"], ["-h"]):
            from drumline.cli.overview import overview

            sys.stdout.write(overview())
            return 0
        app = parser("train" if argv[0] == "train" else "")
        app.config = []
        if argv[:1] == ["train"] and _names_files(argv):
            from drumline.cli.layers import file_layers

            app.config = file_layers(argv)
        code: int | None = app(argv, exit_on_error=False, print_error=False)
        return code or 0
    except (Exception, KeyboardInterrupt) as error:
        from drumline.cli.usage import exit_code

        if (code := exit_code(error, argv)) is None:
            raise
        return code


@cache
def parser(command: str = "") -> App:
    """What parses a command line and calls its command: any, or `train`."""
    from cyclopts import App, Parameter

    places = ["drumline.cli.train:train"]
    if command != "train":
        from drumline.cli.overview import COMMANDS

        places = list(COMMANDS)

    app = App(
        name="drumline",
        help_format="plaintext",
        # Flags are spelled like the settings; --batch-size works like --batch_size. The last occurrence of a flag wins.
        default_parameter=Parameter(name_transform=lambda name: name, negative_iterable=(), allow_repeating=True),
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for place in places:
        app.command(place, name=place.rpartition(":")[2].rstrip("_"))  # `import` is a keyword
    return app


def _names_files(words: Sequence[str]) -> bool:
    """Whether settings may come from files: --config, or an existing run."""
    named = any(flag(words, name) for name in ("config", "resume_from", "checkpoint_store"))
    return named or os.path.exists(flag(words, "run_dir") or "")
