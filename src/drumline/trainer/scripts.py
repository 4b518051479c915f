"""What scripts need that the command line has of itself: an error is two lines on one rank, not a traceback on each."""

from __future__ import annotations

import atexit
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import TracebackType
from typing import NoReturn, ParamSpec, TypeVar

from drumline.config import TrainConfig, did_you_mean
from drumline.errors import DrumlineError, UsageError
from drumline.report import flush_console, report_error
from drumline.train import FitResult
from drumline.train import pretrain as pretrain_here

P = ParamSpec("P")
T = TypeVar("T")


def pretrain(config: TrainConfig) -> FitResult:
    """Train a GPT according to the config, in its run folder, resuming if the run exists; all ranks call this."""
    with errors_in_two_lines():
        return pretrain_here(config)


@contextmanager
def errors_in_two_lines() -> Iterator[None]:
    """A DrumlineError from inside that the script does not catch ends it with two lines and the error's exit code."""
    try:
        yield
    except DrumlineError:
        before = sys.excepthook  # torch's, once ranks are connected: it would print the rank before every line

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if isinstance(error, DrumlineError):
                _exit(report_error(error))
            before(kind, error, trace)

        sys.excepthook = hook
        raise


def _exit(code: int) -> NoReturn:
    """From an excepthook, for which SystemExit sets the exit code."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun kills the ranks that are left when the first one has failed, and prints a paragraph about each: so
        # all of them end now, and not after the time that it takes to tear down an interpreter with torch.
        atexit._run_exitfuncs()
        flush_console()
        os._exit(code)
    raise SystemExit(code)


def made_by_scripts(kind: type[T]) -> type[T]:
    """A class that scripts create: as `for_scripts`."""
    kind.__init__ = for_scripts(kind.__init__)  # type: ignore[method-assign]
    return kind


def for_scripts(function: Callable[P, T]) -> Callable[P, T]:
    """A method that scripts call: its errors are two lines, and it knows what was meant by a misspelled argument."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with errors_in_two_lines():
            for name in kwargs:
                if name not in names:
                    what = function.__qualname__.removesuffix(".__init__")
                    fix = did_you_mean(name, names, otherwise=f"its arguments: {', '.join(names)}")
                    raise UsageError(f"{what} has no argument {name}", fix=fix)
            return function(*args, **kwargs)

    return call
