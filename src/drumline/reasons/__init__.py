"""A run's steps, computed again -> why they were as they were.

runs: a run as a pure function: its config, data, checkpoints and records, only read. again: trains from a checkpoint
to a step once more, in a temporary copy. probing: one step, tensor by tensor. documents, blaming: the text of a step,
and its losses. replaying: records against what is computed now. differing: two runs.
skipping: documents that are left out.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.reasons.again import end_early
    from drumline.reasons.blaming import Blamed, batches_of, blame, chosen, recomputed
    from drumline.reasons.differing import diff_runs
    from drumline.reasons.documents import Part, decoded
    from drumline.reasons.replaying import Replayed, replay
    from drumline.reasons.runs import PureRun, open_run, with_rollbacks
    from drumline.reasons.skipping import without_skipped, write_skip_list

__getattr__, __dir__, __all__ = public(__name__, __file__)
