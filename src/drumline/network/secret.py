"""The secret of a run, which all its hosts know and nobody else: who may take part, and whose word counts.

It travels in a variable, or lies in a file that only its user can read.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from drumline.errors import ConfigError

SECRET, SECRET_FILE = "DRUMLINE_SECRET", "DRUMLINE_SECRET_FILE"
_SHORTEST = 32
_WRITTEN_S, _RETRY_S = 5.0, 0.05
_OTHERS = 0o077
_MAC_LETTERS = 64
_MAKE = "openssl rand -hex 32"


def new_secret() -> str:
    return secrets.token_hex(32)


def run_secret(environ: Mapping[str, str], file: Path | None) -> bytes:
    """The secret from the variables, else from a file, which the first host writes; empty if there is neither."""
    if given := environ.get(SECRET):
        return _checked(given, SECRET, fix=f"on one host: {_MAKE}; then on every host: export {SECRET}=WHAT_IT_PRINTED")
    if named := environ.get(SECRET_FILE):
        file = Path(named)
    return _from_file(file) if file is not None else b""


def _checked(secret: str, where: str, *, fix: str) -> bytes:
    if len(secret) < _SHORTEST:
        raise ConfigError(f"{where} has {len(secret)} characters; a secret needs {_SHORTEST} or more", fix=fix)
    return secret.encode()


def _from_file(path: Path) -> bytes:
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
                file.write(new_secret() + "\n")
        until = time.monotonic() + _WRITTEN_S
        while len(secret := path.read_text(encoding="utf-8").strip()) < _SHORTEST and time.monotonic() < until:
            time.sleep(_RETRY_S)  # another host is just writing it
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot read the secret of the run in {path}: {why}",
            fix=f"run all hosts as the same user, or set the same {SECRET} on every host",
        ) from None
    if mode & _OTHERS:  # some network disks have no modes, so this is no reason to stop
        logging.getLogger(__name__).warning(
            "other users can read the secret of the run: chmod 600 %s, or set the same %s on every host", path, SECRET
        )
    return _checked(secret, str(path), fix=f"rm {path}")


def derived(secret: bytes, purpose: str) -> str:
    """A secret for one purpose: from it, neither this one nor others can be computed. Empty without a secret."""
    return hmac.new(secret, purpose.encode(), hashlib.sha256).hexdigest() if secret else ""


def signed(secret: str, name: str, text: str) -> str:
    """A text with the proof that one who knows the secret wrote it under this name; unchanged without a secret."""
    return _proof(secret, name, text) + text if secret else text


def verified(secret: str, name: str, content: str) -> str:
    """The text of what `signed` returned; ValueError for anything else."""
    if not secret:
        return content
    proof, text = content[:_MAC_LETTERS], content[_MAC_LETTERS:]
    if not hmac.compare_digest(proof.encode(), _proof(secret, name, text).encode()):
        raise ValueError(f"{name} was not written with the run's secret")
    return text


def _proof(secret: str, name: str, text: str) -> str:
    return hmac.new(secret.encode(), f"{len(name)} {name}{text}".encode(), hashlib.sha256).hexdigest()
