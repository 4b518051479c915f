"""Objects of a store: read by range, written in parts, listed, removed. Whatever fails is tried again, then named.

Nothing here keeps state besides connections, so that a `Store` may be used by many threads, and after a fork.
"""

from __future__ import annotations

import logging
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from drumline.errors import DataError
from drumline.stores.access import connect, hub_place
from drumline.stores.urls import check_url, without_secrets

PATIENCE = "DRUMLINE_STORE_PATIENCE_S"
"""Environment variable: how long a request is tried again before the store counts as gone."""
PATIENCE_S = 300.0
FIRST_PATIENCE_S = 20.0
"""The same before the store has answered once: an address or network that is wrong should be named soon."""
PIECE_BYTES = 16 << 20
"""Larger objects are read in pieces, so that a timeout can be short."""
PART_BYTES = 8 << 20
PART_S = 300.0
PART_TRIES, FEW_TRIES = 10, 3
"""Objects are written in parts; each has this much time, and is tried this often."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_TELL_AFTER_S = 3.0
_LASTING = ("NotFoundError", "PermissionDeniedError", "UnauthenticatedError", "NotSupportedError", "InvalidPathError")
"""Errors that another try would meet again."""
_LASTING_STATUS = re.compile(r"\bstatus:? 4(?!08|29)\d\d\b")
_log = logging.getLogger(__name__)
T = TypeVar("T")


def open_store(url: str, *, patience_s: float | None = None) -> Store:
    """The objects below a URL such as s3://bucket/folder. Nothing is asked of the store yet.

    patience_s: how long a request is tried again, for those that try again themselves
    """
    check_url(url)
    return Store(url.rstrip("/"), patience_s=patience_s)


class Store:
    """Objects by name, relative to a URL. Credentials come from the environment, see `access`."""

    def __init__(self, url: str, *, patience_s: float | None = None) -> None:
        self.url, self._given_s = url, patience_s
        self._clients: dict[tuple[int, bool], Any] = {}
        self._answered = False
        self._told = False
        self._client(writes=False)  # a missing package, or a wrong address, is named now

    def get(self, name: str) -> bytes:
        """A whole object."""

        def first() -> tuple[int, bytes]:
            import obstore

            found = obstore.get(self._client(writes=False), name)
            size = int(found.meta["size"])
            return size, bytes(found.bytes()) if size <= PIECE_BYTES else b""

        size, content = self._tried("read", name, first)
        return content if size <= PIECE_BYTES else self.get_range(name, 0, size)

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes start..stop-1 of an object."""
        pieces = [(at, min(at + PIECE_BYTES, stop)) for at in range(start, stop, PIECE_BYTES)]
        return b"".join(self._piece(name, *piece) for piece in pieces)

    def download(self, name: str, path: Path) -> int:
        """Write an object to a file, a piece at a time; returns its size. A file that is not whole is not left."""
        size = self.size(name)
        try:
            with open(path, "wb") as file:
                for at in range(0, size, PIECE_BYTES):
                    file.write(self._piece(name, at, min(at + PIECE_BYTES, size)))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return size

    def put(self, name: str, content: Path | bytes) -> None:
        """Write an object, in one step: others see all of it or nothing. A large file is not read into memory."""
        if self.url.startswith("hf://"):
            self._tried("write", name, lambda: self._hub().put(name, content))
            return

        def write() -> None:
            import obstore

            obstore.put(self._client(writes=True), name, content, chunk_size=PART_BYTES, max_concurrency=8)

        self._tried("write", name, write)

    def list(self, prefix: str = "") -> dict[str, int]:
        """The size of each object whose name begins with a folder, by name, in order."""
        if self.url.startswith("hf://"):
            return dict(self._tried("list", prefix, lambda: self._hub().list(prefix)))

        def read() -> dict[str, int]:
            import obstore

            pages = obstore.list(self._client(writes=False), prefix or None)
            return {str(each["path"]): int(each["size"]) for page in pages for each in page}

        return dict(sorted(self._tried("list", prefix, read).items()))

    def delete(self, name: str) -> None:
        """Remove an object; no error if there is none."""
        if self.url.startswith("hf://"):
            self._tried("remove", name, lambda: self._hub().delete(name))
            return

        def remove() -> None:
            import obstore

            try:
                obstore.delete(self._client(writes=False), name)
            except FileNotFoundError:
                return

        self._tried("remove", name, remove)

    def size(self, name: str) -> int:
        """The bytes of an object."""

        def ask() -> int:
            import obstore

            return int(obstore.head(self._client(writes=False), name)["size"])

        return self._tried("read", name, ask)

    def modified(self, name: str) -> float:
        """When an object was written, in seconds since 1970."""

        def ask() -> float:
            import obstore

            return float(obstore.head(self._client(writes=False), name)["last_modified"].timestamp())

        return self._tried("read", name, ask)

    def exists(self, name: str) -> bool:
        """Whether there is such an object; an error if the store does not say."""
        try:
            self.size(name)
        except MissingObjectError:
            return False
        return True

    def _piece(self, name: str, start: int, stop: int) -> bytes:
        def read() -> bytes:
            import obstore

            content = bytes(obstore.get_range(self._client(writes=False), name, start=start, end=stop))
            if len(content) != stop - start:
                raise OSError(f"it sent {len(content)} of {stop - start} bytes")
            return content

        return self._tried("read", name, read)

    def _client(self, *, writes: bool) -> Any:
        # Of this process: the connections and threads of a client do not survive a fork.
        key = (os.getpid(), writes)
        if key not in self._clients:
            try:
                tries = PART_TRIES if self._given_s is None else FEW_TRIES
                made = connect(self.url, retries=tries, request_s=PART_S) if writes else connect(self.url, retries=0)
            except Exception as error:
                if type(error).__module__.startswith("obstore") or isinstance(error, ValueError):
                    raise DataError(f"{self.url} cannot be opened: {_said(error)}", fix=_fix_access(self.url)) from None
                raise
            self._clients[key] = made
        return self._clients[key]

    def _hub(self) -> Any:
        from drumline.stores.hub import Hub

        return Hub(*hub_place(self.url))

    def _tried(self, verb: str, name: str, call: Callable[[], T]) -> T:
        """The result of a call, tried again with growing pauses for as long as there is patience."""
        where = f"{self.url}/{name}".rstrip("/")
        began, tries, pause_s = time.monotonic(), 0, _FIRST_PAUSE_S
        while True:
            tries += 1
            try:
                result = call()
            except Exception as error:
                waited_s = time.monotonic() - began
                if not _may_pass(error):
                    raise self._named(error, verb, where, tries, waited_s) from None
                if waited_s + pause_s > self._patience_s():
                    raise self._named(error, verb, where, tries, waited_s) from None
                if waited_s > _TELL_AFTER_S and not self._told:
                    self._told = True
                    _log.warning("%s: %s; trying again for up to %.0f s", where, _said(error), self._patience_s())
                time.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                if self._told:
                    self._told = False
                    _log.warning("%s answers again", self.url)
                self._answered = True
                return result

    def _patience_s(self) -> float:
        if self._given_s is not None:
            return self._given_s
        given = os.environ.get(PATIENCE, "")
        if re.fullmatch(r"\d+(\.\d*)?", given):
            return float(given)
        return PATIENCE_S if self._answered else FIRST_PATIENCE_S

    def _named(self, error: Exception, verb: str, where: str, tries: int, waited_s: float) -> DataError:
        """What a user reads: the object, what failed, how often it was tried, and what to do."""
        kind, said = type(error).__name__, _said(error)
        if isinstance(error, FileNotFoundError) or "NoSuchBucket" in str(error):
            missing = self.url if verb in ("write", "list") or "NoSuchBucket" in str(error) else where
            what = " (no such bucket)" if "NoSuchBucket" in str(error) else ""
            return MissingObjectError(f"{missing} does not exist{what}", fix="check the URL, and which store it is in")
        refused = kind in ("PermissionDeniedError", "UnauthenticatedError") or said.startswith(_REFUSALS)
        if refused:
            return DataError(f"{where} may not be {_DONE[verb]}: {said}", fix=_fix_access(where))
        if kind == "NotSupportedError":
            return DataError(
                f"{where} cannot be {_DONE[verb]} in parts: {said}", fix="use a server that answers range requests"
            )
        often = (
            f"tried {tries} times in {waited_s:.0f} s" if tries > 1 else "not tried again, since that would not help"
        )
        return DataError(f"{where} could not be {_DONE[verb]}: {said} ({often})", fix=_FIX_ADDRESS)


