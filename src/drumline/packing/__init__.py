"""Documents -> windows of whole documents.

best_fit: which lengths share a window, from how many documents have each length. index: which documents do, computed
once and stored beside the tokens. tokens: a token file that is read by that index; batches: of a step, with the loss as
the mean over the tokens that count.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.packing.batches import PackedBatches, make_batches
    from drumline.packing.index import Index, open_index
    from drumline.packing.tokens import PackedTokens, packed, packed_batch

__getattr__, __dir__, __all__ = public(__name__, __file__)
