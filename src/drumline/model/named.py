"""The GPT by the names that tutorials give it."""

from __future__ import annotations

from drumline.config import GPTConfig
from drumline.model.gpt import GPT

GPTModel = GPT
"""GPTModel(GPTConfig(...)): the same class."""


class GPTLike(GPT):
    """A small GPT by its sizes, of the family of GPT-2. `GPT(GPTConfig(...))` has all options."""

    def __init__(
        self,
        vocab_size: int,
        block_size: int = 128,
        *,
        n_layers: int = 4,
        n_heads: int = 4,
        d_model: int = 256,
        d_ff: int | None = None,
        dropout: float = 0.1,
    ) -> None:
        """block_size: maximum sequence length, in tokens; d_ff: 4 x d_model if it is None"""
        super().__init__(
            GPTConfig(
                vocab_size=vocab_size,
                max_position_embeddings=block_size,
                n_layers=n_layers,
                n_heads=n_heads,
                d_model=d_model,
                d_ff=d_ff or 4 * d_model,
                dropout=dropout,
            )
        )
