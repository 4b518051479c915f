"""A run broken on purpose -> proof that nothing was lost."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.drill.drill import COLUMNS, DrillConfig, conclusion, fault_rows, parse_faults, run_drill

__getattr__, __dir__, __all__ = public(__name__, __file__)
