"""Faults injected into a run -> proof that no work was lost.

drill: a seeded schedule of faults, and the comparison with a reference run without faults. faults: how each fault is
injected, and which events must follow. run: the run's processes, events and progress.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.drill.drill import COLUMNS, DrillConfig, conclusion, fault_rows, parse_faults, run_drill

__getattr__, __dir__, __all__ = public(__name__, __file__)
