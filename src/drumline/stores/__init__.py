"""Object stores <-> tokens and checkpoints.

urls: which URLs are stores, and how they are written without secrets. client: objects of a store, read by range and
written, with timeouts and retries. access: credentials and addresses, from the usual variables and files alone.
Tokens: mirror is the local folder of a prepared one, tokens reads what is large in parts, cache keeps these on a disk,
ahead makes the batches of the steps to come, working has the threads for both.
Checkpoints: of_run is a run in a store, uploading what a run does with it, fetching how another machine goes on from
it, keeping which of its checkpoints are kept, and lists them.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.stores.ahead import read_ahead
    from drumline.stores.client import Store, open_store
    from drumline.stores.fetching import fetched
    from drumline.stores.keeping import stored_checkpoints
    from drumline.stores.mirror import facts_of_stored, in_stores, mirrored, open_split
    from drumline.stores.of_run import check_writable, stored_in
    from drumline.stores.tokens import packed_batch
    from drumline.stores.uploading import uploads_of_run
    from drumline.stores.urls import check_url, is_store, without_secrets

__getattr__, __dir__, __all__ = public(__name__, __file__)
