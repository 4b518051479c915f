"""Sources read in a line: their documents, their texts, or the error that reading raises."""

from collections.abc import Iterator
from typing import Any

import pytest

from drumline.data import sources
from drumline.data.sources import Document, Reading
from drumline.errors import DataError


def documents(source: str, *, split: str = "train", **options: Any) -> Iterator[Document]:
    return sources.documents(str(source), Reading(**options), split=split)


def texts(source: str, **options: Any) -> list[str]:
    return [document.text for document in documents(source, **options)]


def refused(source: str, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        list(documents(source, **options))
    return caught.value
