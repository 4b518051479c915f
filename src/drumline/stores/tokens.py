"""Tokens in a store: read in the parts that have hashes, many at a time, each compared with its hash."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from drumline.data import MANIFEST, TOKENIZER, Manifest, TokenFile, window_batch
from drumline.errors import DataError
from drumline.files import LARGE_PART_BYTES, PartHashes, parts_file
from drumline.stores.cache import PartCache
from drumline.stores.client import Store
from drumline.stores.mirror import fetched
from drumline.stores.working import readers, waited

_IN_MEMORY = 512
"""Parts that are kept in memory: windows that follow each other share parts."""
_AT_ONCE = 16
"""Parts that are next to each other are one request, up to so many."""
_TRIES = 3
"""How often a part is read that is not what its hash says."""
_LARGEST_LIST_BYTES = 1 << 30
"""Lists of documents (their ends, their names) are copied as a whole when they are needed, up to this size."""


class StoredParts:
    """The parts of a file, by number: from memory, from the cache, or from the store."""

    def __init__(self, folder: Path, manifest: Manifest, name: str, *, store: Store, most_bytes: int) -> None:
        self._folder, self._manifest, self._name, self._store = folder, manifest, name, store
        self._size = manifest.files[name].bytes
        self._cache, self._on_disk = PartCache(folder.parent.parent, most_bytes=most_bytes), folder / "parts" / name
        self._known: OrderedDict[int, Future[dict[int, bytes]]] = OrderedDict()
        self._lock, self._hashes_lock = threading.Lock(), threading.Lock()

    def ask(self, numbers: Iterable[int]) -> dict[int, Future[dict[int, bytes]]]:
        """Begin to read some parts; their futures, by number."""
        futures: dict[int, Future[dict[int, bytes]]] = {}
        missing: list[int] = []
        with self._lock:
            for number in sorted(set(numbers)):
                known = self._known.get(number)
                if known is not None and not (known.done() and known.exception()):  # what failed is asked for again
                    self._known.move_to_end(number)
                    futures[number] = known
                else:
                    missing.append(number)
            for group in _neighbours(missing):
                future = readers().submit(lambda group=group: self._fetched(group))  # type: ignore[misc]
                for number in group:
                    futures[number] = self._known[number] = future
            while len(self._known) > max(_IN_MEMORY, len(futures)):
                self._known.popitem(last=False)
        return futures

    def read(self, start: int, stop: int) -> bytes:
        """Bytes start..stop-1 of the file."""
        numbers = range(start // LARGE_PART_BYTES, -(-stop // LARGE_PART_BYTES))
        asked = self.ask(numbers)
        try:
            content = b"".join(waited(asked[number])[number] for number in numbers)
        except BaseException:
            with self._lock:  # the next one that needs them asks again
                for number in numbers:
                    self._known.pop(number, None)
            raise
        first = start - numbers.start * LARGE_PART_BYTES
        return content[first : first + stop - start]

    @cached_property
    def _hashes(self) -> PartHashes:
        path = fetched(self._folder, self._store, self._manifest, parts_file(self._name))
        expected, there = -(-self._size // LARGE_PART_BYTES) * 4, path.stat().st_size
        if there != expected:
            raise DataError(
                f"{self._store.url}/{path.name} has {there} bytes, but {self._name} needs {expected}", fix=_FIX
            )
        return PartHashes(np.memmap(path, dtype="<u4", mode="r"), LARGE_PART_BYTES)

    def _right(self, number: int, part: bytes) -> bool:
        with self._hashes_lock:
            hashes = self._hashes
        return hashes.is_right(number, part)

    def _fetched(self, group: Sequence[int]) -> dict[int, bytes]:
        parts = {}
        for number in group:
            part = self._cache.read(self._on_disk, number)
            part = part[: self._size - number * LARGE_PART_BYTES]
            if part and self._right(number, part):
                parts[number] = part
        for missing in _neighbours([number for number in group if number not in parts]):
            for number, part in zip(missing, self._checked(missing), strict=True):
                parts[number] = part
                self._cache.write(self._on_disk, number, part)
        return parts

    def _checked(self, group: Sequence[int]) -> list[bytes]:
        """Parts that are next to each other, from the store."""
        start, stop = group[0] * LARGE_PART_BYTES, min((group[-1] + 1) * LARGE_PART_BYTES, self._size)
        wrong = group[0]
        for _ in range(_TRIES):
            content = self._store.get_range(self._name, start, stop)
            parts = [content[at : at + LARGE_PART_BYTES] for at in range(0, len(content), LARGE_PART_BYTES)]
            bad = [number for number, part in zip(group, parts, strict=True) if not self._right(number, part)]
            if not bad:
                return parts
            wrong = bad[0]
        first = wrong * LARGE_PART_BYTES
        raise DataError(
            f"{self._store.url}/{self._name} is damaged or modified: its bytes {first:,} to "
            f"{min(first + LARGE_PART_BYTES, self._size):,} are not those that were prepared (read {_TRIES} times)",
            fix=_FIX,
        )


_FIX = "copy the folder that drumline prepare made to the store again"


def _neighbours(numbers: Sequence[int]) -> list[list[int]]:
    """Ascending numbers in groups of those that follow each other."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1 and len(groups[-1]) < _AT_ONCE:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


