"""Errors for people: what is wrong, with the numbers, and what to do about it.

The command line prints a DrumlineError as two lines and exits 1; any other exception is a bug and keeps its traceback.
"""

from collections.abc import Sequence
from typing import Any

EXIT_USER, EXIT_USAGE, EXIT_FAILED, EXIT_STOPPED, EXIT_INTERRUPTED = 1, 2, 3, 75, 130
EXIT_CRASHED = 70
"""A rank that ended by an exception that is no DrumlineError: worth another try."""
EXIT_CODES = (EXIT_USER, EXIT_USAGE, EXIT_FAILED, EXIT_STOPPED, EXIT_INTERRUPTED)
"""1 the user's to mend, 2 the command line is wrong, 3 the run failed, 75 stopped with all saved, 130 without."""


class DrumlineError(Exception):
    """Something the user can mend. `fix` says how, ideally as the line to type.

    details: lines of a table, where one sentence is not enough
    told:    whether another rank tells the user, so that one mistake is not printed by every process
    """

    exit_code = EXIT_USER
    code = "user"
    """What kind of error it is, for programs: the words may change."""

    def __init__(self, problem: str, *, fix: str, details: Sequence[str] = (), told: bool = False) -> None:
        super().__init__("\n".join((problem, *details, fix)))
        self.problem = problem
        self.fix = fix
        self.details = tuple(details)
        self.told = told

    def as_dict(self) -> dict[str, Any]:
        return {"code": self.code, "problem": self.problem, "details": list(self.details), "fix": self.fix}


class ConfigError(DrumlineError):
    """A setting, or a combination of settings, that cannot work."""


class DataError(DrumlineError):
    """Text or tokens that cannot be read, or are not what their manifest says."""


class CheckpointError(DrumlineError):
    """A checkpoint that is damaged, missing or of another run."""


class MissingExtraError(DrumlineError):
    """A feature whose optional dependency is not installed."""

    def __init__(self, feature: str, *, extra: str) -> None:
        super().__init__(f"{feature} needs a package that is not installed", fix=f"pip install 'drumline[{extra}]'")


class TrainingError(DrumlineError):
    """A run that cannot go on: its numbers are no longer finite."""

    exit_code = EXIT_FAILED
    code = "training"


class RunLostError(DrumlineError):
    """A rank died of something that is not the user's mistake. It names the rank and its host."""

    exit_code = EXIT_FAILED
    code = "rank_failed"


class PeersLostError(RunLostError):
    """Ranks died because others did, and which of those was the first is not known here."""

    code = "peers_lost"