class MissingObjectError(DataError):
    """A store that answers, but has no such object."""


_REFUSALS = ("it answered 401", "it answered 403")
_DONE = {"read": "read", "write": "written", "list": "listed", "remove": "removed"}
_FIX_ADDRESS = "check the URL, the network and the store's address (s3: AWS_ENDPOINT_URL, AWS_REGION), and start again"


def _fix_access(url: str) -> str:
    given = {
        "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        "gs": "GOOGLE_APPLICATION_CREDENTIALS",
        "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
        "hf": "HF_TOKEN, or run: hf auth login",
    }
    return f"check the credentials: {given.get(url.partition('://')[0], 'the file ~/.netrc')}; and what they permit"


def _may_pass(error: Exception) -> bool:
    if isinstance(error, DataError | FileNotFoundError | TypeError | ImportError):
        return False
    return type(error).__name__ not in _LASTING and not _LASTING_STATUS.search(str(error))


def _said(error: Exception) -> str:
    """What a library said, in one short line: servers answer with pages of XML, keys and signatures among it."""
    text = str(error)
    code = re.search(r"<Code>(\w{1,60})</Code>", text)
    status = re.search(r"\bstatus:? (\d{3}[ A-Za-z]*)", text)
    if status or code:
        parts = [status[1].strip() if status else "", code[1] if code else ""]
        return "it answered " + ", ".join(part for part in parts if part)
    for sign, meaning in _MEANINGS.items():
        if sign in text.lower():
            return meaning
    first = without_secrets(text).strip().partition("\n")[0]
    return first if len(first) <= 160 else f"{first[:160]}..."


_MEANINGS = {
    "connection refused": "connection refused",
    "dns error": "no host of this name was found",
    "failed to lookup address": "no host of this name was found",
    "timed out": "no answer in time",
    "timeout": "no answer in time",
    "connection reset": "the connection was lost",
    "connection closed": "the connection was lost",
    "incompletemessage": "the connection was lost",
    "end of file before message length": "the connection was lost in the middle of an answer",
    "certificate": "its certificate is not trusted",
}
