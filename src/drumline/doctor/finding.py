"""The result of one check of a machine or a network, in one line, with the command that fixes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "warning", "failed"]
UNWRITABLE = "unwritable"
"""The run folder, or its parent folder, is not writable."""
VARIABLE = "variable"
"""An environment variable; its name is the check."""
_GRAVITY: tuple[State, ...] = ("ok", "warning", "failed")


@dataclass(frozen=True)
class Finding:
    """One check and its outcome."""

    check: str
    """What was checked, in a word or two: "disk", "port 29500"."""
    state: State
    what: str
    """What was found, with the numbers, in one line."""
    fix: str = ""
    """The exact command to type; for anything that is not ok."""
    host: str = ""
    """The host that this is about, where to run the fix; empty: this machine."""
    code: str = ""
    """UNWRITABLE or VARIABLE, for programs, which must not parse messages; empty: neither."""

    @property
    def sentence(self) -> str:
        """The check and what was found. For a variable, its name is the subject: "MASTER_PORT is ..."."""
        return f"{self.check}{' ' if self.code == VARIABLE else ': '}{self.what}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def worst(findings: Iterable[Finding]) -> State:
    """The worst state among the findings."""
    return max((finding.state for finding in findings), key=_GRAVITY.index, default="ok")
