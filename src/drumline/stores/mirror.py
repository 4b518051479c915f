"""Prepared folders in stores, as folders of the cache: what is small is copied, the rest is read in parts.

    CACHE/s3-BUCKET-HASH/NAME/     manifest.json and tokenizer.json, and store.json, which says where it is from
                                   files that have no hashes of parts beside them (.crc32), or else these hashes
                              parts/     see cache.py

A URL stays what it is in a run's config; whatever opens tokens gets the path of such a folder instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from drumline.config import DataConfig, TrainConfig, is_mix, with_paths
from drumline.data import MANIFEST, STORE, TOKENIZER, Manifest, TokenFile, read_manifest, targets_file, with_token_facts
from drumline.errors import DataError
from drumline.files import parts_file
from drumline.stores.client import MissingObjectError, Store, open_store

_TRIES = 3
"""How often a file is read that is not what its hash says."""


def in_stores(data: DataConfig) -> bool:
    """Whether some of the data are in a store."""
    return "://" in f"{data.train_data_path} {data.valid_data_path}"


def mirrored(data: DataConfig) -> DataConfig:
    """The settings with the local folders of all URLs in them; what is small is fetched now."""
    mirror = partial(_mirror, data)
    train, valid = data.train_data_path, data.valid_data_path
    train = with_paths(train, mirror) if is_mix(train) else mirror(train)
    return replace(data, train_data_path=train, valid_data_path=None if valid is None else mirror(valid))


def facts_of_stored(config: TrainConfig) -> TrainConfig:
    """As `with_token_facts`, of folders in stores; the URLs stay."""
    own = config.data
    checked = with_token_facts(replace(config, data=mirrored(own)))
    paths = {"train_data_path": own.train_data_path, "valid_data_path": own.valid_data_path}
    return replace(checked, data=replace(checked.data, **paths))  # type: ignore[arg-type]


def _mirror(data: DataConfig, path: str) -> str:
    """The local folder of a URL; another path as it is."""
    if "://" not in path:
        return path
    url, name = path.rstrip("/"), ""
    if url.endswith(".bin"):
        url, _, name = url.rpartition("/")
    store = open_store(url)
    try:
        manifest = store.get(MANIFEST)
    except MissingObjectError as error:
        if "no such bucket" in error.problem:
            raise
        raise DataError(
            f"{url} is no folder of tokens: it has no {MANIFEST}",
            fix="give the URL of a folder that drumline prepare made, copied as a whole",
        ) from None
    cache = Path(os.path.abspath(data.cache_dir or Path(data.data_dir, "cache")))
    known = hashlib.sha256(url.encode() + manifest).hexdigest()[:12]
    scheme, _, place = url.partition("://")
    bucket = re.sub(r"[^\w.-]+", "-", place.partition("/")[0])
    folder = cache / f"{scheme}-{bucket}-{known}" / Path(url).name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / MANIFEST, manifest)
        _write(folder / STORE, json.dumps({"url": url, "cache_gb": data.cache_gb}).encode())
    except OSError as error:
        raise _not_writable(folder, error) from error
    with named(folder, url):
        fetched(folder, store, read_manifest(folder), TOKENIZER)
    return str(folder / name) if name else str(folder)


@contextmanager
def named(folder: Path, url: str) -> Iterator[None]:
    """Errors about the files of a local folder name those of the store."""
    try:
        yield
    except DataError as error:
        own = str(folder)
        if own not in f"{error.problem} {error.fix}":
            raise
        fix = error.fix.replace(f"remove {own} and run", f"remove {url} and run").replace(own, url)
        raise DataError(error.problem.replace(own, url), fix=fix) from None


def source_of(folder: Path) -> tuple[Store, int]:
    """The store of a local folder, and how many bytes of parts the cache may have."""
    try:
        about = json.loads((folder / STORE).read_bytes())
        return open_store(str(about["url"])), round(float(about["cache_gb"]) * 1e9)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / STORE} cannot be read: {error}", fix=f"remove {folder}") from error


def open_split(folder: Path, manifest: Manifest, split: str, files: tuple[str, str, str]) -> TokenFile | None:
    """The tokens of a split in a store; None if all of its files are in the folder now, for they are small.

    files: its tokens, document ends and document names
    """
    store, most_bytes = source_of(folder)
    with named(folder, store.url):
        if parts_file(files[0]) in manifest.files:
            if targets_file(split) in manifest.files:
                raise DataError(
                    f"{store.url} has {manifest.files[files[0]].bytes:,} bytes of conversations, which are not read "
                    "from a store in parts",
                    fix="copy the folder to a disk and train on it there",
                )
            from drumline.stores.tokens import StoredTokens

            return StoredTokens.of(folder, manifest, split, files, store=store, most_bytes=most_bytes)
        for name in (*files, targets_file(split)):
            for each in (name, parts_file(name)):
                if each in manifest.files:
                    fetched(folder, store, manifest, each)
    return None


def fetched(folder: Path, store: Store, manifest: Manifest, name: str) -> Path:
    """A file of the folder that is what the manifest says, fetched if it is not there."""
    path, record = folder / name, manifest.files[name]
    if path.exists() and _sha256(path) == record.sha256:
        return path
    for _ in range(_TRIES):
        descriptor, aside = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
        os.close(descriptor)
        try:
            store.download(name, Path(aside))
            if _sha256(Path(aside)) == record.sha256:
                os.chmod(aside, 0o644)
                os.replace(aside, path)
                return path
        except OSError as error:
            raise _not_writable(folder, error) from error
        finally:
            Path(aside).unlink(missing_ok=True)
    raise DataError(
        f"{store.url}/{name} is not what was prepared: its sha256 is not the one in {MANIFEST} (read {_TRIES} times)",
        fix="copy the folder that drumline prepare made to the store again",
    )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, content: bytes) -> None:
    """Aside, then renamed: the other ranks of this host write the same."""
    if path.exists() and path.read_bytes() == content:
        return
    descriptor, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with open(descriptor, "wb") as file:
        file.write(content)
    os.chmod(aside, 0o644)
    os.replace(aside, path)


def _not_writable(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"{folder} is not writable: {error.strerror or error}", fix="free up space, or choose another --cache_dir"
    )
