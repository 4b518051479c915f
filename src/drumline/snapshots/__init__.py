"""A run's state <-> memory that outlives its process.

So a dead rank costs a few steps and no disk I/O. memory: reserved before it is used, pinned for a GPU. layout: tensors
in one piece of it. copies: of the state, on the GPU first (sums: checksums there). slots: sealed when complete, and
verified before use. folder: the slots of a host. collecting: a state that is spread over hosts. remote: copies on
other hosts. schedule: when a snapshot is due. taking: all of that while a run trains.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.snapshots.collecting import Collected, collected, ranks_by_host
    from drumline.snapshots.copies import Copies, Staging, has_room
    from drumline.snapshots.folder import Snapshot, Snapshots, free_in, slots_bytes
    from drumline.snapshots.layout import Layout
    from drumline.snapshots.remote import Remote, route
    from drumline.snapshots.taking import Taker

__getattr__, __dir__, __all__ = public(__name__, __file__)
