"""Models <-> the files of Hugging Face, from which other programs load them.

families: which class of transformers is which GPT; tensors: what each tensor is there. exporting: a run -> a folder
(weights: safetensors, one tensor at a time; companions: what lies beside them; card: README.md; comparing: the same
logits as ours). importing: a model from elsewhere -> a run (sources: folders, names on the hub, nanoGPT's ckpt.pt;
reading_config: its config.json as settings); loading: in use without a run.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.huggingface.exporting import Exported, export_run
    from drumline.huggingface.families import FAMILIES, export_note, native_family
    from drumline.huggingface.importing import begin_again, import_model, started_from, with_architecture
    from drumline.huggingface.loading import load_model

__getattr__, __dir__, __all__ = public(__name__, __file__)
