"""The `drumline` command. A command's module is imported when that command is called.

Exit codes: 0 done, 1 an error that the user can fix, 2 a wrong command line, 3 the run failed, 75 stopped by a signal
with everything saved (run the same command again to resume), 130 interrupted before that.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from types import SimpleNamespace

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Dict

from drumline.config import flag
from drumline.errors import EXIT_INTERRUPTED, EXIT_USAGE, DrumlineError
from drumline.signals import end_at_once

app = App(
    name="drumline",
    help="Train GPT-style language models: from raw text to a model that generates text, with one command.",
    help_format="plaintext",
    # Flags are spelled like the settings; --batch-size works like --batch_size. The last occurrence of a flag wins.
    default_parameter=Parameter(name_transform=lambda name: name, negative_iterable=(), allow_repeating=True),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
PROCESS = SimpleNamespace(is_ours=False)
"""Whether this process runs nothing but the `drumline` command, so that it may fork and exit at any time."""
_DOCTOR = """Check this machine, or several hosts and the network between them, and print a fix for each problem.

For several hosts, use --hosts, or start it on each host the way runs start:
with torchrun, with srun, or by hand with --nnodes.
The exit code is 1 if a check failed, else 0."""
_LAUNCH = """Start one run on several hosts over SSH: drumline launch --hosts a,b -- train --run_dir /shared/run

The hosts are checked first. Each line of output is prefixed with its host.
If the run fails, the first failure is reported last.
Ctrl-C saves a checkpoint and stops; a second Ctrl-C stops immediately."""
COMMANDS = {
    "drumline.cli.prepare:prepare": "Tokenize text into .bin files, in the format of nanoGPT.",
    "drumline.cli.train:train": "Train a model. Without arguments: a small GPT on Python source code.",
    "drumline.cli.generate:evaluate": "Validation loss, perplexity and bits per byte of a run's newest checkpoint.",
    "drumline.cli.generate:sample": "Generate text with a run's newest checkpoint.",
    "drumline.cli.runs:runs": "List runs with their state and latest losses.",
    "drumline.cli.checkpoint:checkpoint": "List, verify, export or prune the checkpoints of a run.",
    "drumline.cli.bench:bench": "Measure training throughput, where step time goes, and the largest batch that fits.",
    "drumline.cli.doctor:doctor": _DOCTOR,
    "drumline.cli.launch:launch": _LAUNCH,
    "drumline.cli.drill:drill": "Inject faults into a small run repeatedly and verify that no work is lost.",
}
"""Module and help text of each command. The help is repeated here so that `drumline --help` imports none of them."""
for place, text in COMMANDS.items():
    app.command(place, help=text)


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
    if argv and argv[0].startswith(("--local-rank", "--local_rank")):
        argv = argv[1:]  # torch.distributed.launch puts it first; the environment has it too
    if {"true", "false"} & {word.lower() for word in argv}:
        from drumline.cli.usage import with_values

        argv = with_values(argv)
    try:
        if argv[:1] == ["train"] and _names_files(argv):
            from drumline.cli.layers import file_layers

            files = file_layers(argv)
            app.config = [Dict(settings, source=str(path), use_commands_as_keys=False) for path, settings in files]
        code: int | None = app(argv, exit_on_error=False, print_error=False)
        return code or 0
    except CycloptsError as error:
        from drumline.cli.usage import explained

        return _report(explained(error, argv), EXIT_USAGE)
    except DrumlineError as error:
        return _report(error, error.exit_code)
    except KeyboardInterrupt:
        return _report(DrumlineError("interrupted", fix="run the same command again"), EXIT_INTERRUPTED)
    finally:
        app.config = []


def _names_files(words: Sequence[str]) -> bool:
    """Whether settings may come from files: --config, or an existing run."""
    given = flag(words, "config") or flag(words, "resume_from")
    return bool(given) or os.path.exists(flag(words, "run_dir") or "")


def _report(error: DrumlineError, code: int) -> int:
    from drumline.report import told

    return told(error, code)
