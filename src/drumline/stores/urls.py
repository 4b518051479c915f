"""URLs of object stores, and texts without the secrets that a store's library may put into them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from drumline.errors import ConfigError

SCHEMES = ("s3", "gs", "az", "hf", "http", "https")
SECRETS = re.compile("KEY|SECRET|TOKEN|PASSWORD|SIGNATURE|CONNECTION_STRING|CREDENTIAL")
"""Variables whose values are never written anywhere."""
_SHORTEST_SECRET = 8


def is_store(path: str | Path) -> bool:
    """Whether a path is the URL of an object store."""
    return isinstance(path, str) and path.partition("://")[0] in SCHEMES and "://" in path


def check_url(url: str) -> None:
    """ConfigError for a URL that is no place in a store, or has a secret in it: a config keeps the URL as it is."""
    scheme, _, place = url.partition("://")
    if scheme not in SCHEMES:
        raise ConfigError(
            f"{without_secrets(url)} is not the URL of a store: {scheme}:// is not known",
            fix=f"use one of {', '.join(f'{each}://' for each in SCHEMES)}",
        )
    if "@" in place.partition("/")[0] or "?" in place or "#" in place:
        where = {"s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "az": "AZURE_STORAGE_SAS_TOKEN", "hf": "HF_TOKEN"}
        raise ConfigError(
            f"{without_secrets(url)} was given with a user, password or query, which would be kept in the run's config",
            fix=f"use the URL alone, and give credentials by {where.get(scheme, 'the file ~/.netrc')}",
        )
    if not urlsplit(url).netloc:
        what = {"hf": "repository", "http": "host", "https": "host", "az": "container"}.get(scheme, "bucket")
        raise ConfigError(f"{url} has no {what}", fix=f"write it as {scheme}://{what.upper()}/FOLDER")
    if any(part in (".", "..") for part in place.split("/")):
        raise ConfigError(f"{url} has . or .. in it", fix="write the folder in full")


def without_secrets(text: str) -> str:
    """A text without users and passwords of URLs, their queries, and the values of variables that hold secrets."""
    text = re.sub(r"(?<=://)[^/\s@\"']*@", "", text)
    text = re.sub(r"(?<=[^\s?])\?[^\s\"')>]*", "", text)
    for name, value in os.environ.items():
        if SECRETS.search(name.upper()) and len(value) >= _SHORTEST_SECRET and not os.path.exists(value):
            text = text.replace(value, "***")
    return text
