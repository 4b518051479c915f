"""Text -> batches of tokens.

text -> documents: `sources` (kinds of sources), `text_files` (plain text); `other_sources`, `structured_files`
documents -> train and valid: `corpus`. Documents -> a folder of tokens: `tokenizer`, `preparing`, `tokens`
folder -> batches: `opening` (checks what is on disk), `of_run` (of a run that is used again), `batches` (for a step)
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.data.batches import Batches, BatchPlan, TokenBatches, mix, plan_batches, visits, window_batch
    from drumline.data.corpus import Corpus, Labelled
    from drumline.data.of_run import with_token_facts
    from drumline.data.opening import CheckedTokens, document_names, open_tokens, read_manifest, targets_file
    from drumline.data.other_sources import check_sources, data_note
    from drumline.data.preparing import Data, Prepared, Progress, ProgressCallback, Recipe, open_data, prepare
    from drumline.data.sources import documents
    from drumline.data.text_files import Document, Reading, Skipped
    from drumline.data.tokenizer import EncoderError, Tokenizer
    from drumline.data.tokens import MANIFEST, TOKENIZER, FileRecord, TokenFile, TokenWriter, is_tokens

__getattr__, __dir__, __all__ = public(__name__, __file__)
