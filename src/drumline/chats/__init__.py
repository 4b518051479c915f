"""Conversations -> tokens, and which of them count.

templates: messages as a prompt, and as a text to train on; the one place that knows what a conversation looks like.
rows: rows of a file, checked. preparing: their tokens in a folder. packing: whole conversations side by side in
windows; batches: of a step, with the loss over the assistant's tokens.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.chats.batches import ChatBatches, make_batches
    from drumline.chats.packing import ChatTokens, chat_tokens, packed_batch
    from drumline.chats.preparing import chat_recipe, keep_style
    from drumline.chats.templates import ROLES, STYLE, ChatStyle, ChatTemplate

__getattr__, __dir__, __all__ = public(__name__, __file__)
