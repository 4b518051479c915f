"""`drumline --help`: all commands on one page, without the parser, whose import would take most of the time."""

from __future__ import annotations

import shutil
import textwrap

from drumline.cli.app import COMMANDS

_ABOUT = "Train GPT-style language models: from raw text to a model that generates text, with one command."
_FLAGS = {"--help, -h": "Display this page.", "--version": "Display the version."}
_WIDEST = 120


def overview() -> str:
    """The page, as wide as the terminal."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    rows = {place.rpartition(":")[2].rstrip("_"): text for place, text in COMMANDS.items()} | _FLAGS
    first = max(map(len, rows)) + 4
    page = ["Usage: drumline COMMAND [--help]", "", *textwrap.wrap(_ABOUT, width), "", "Commands:"]
    for name, text in rows.items():
        lines = textwrap.wrap(text, max(20, width - first), break_on_hyphens=False)
        page += [f"  {name}".ljust(first) + lines[0], *(" " * first + line for line in lines[1:])]
    return "\n".join(page) + "\n"
