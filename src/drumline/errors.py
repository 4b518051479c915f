"""User-facing errors: what is wrong, with the numbers, and how to fix it.

The command line prints a DrumlineError as two lines and exits 1; any other exception is a bug and keeps its traceback.
"""

from collections.abc import Sequence
from typing import Any

EXIT_USER, EXIT_USAGE, EXIT_FAILED, EXIT_STOPPED, EXIT_INTERRUPTED = 1, 2, 3, 75, 130
EXIT_CRASHED = 70
"""A rank that exited with an exception other than a DrumlineError: worth a restart."""
EXIT_CODES = (EXIT_USER, EXIT_USAGE, EXIT_FAILED, EXIT_STOPPED, EXIT_INTERRUPTED)
"""1 user error, 2 invalid command line, 3 the run failed, 75 stopped with everything saved, 130 without."""


class DrumlineError(Exception):
    """An error that the user can fix. `fix` says how, ideally as the command to type.

    details:  lines of a table, if one sentence is not enough
    reported: whether another rank reports it, so that an error is not printed by every process
    """

    exit_code = EXIT_USER
    code = "user"
    """The kind of error, for programs: messages may change."""

    def __init__(self, problem: str, *, fix: str, details: Sequence[str] = (), reported: bool = False) -> None:
        super().__init__("\n".join((problem, *details, fix)))
        self.problem = problem
        self.fix = fix
        self.details = tuple(details)
        self.reported = reported

    def as_dict(self) -> dict[str, Any]:
        return {"code": self.code, "problem": self.problem, "details": list(self.details), "fix": self.fix}


class ConfigError(DrumlineError):
    """A setting, or a combination of settings, that cannot work."""


class UsageError(ConfigError):
    """A command line or config file with a name in it that drumline does not know."""

    exit_code = EXIT_USAGE


class DataError(DrumlineError):
    """Text or tokens that cannot be read, or do not match their manifest."""


class CheckpointError(DrumlineError):
    """A checkpoint that is damaged, missing or from another run."""


class MissingExtraError(DrumlineError):
    """A feature whose optional dependency is not installed."""

    def __init__(self, feature: str, *, extra: str) -> None:
        super().__init__(f"{feature} needs a package that is not installed", fix=f"pip install 'drumline[{extra}]'")


class TrainingError(DrumlineError):
    """A run that cannot continue: NaN or Inf."""

    exit_code = EXIT_FAILED
    code = "training"


class RunLostError(DrumlineError):
    """A rank died of something that is not a user error. Names the rank and its host."""

    exit_code = EXIT_FAILED
    code = "rank_failed"


class PeersLostError(RunLostError):
    """Ranks died because others did, and the first of those is unknown here."""

    code = "peers_lost"
