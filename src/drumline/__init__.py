"""drumline: train GPT-class language models with PyTorch, from raw text to a model that writes.

Public names are imported when they are first used, so that `import drumline` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drumline.config.settings import GPTConfig as GPTConfig
    from drumline.config.settings import TrainConfig as TrainConfig
    from drumline.errors import DrumlineError as DrumlineError
    from drumline.model.gpt import GPT as GPT
    from drumline.train.pretraining import pretrain as pretrain
    from drumline.data.tokenizer import Tokenizer as Tokenizer
    from drumline.train.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOMES = {
    "DrumlineError": "errors",
    "GPT": "model",
    "GPTConfig": "config",
    "Tokenizer": "tokenizer",
    "TrainConfig": "config",
    "Trainer": "trainer",
    "pretrain": "pretrain",
}
__all__ = ["GPT", "DrumlineError", "GPTConfig", "Tokenizer", "TrainConfig", "Trainer", "pretrain"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'drumline' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"drumline.{_HOMES[name]}"), name)
    globals()[name] = value  # importing drumline.train.pretraining binds the module to that name: put the function there
    return value
