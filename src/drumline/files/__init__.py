"""Atomic files, the run folder and who holds it."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.files.disk import LineFile, Lock, PostponedError, file_sha256, flush, replace_text
    from drumline.files.journal import Journal
    from drumline.files.run_folder import CHECKPOINT_PREFIX, RunFolder
    from drumline.files.runs import choose_folder, stored_config

__getattr__, __dir__, __all__ = public(__name__, __file__)
