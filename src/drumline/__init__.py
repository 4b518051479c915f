"""drumline: train GPT-class language models with PyTorch, from raw text to a model that writes.

Public names are imported when they are first used, so that `import drumline` does not import torch.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.config import GPTConfig as GPTConfig
    from drumline.config import TrainConfig as TrainConfig
    from drumline.data import Tokenizer as Tokenizer
    from drumline.errors import DrumlineError as DrumlineError
    from drumline.model import GPT as GPT
    from drumline.model import GPTLike as GPTLike
    from drumline.model import GPTModel as GPTModel
    from drumline.trainer import Callback as Callback
    from drumline.trainer import Trainer as Trainer
    from drumline.trainer import pretrain as pretrain

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = public(__name__, __file__)
