"""Text -> batches of tokens.

text -> documents: `sources` (builtin, plain files), `file_sources`, `other_sources`, `structured_files`, `cutting`
documents -> train and valid: `corpus`. Documents -> a folder of tokens: `tokenizer`, `preparing`, `tokens`
folder -> batches: `opening` (checks what is on disk; `foreign`: of other trainers), `of_run` (of a run that is used
again), `batches` (for a step)
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.data.batches import Batches, BatchPlan, TokenBatches, mix, plan_batches, visits, window_batch
    from drumline.data.corpus import Corpus, Labelled, utf8_bytes
    from drumline.data.of_run import check_samples, with_token_facts
    from drumline.data.opening import STORE, CheckedTokens, document_names, open_tokens, read_manifest, targets_file
    from drumline.data.other_sources import check_sources, data_note, source_files
    from drumline.data.preparing import Data, Prepared, Progress, ProgressCallback, Recipe, open_data, prepare

    # isort: split
    # What writes a prepared folder, for text that is encoded in parts.
    from drumline.data.preparing import Batch, Meter, existing, finished, in_batches, write_splits, written
    from drumline.data.sources import Document, Reading, Skipped, documents, no_documents, read_file
    from drumline.data.structured_files import read_lines
    from drumline.data.tokenizer import END_OF_TEXT, SMALLEST_VOCAB, EncoderError, Tokenizer
    from drumline.data.tokens import MANIFEST, TOKENIZER, FileRecord, Manifest, TokenFile, TokenWriter, is_tokens

    # isort: split
    from drumline.data.tokens import SplitRecord, token_dtype

__getattr__, __dir__, __all__ = public(__name__, __file__)
