"""Files that are whole or not there -> the folder of a run.

disk: replace, append lines, flush, hash and lock files. run_folder: what lies where in a run's folder, its status, and
the lock that keeps a second process out. journal: what happens to a run, for events.jsonl and status.json. runs: which
folder a new run takes, what a run was started with, and how it stands.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.files.disk import LineFile, Lock, PostponedError, file_sha256, flush, replace_text
    from drumline.files.events import EVENTS, publish
    from drumline.files.journal import Journal
    from drumline.files.run_folder import CHECKPOINT_PREFIX, RunFolder, choose_folder
    from drumline.files.runs import run_folders, run_state, stored_config

__getattr__, __dir__, __all__ = public(__name__, __file__)
