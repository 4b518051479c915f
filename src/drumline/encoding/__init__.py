"""Much text -> tokens, fast: what comes out is what the tokenizers library and plain reading give.

`parts`: text is encoded in parts, by one process or several, and goes on where a killed one was. `stretches`: which
documents a process takes; `journal`: the folder that they share; `joining`: the parts become the result; `workers`:
more processes. `sampling` and `learning`: the tokenizer, from a sample of all of the text. `fast`: encoding by
gigatoken, checked against tokenizers on a sample of the text; `ahead`: by threads. `unpacking`: compressed files are
unpacked ahead, by threads; `kept`: and not twice.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.encoding.fast import FastTokenizer
    from drumline.encoding.parts import prepared_in_parts
    from drumline.encoding.unpacking import unpacked_ahead

__getattr__, __dir__, __all__ = public(__name__, __file__)
