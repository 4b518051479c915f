"""What a check of a machine or a network found, in one line, with what to type against it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "warning", "failed"]
UNWRITABLE = "unwritable"
"""The run folder, or the folder that it would lie in, cannot be written."""
VARIABLE = "variable"
"""An environment variable, whose name is the check."""
_GRAVITY: tuple[State, ...] = ("ok", "warning", "failed")


@dataclass(frozen=True)
class Finding:
    """One check and its outcome."""

    check: str
    """What was looked at, in a word or two: "disk", "port 29500"."""
    state: State
    what: str
    """What was found, with the numbers, in one line."""
    fix: str = ""
    """The exact line to type; for anything that is not ok."""
    host: str = ""
    """The host that it is about and where the fix is typed; empty: the machine that was asked."""
    code: str = ""
    """UNWRITABLE or VARIABLE, for programs, which must not depend on words; empty: none of these."""

    @property
    def sentence(self) -> str:
        """The check and what was found; of a variable the check is the subject: "MASTER_PORT is ..."."""
        return f"{self.check}{' ' if self.code == VARIABLE else ': '}{self.what}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def worst(findings: Iterable[Finding]) -> State:
    """The gravest state among them."""
    return max((finding.state for finding in findings), key=_GRAVITY.index, default="ok")
