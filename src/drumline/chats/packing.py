"""Whole conversations side by side in windows.

A window has as many conversations, in their order, as fit; the rest of it is padding. A conversation that is longer
than a window is read in windows that overlap by half, in which each token counts once: it is predicted from at least
half a context, or from all that comes before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drumline.chats.templates import ENDS, PASSED
from drumline.data import CheckedTokens, TokenFile, read_manifest
from drumline.errors import DataError
from drumline.files import PartHashes, Parts


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens start..stop-1 of a file, of which those before `fresh` count in another window."""

    start: int
    stop: int
    fresh: int


@dataclass(frozen=True)
class ChatTokens(CheckedTokens):
    """Conversations, with what each token is as a target. Both are compared with what was prepared when first read."""

    packer: ClassVar[str] = "chats"
    target_parts: Parts | None = None
    targets_sha256: str = ""
    _packed: dict[int, list[list[Segment]]] = field(default_factory=dict, repr=False, compare=False)

    def read_targets(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """What tokens start..stop-1 are as targets: uint8 (stop - start,)."""
        assert self.targets is not None
        if self.target_parts is not None:
            self.target_parts.check(start, stop)
        return np.array(self.targets[start:stop])

    def windows(self, context: int) -> int:
        return len(self.packed(context))

    def packed(self, context: int) -> list[list[Segment]]:
        """The segments of each window of `context` tokens and the target of the last."""
        if context not in self._packed:
            self._packed[context] = self._pack(context + 1)
        return self._packed[context]

    def _pack(self, size: int) -> list[list[Segment]]:
        assert self.document_ends is not None
        windows: list[list[Segment]] = []
        start, left = 0, 0
        for stop in self.document_ends.tolist():
            if stop - start > size:
                windows += [[part] for part in self._parts(start, stop, size)]
                left = 0
            else:
                if stop - start > left:
                    windows.append([])
                    left = size
                windows[-1].append(Segment(start, stop, start))
                left -= stop - start
            start = stop
        return windows

    def _parts(self, start: int, stop: int, size: int) -> list[Segment]:
        """A long conversation in parts of `size` tokens, without those in which nothing counts."""
        parts, end = [Segment(start, start + size, start)], start + size
        while end < stop:
            first = min(end - size // 2, stop - size)
            parts.append(Segment(first, first + size, end))
            end = first + size
        return [part for part in parts if self.read_targets(part.fresh, part.stop).any()]

    def counted(self, windows: Sequence[int], *, context: int) -> int:
        """Targets that count in some windows."""
        packed = self.packed(context)
        return sum(int(np.count_nonzero(_targets(self, part))) for window in windows for part in packed[window])


def chat_tokens(file: TokenFile, path: Path, hashes: PartHashes, target_hashes: PartHashes) -> ChatTokens:
    """Conversations of a prepared folder. path: of the targets; hashes: of the parts of both files"""
    targets = np.memmap(path, dtype=np.uint8, mode="r")
    if len(targets) != len(file):
        raise DataError(
            f"{path} has {len(targets)} bytes, but {file.path.name} has {len(file)} tokens",
            fix=f"remove {path.parent} and run drumline prepare again",
        )
    parts = Parts(path, targets.data, target_hashes)
    parts.check_some()
    # How many bits the answers take per byte of all messages would say nothing.
    silent = replace(file, targets=targets, text_bytes=None)
    sha256 = read_manifest(path.parent).files[path.name].sha256
    return ChatTokens.of(silent, hashes, target_parts=parts, targets_sha256=sha256)


def _targets(tokens: ChatTokens, part: Segment) -> npt.NDArray[np.uint8]:
    targets = tokens.read_targets(part.start, part.stop)
    targets[: max(1, part.fresh - part.start)] = PASSED  # nothing comes before the first token
    return targets


def packed_batch(
    tokens: Any, windows: Sequence[int], *, context: int, end_of_text: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Windows as (inputs, targets, document ids), each int64 (B, T); targets that do not count are -100.

    tokens: ChatTokens; end_of_text: there are always document ids, whatever is given
    """
    shape = (len(windows), context + 1)
    ids = np.full(shape, tokens.end_of_text, dtype=np.int64)
    targets = np.full(shape, -100, dtype=np.int64)
    documents = np.zeros(shape, dtype=np.int64)
    for row, window in enumerate(windows):
        place = 0
        for number, part in enumerate(tokens.packed(context)[window], start=1):
            here = slice(place, place + part.stop - part.start)
            kinds = _targets(tokens, part)
            ids[row, here] = tokens.read(part.start, part.stop)
            targets[row, here] = np.where(kinds == ENDS, tokens.end_of_text, ids[row, here])
            targets[row, here][kinds == PASSED] = -100
            documents[row, place:] = number - 1
            place = here.stop
            documents[row, place:] = number  # the next conversation, or padding
    block = [torch.from_numpy(each) for each in (ids, targets, documents)]
    return block[0][:, :-1].contiguous(), block[1][:, 1:].contiguous(), block[2][:, :-1].contiguous()
