"""Atomic files -> the run folder.

disk: replace, append lines, flush, hash and lock files. run_folder: the layout of a run folder, its status, and the
lock that keeps a second process out (undoing: a run that is refused leaves it as it was). journal: events.jsonl and
status.json. runs: which folder a new run takes, its stored config, and its state. stalls: what saves and snapshots cost
a run. streams: closed standard streams. private: what others may have prepared, and is not used. trust: which code a
run's config may name. direct: large files past the page cache. verified: files that are compared with their hashes.
control_groups: what a container allows a run to take.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.files.control_groups import read_limits, room_in_container
    from drumline.files.direct import sha256_on_disk, write_direct
    from drumline.files.disk import LineFile, Lock, file_sha256, flush, replace_text
    from drumline.files.events import publish
    from drumline.files.journal import EVENTS, Journal, now
    from drumline.files.private import is_own_folder, make_private, refuse_links, refuse_pipes
    from drumline.files.run_folder import CHECKPOINT_PREFIX, RunFolder, choose_folder
    from drumline.files.runs import (
        is_unfinished,
        numbered_folder,
        numbered_folders,
        origin,
        run_folders,
        run_of,
        run_state,
        stored_config,
        stored_settings,
    )
    from drumline.files.stalls import stalled_share
    from drumline.files.streams import forget_stdout, open_closed_streams, stdout_is_unread
    from drumline.files.trust import CODE, DATA, STORE, check_code
    from drumline.files.verified import LARGE_PART_BYTES, PartHashes, Parts, hash_parts, parts_file, sampled, verify

__getattr__, __dir__, __all__ = public(__name__, __file__)
