"""Text -> tokens -> batches."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.data.batches import (
        SHORTER,
        Batches,
        BatchPlan,
        DatasetBatches,
        TokenBatches,
        mix,
        plan_batches,
        window_batch,
    )
    from drumline.data.manifest import MANIFEST, TOKENIZER, FileRecord, read_manifest
    from drumline.data.preparing import Prepared, Progress, ProgressCallback, prepare
    from drumline.data.tokenizer import StreamDecoder, Tokenizer
    from drumline.data.tokens import TokenFile, is_tokens, open_tokens
    from drumline.data.training_data import Data, open_data

__getattr__, __dir__, __all__ = public(__name__, __file__)
