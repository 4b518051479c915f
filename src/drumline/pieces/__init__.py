"""Tensors <-> the rows of them that each rank has.

rows: which rows are where, and the names of pieces. stored: tensors in files or memory, whole or in pieces, read row by
row; folders: those of a checkpoint. planning: who writes which piece, and who sends which rows to whom. moving: sends
them.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.pieces.folders import read_tensors, reading, stored_in, stored_shapes
    from drumline.pieces.moving import Here, exchange, fill_own
    from drumline.pieces.planning import divide, own_pieces, without_writer
    from drumline.pieces.rows import in_pieces, is_spread, local_part, room_like, spread_of
    from drumline.pieces.stored import Shapes, Stored, check_begins, merged, shapes_as_json, shapes_from_json

__getattr__, __dir__, __all__ = public(__name__, __file__)
