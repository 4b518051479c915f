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
COMMANDS = {
    "drumline.cli.prepare:prepare": "Tokenize text into .bin files, in the format of nanoGPT.",
    "drumline.cli.train:train": "Train a model. Without arguments: a small GPT on Python source code.",
    "drumline.cli.generate:evaluate": "Validation loss of a run's newest checkpoint, or its results in tasks.",
    "drumline.cli.generate:sample": "Generate text with a run's newest checkpoint.",
    "drumline.cli.runs:export": "Export a run as a Hugging Face model, or list which settings are which class.",
    "drumline.cli.runs:import_": "Make a run of a Hugging Face model, or of nanoGPT's ckpt.pt, without training.",
    "drumline.cli.generate:chat": "Talk to a run's newest checkpoint in the terminal.",
    "drumline.cli.generate:serve": "Serve a run's newest checkpoint: OpenAI's API, and a page to talk to the model.",
    "drumline.cli.runs:runs": "List runs with their state and latest losses.",
    "drumline.cli.runs:watch": "A live page of runs: curves, ranks, events and samples, from their folders alone.",
    "drumline.cli.runs:report": "Write one file about a run: its curves, config, events, samples.",
    "drumline.cli.checkpoint:checkpoint": "List, verify, export or prune the checkpoints of a run.",
    "drumline.cli.bench:bench": "Measure training throughput, where step time goes, and the largest batch that fits.",
    "drumline.cli.doctor:doctor": "Check this machine, or several hosts, and print a fix for each problem.",
    "drumline.cli.launch:launch": "Start one run on several hosts over SSH, or as a SLURM or Kubernetes job.",
    "drumline.cli.drill:drill": "Inject faults into a small run repeatedly and verify that no work is lost.",
}
"""Module of each command, and its line in `drumline --help`, which imports none of them."""


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
    if any(word.lower() in ("true", "false") or word.startswith("--local") for word in argv):
        from drumline.cli.usage import normalized

        argv = normalized(argv)
    if argv in ([], ["--help"], ["-h"]):
        from drumline.cli.overview import overview

        sys.stdout.write(overview())
        return 0
    app = parser()
    try:
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
    finally:
        app.config = []


@cache
def parser() -> App:
    """What parses a command line and calls its command."""
    from cyclopts import App, Parameter

    app = App(
        name="drumline",
        help_format="plaintext",
        # Flags are spelled like the settings; --batch-size works like --batch_size. The last occurrence of a flag wins.
        default_parameter=Parameter(name_transform=lambda name: name, negative_iterable=(), allow_repeating=True),
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for place in COMMANDS:
        app.command(place, name=place.rpartition(":")[2].rstrip("_"))  # `import` is a keyword
    return app


def _names_files(words: Sequence[str]) -> bool:
    """Whether settings may come from files: --config, or an existing run."""
    return bool(flag(words, "config") or flag(words, "resume_from")) or os.path.exists(flag(words, "run_dir") or "")
