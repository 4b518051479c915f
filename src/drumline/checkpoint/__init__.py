"""A run's state <-> disk and memory."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.checkpoint.checkpoints import RunState as RunState
    from drumline.checkpoint.checkpoints import checkpoint_paths as checkpoint_paths
    from drumline.checkpoint.checkpoints import load as load
    from drumline.checkpoint.checkpoints import newest_valid as newest_valid
    from drumline.checkpoint.checkpoints import open_checkpoint as open_checkpoint
    from drumline.checkpoint.checkpoints import valid_ones as valid_ones
    from drumline.checkpoint.checkpoints import weights as weights
    from drumline.checkpoint.checkpoints import weights_sha256 as weights_sha256
    from drumline.checkpoint.commands import Listed as Listed
    from drumline.checkpoint.commands import export_checkpoint as export_checkpoint
    from drumline.checkpoint.commands import list_checkpoints as list_checkpoints
    from drumline.checkpoint.commands import prune_checkpoints as prune_checkpoints
    from drumline.checkpoint.commands import verify_checkpoints as verify_checkpoints
    from drumline.checkpoint.resuming import check_resume as check_resume
    from drumline.checkpoint.resuming import resume as resume
    from drumline.checkpoint.resuming import what_to_resume as what_to_resume
    from drumline.checkpoint.retention import Retention as Retention
    from drumline.checkpoint.saver import Saver as Saver
    from drumline.checkpoint.snapshots import Snapshots as Snapshots

__getattr__, __dir__, __all__ = public(__name__, __file__)
