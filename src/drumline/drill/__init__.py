"""A run broken on purpose -> proof that nothing was lost."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.drill.drill import COLUMNS as COLUMNS
    from drumline.drill.drill import DrillConfig as DrillConfig
    from drumline.drill.drill import conclusion as conclusion
    from drumline.drill.drill import fault_rows as fault_rows
    from drumline.drill.drill import parse_faults as parse_faults
    from drumline.drill.drill import run_drill as run_drill

__getattr__, __dir__, __all__ = public(__name__, __file__)
