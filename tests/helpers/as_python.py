"""What Python itself does with the words of its command line, done by a process that runs already."""

from __future__ import annotations

import os
import runpy
import sys
import types
from collections.abc import Sequence
from typing import NoReturn

_execv = os.execv


def uncaught(error: BaseException) -> int:
    """What Python does at the end of a program that did not catch this; gives its exit code."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as ends:
        return int(ends.code or 0)
    return 1


class _ReplacedError(BaseException):
    """This program is to be another one from now on."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__()
        self.words = list(words)


def replace_by(path: str, words: Sequence[str]) -> NoReturn:
    """As os.execv; of this Python it is not a new one."""
    if path != sys.executable:
        _execv(path, words)
    raise _ReplacedError(words[1:])


def run_words(words: Sequence[str]) -> list[str]:
    """Do what this Python does with these words; gives those it is to go on with, if any."""
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), main.__dict__)
        elif words[0] == "-m":
            sys.argv = list(words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
    except _ReplacedError as replaced:
        return replaced.words
    return []
