"""Several prepared folders with weights -> the batches of one run.

settings -> folders that belong together: `opening`. Position -> source and item: `schedule`; step -> batch: `batches`
step -> loss per source: `losses`; validation: `evaluation`. Tokens seen and left: `showing`
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.mixes.batches import MixBatches
    from drumline.mixes.evaluation import MixEvaluation, evaluate_mix
    from drumline.mixes.opening import Mix, MixTokens, Source, checked_mix, open_mix
    from drumline.mixes.schedule import BLOCK, Schedule
    from drumline.mixes.showing import evaluate_run_mix, folder_rows, run_rows

__getattr__, __dir__, __all__ = public(__name__, __file__)
