"""Atomic files, the run folder and who holds it."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.files.disk import LineFile as LineFile
    from drumline.files.disk import Lock as Lock
    from drumline.files.disk import PostponedError as PostponedError
    from drumline.files.disk import file_sha256 as file_sha256
    from drumline.files.disk import flush as flush
    from drumline.files.disk import replace_text as replace_text
    from drumline.files.run_folder import CHECKPOINT_PREFIX as CHECKPOINT_PREFIX
    from drumline.files.run_folder import RunFolder as RunFolder
    from drumline.files.runs import choose_folder as choose_folder
    from drumline.files.runs import stored_config as stored_config

__getattr__, __dir__, __all__ = public(__name__, __file__)
