"""Text is encoded ahead, by a few threads, and comes back in order; how much at once is limited, and so is memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from drumline.data import Batch

ENCODING_BYTES = 4 << 20
"""Limit of text being encoded: each byte takes 30 to 120 bytes of memory, more for longer documents."""
ENCODERS = 4
"""Threads that pass batches to the library, which may itself use all cores; several, so that no core idles."""


def encoded_ahead(
    batches: Iterable[Batch], encode: Callable[[Sequence[str]], Sequence[Any]]
) -> Generator[tuple[Batch, Sequence[Any]]]:
    """Encoded batches in order, encoded ahead, but never more than ENCODING_BYTES of text."""
    ahead: deque[tuple[Batch, Future[Sequence[Any]]]] = deque()
    with ThreadPoolExecutor(ENCODERS, thread_name_prefix="encoder") as encoders:
        try:
            for batch in batches:
                while ahead and sum(each.text_bytes for each, _ in ahead) + batch.text_bytes > ENCODING_BYTES:
                    first, ids = ahead.popleft()
                    yield first, ids.result()
                texts = [document.text for _, document in batch.documents]
                ahead.append((batch, encoders.submit(encode, texts)))
            for batch, ids in ahead:
                yield batch, ids.result()
        finally:
            encoders.shutdown(cancel_futures=True)
