"""Names that are imported on first use, so that `import drumline` and `--help` do not load torch.

A room's `__init__` lists its public names as imports under `if TYPE_CHECKING:`, which type checkers and readers see:

    if TYPE_CHECKING:
        from drumline.checkpoint import Saver

    __getattr__, __dir__, __all__ = public(__name__, __file__)

and `from drumline.checkpoint import Saver` imports saver.py at that moment, and nothing else of the room.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def public_names(source: str) -> dict[str, str]:
    """Name -> the module it is imported from, of the imports under `if TYPE_CHECKING:`."""
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}


def public(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """__getattr__, __dir__ and __all__ of a package that imports its public names on first use."""
    homes = public_names(Path(file).read_text(encoding="utf-8"))

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)  # no lookup the next time
        return value

    return get, lambda: sorted(homes), sorted(homes)


def room(name: str) -> Any:
    """A room that comes later in the import order, loaded on demand."""
    return importlib.import_module(f"drumline.{name}")