class _Plain(TokenFile):
    """Read one window after the other."""

    parts: StoredParts

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
        width = self.tokens.itemsize
        return np.frombuffer(self.parts.read(start * width, stop * width), dtype=self.tokens.dtype).astype(np.int64)

    def ask(self, spans: Iterable[tuple[int, int]]) -> None:
        """Begin to read the tokens start..stop-1 of some spans."""
        size = LARGE_PART_BYTES // self.tokens.itemsize
        self.parts.ask(part for start, stop in spans for part in range(start // size, -(-stop // size)))

    @property
    def document_ends(self) -> npt.NDArray[np.uint64] | None:
        path = self._list(self._files[1])
        return None if path is None else np.memmap(path, dtype="<u8", mode="r")

    @property
    def names_path(self) -> Path | None:
        return self._list(self._files[2])

    def _list(self, name: str) -> Path | None:
        if name not in self._lists and self._manifest.files[name].bytes <= _LARGEST_LIST_BYTES:
            self._lists[name] = fetched(self.path.parent, self._store, self._manifest, name)
        return self._lists.get(name)

    _count: int
    _files: tuple[str, str, str]
    _manifest: Manifest
    _store: Store
    _lists: dict[str, Path]


class StoredTokens(_Plain):
    """A split that is read from a store; the windows of a batch are asked for together."""

    packer: ClassVar[str] = "stores"

    @classmethod
    def of(
        cls,
        folder: Path,
        manifest: Manifest,
        split: str,
        files: tuple[str, str, str],
        *,
        store: Store,
        most_bytes: int,
    ) -> StoredTokens:
        tokens = files[0]
        record, own = manifest.files[tokens], manifest.splits[split]
        dtype = np.dtype(manifest.dtype)
        there = store.size(tokens)
        if there != record.bytes or record.bytes != own.tokens * dtype.itemsize or not own.tokens:
            raise DataError(
                f"{store.url}/{tokens} has {there:,} bytes, but {record.bytes:,} in its {MANIFEST}", fix=_FIX
            )
        made = cls.__new__(cls)
        made.__dict__.update(
            path=folder / tokens,
            tokens=np.empty(0, dtype=dtype),
            vocab_size=manifest.vocab_size,
            end_of_text=manifest.end_of_text,
            text_bytes=own.text_bytes,
            tokenizer_path=folder / TOKENIZER,
            sha256=record.sha256,
            targets=None,
            parts=StoredParts(folder, manifest, tokens, store=store, most_bytes=most_bytes),
            _count=own.tokens,
            _files=files,
            _manifest=manifest,
            _store=store,
            _lists={},
        )
        return made

    @cached_property
    def plain(self) -> _Plain:
        """The same, read one window after the other."""
        made = _Plain.__new__(_Plain)
        made.__dict__.update(self.__dict__)
        return made


def packed_batch(
    tokens: StoredTokens, windows: Sequence[int], *, context: int, end_of_text: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `window_batch`; all windows are asked for before the first is waited for."""
    spans: list[Any] = [(window * context, min(len(tokens), (window + 1) * context + 1)) for window in windows]
    tokens.ask(spans)
    return window_batch(tokens.plain, windows, context=context, end_of_text=end_of_text)
