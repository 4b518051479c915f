"""A token file that is read in windows of whole documents.

A document is predicted from an end-of-text token on, as when a model writes one or is scored on one: the inputs of a
segment are the tokens before its targets, of which the first is the end of another document. So every token counts
once, and a document takes as much of a window as it has tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drumline.config import TrainConfig
from drumline.data import Data, ProgressCallback, TokenFile
from drumline.errors import ConfigError, DataError
from drumline.packing.index import Index, open_index


@dataclass(frozen=True, kw_only=True)
class PackedTokens(TokenFile):
    """Tokens of whichever kind, with an index."""

    packer: ClassVar[str] = "packing"
    source: TokenFile
    index: Index

    def __len__(self) -> int:
        return len(self.source)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        return self.source.read(start, stop)

    def windows(self, context: int) -> int:
        if context != self.index.about.context:
            raise DataError(
                f"{self.path} is packed for a context of {self.index.about.context}, not of {context}",
                fix="use that context, or tokens that are not packed",
            )
        return self.index.about.windows

    def counted(self, windows: Sequence[int], *, context: int) -> int:
        """Targets in some windows."""
        return sum(length for window in windows for _, length in self.index.segments(window))


def packed(config: TrainConfig, data: Data, progress: ProgressCallback | None) -> Data:
    """The data of a run with --packing best_fit. Its validation data stay a stream: losses can be compared."""
    if isinstance(data.train, PackedTokens):
        return data
    if data.mix is not None:
        raise ConfigError(
            f"--packing best_fit is for one folder of tokens, and {config.data.train_data_path} is a mix",
            fix="drop --packing, or prepare the texts together",
        )
    assert config.model.context is not None
    folder = Path(config.data.data_dir)
    index = open_index(data.train, context=config.model.context, other_folder=folder, progress=progress)
    train: dict[str, Any] = {each.name: getattr(data.train, each.name) for each in fields(TokenFile)}
    tokens = PackedTokens(**train, source=data.train, index=index)
    return replace(data, train=tokens, note=f"{data.note}; {index.about.line()}")


def packed_batch(
    tokens: PackedTokens, windows: Sequence[int], *, context: int, end_of_text: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Windows as (inputs, targets, document ids), each int64 (B, T); padding has targets of -100.

    end_of_text: None: without document ids
    """
    assert tokens.end_of_text is not None
    inputs = np.full((len(windows), context), tokens.end_of_text, dtype=np.int64)
    targets = np.full_like(inputs, -100)
    documents = np.zeros_like(inputs)
    for row, window in enumerate(windows):
        place = 0
        for number, (start, length) in enumerate(tokens.index.segments(window)):
            read = tokens.read(max(0, start - 1), start + length)
            stop = place + length
            targets[row, place:stop] = read[-length:]
            inputs[row, stop - len(read) + 1 : stop] = read[:-1]  # one less at the start of the file
            documents[row, place:] = number
            place = stop
        documents[row, place:] += 1  # padding
    block = [torch.from_numpy(each) for each in (inputs, targets, documents)]
    return block[0], block[1], None if end_of_text is None else block[2]
