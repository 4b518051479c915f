"""A command line -> one call."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.cli.app import main, run_command

__getattr__, __dir__, __all__ = public(__name__, __file__)
