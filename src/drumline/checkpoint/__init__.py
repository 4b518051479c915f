"""A run's state <-> disk and memory."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.checkpoint.checkpoints import (
        RunState,
        checkpoint_paths,
        load,
        newest_valid,
        open_checkpoint,
        valid_ones,
        weights,
        weights_sha256,
    )
    from drumline.checkpoint.commands import (
        Listed,
        export_checkpoint,
        list_checkpoints,
        prune_checkpoints,
        verify_checkpoints,
    )
    from drumline.checkpoint.resuming import check_resume, resume, what_to_resume
    from drumline.checkpoint.retention import Retention
    from drumline.checkpoint.saver import Saver
    from drumline.checkpoint.snapshots import Snapshots

__getattr__, __dir__, __all__ = public(__name__, __file__)
