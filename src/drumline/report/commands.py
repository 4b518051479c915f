"""Commands that are printed for the user to type."""

from __future__ import annotations

import os
import shlex
import shutil
import sys


def command(*words: object) -> str:
    """A drumline command line for this shell: `drumline`, or its path, as in a .venv that is not activated."""
    return f"{_program()} {shlex.join(map(str, words))}"


def _program() -> str:
    if shutil.which("drumline"):
        return "drumline"
    for path in (sys.argv[0], os.path.join(os.path.dirname(sys.executable), "drumline")):  # a rank has another argv
        if os.path.basename(path) == "drumline" and shutil.which(os.path.abspath(path)):
            near = os.path.relpath(path)
            near = near if os.sep in near else os.path.join(os.curdir, near)
            return shlex.quote(min(near, os.path.abspath(path), key=len))
    return "python -m drumline"
