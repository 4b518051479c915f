"""Errors for people: what is wrong, with the numbers, and what to do about it.

The command line prints a DrumlineError as two lines and exits 1; any other exception is a bug and keeps its traceback.
"""


class DrumlineError(Exception):
    """Something the user can mend. `fix` says how, ideally as the line to type."""

    def __init__(self, problem: str, *, fix: str) -> None:
        super().__init__(f"{problem}\n{fix}")
        self.problem = problem
        self.fix = fix


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
