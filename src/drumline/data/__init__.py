"""Text -> tokens -> batches."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.data.batches import SHORTER as SHORTER
    from drumline.data.batches import Batches as Batches
    from drumline.data.batches import BatchPlan as BatchPlan
    from drumline.data.batches import DatasetBatches as DatasetBatches
    from drumline.data.batches import TokenBatches as TokenBatches
    from drumline.data.batches import mix as mix
    from drumline.data.batches import plan_batches as plan_batches
    from drumline.data.batches import window_batch as window_batch
    from drumline.data.manifest import MANIFEST as MANIFEST
    from drumline.data.manifest import TOKENIZER as TOKENIZER
    from drumline.data.manifest import FileRecord as FileRecord
    from drumline.data.manifest import read_manifest as read_manifest
    from drumline.data.preparing import Prepared as Prepared
    from drumline.data.preparing import Progress as Progress
    from drumline.data.preparing import ProgressCallback as ProgressCallback
    from drumline.data.preparing import prepare as prepare
    from drumline.data.tokenizer import StreamDecoder as StreamDecoder
    from drumline.data.tokenizer import Tokenizer as Tokenizer
    from drumline.data.tokens import TokenFile as TokenFile
    from drumline.data.tokens import is_tokens as is_tokens
    from drumline.data.tokens import open_tokens as open_tokens
    from drumline.data.training_data import Data as Data
    from drumline.data.training_data import open_data as open_data

__getattr__, __dir__, __all__ = public(__name__, __file__)
