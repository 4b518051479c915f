"""A run's state <-> disk and memory.

checkpoints: the format on disk, atomic and verified. storage: its tensors as safetensors files. state: the tensors of
a run. saver: saves in the background (parts: by several ranks, many files at once; trouble: when a disk fails;
in_memory: copies on a GPU, and snapshots; retention: which are kept). resuming: whether there is something to resume
from; restoring: how. export: a checkpoint as one .pt file. commands: what `drumline checkpoint` does.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.checkpoint.checkpoints import Checkpoint, RunState, checkpoint_paths, commit, open_checkpoint
    from drumline.checkpoint.commands import (
        Listed,
        export_checkpoint,
        list_checkpoints,
        prune_checkpoints,
        set_aside_checkpoints,
        verify_checkpoints,
    )
    from drumline.checkpoint.export import carried, open_single_file
    from drumline.checkpoint.in_memory import snapshots_of
    from drumline.checkpoint.newest import is_damage, is_part, newest_readable, newest_valid, set_aside, valid_ones
    from drumline.checkpoint.restoring import check_same_run, load, load_shares, read_weights, resume
    from drumline.checkpoint.resuming import check_resume, find_snapshots, has_begun, snapshot_folder, what_to_resume
    from drumline.checkpoint.retention import Retention, reasons, step_of, valid_loss
    from drumline.checkpoint.saver import Saver
    from drumline.checkpoint.state import weights, weights_fingerprint, weights_sha256
    from drumline.checkpoint.storage import DTYPES

__getattr__, __dir__, __all__ = public(__name__, __file__)
