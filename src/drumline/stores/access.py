"""How a store is reached: its library's client, with credentials and address from the usual variables and files."""

from __future__ import annotations

import base64
import configparser
import netrc
import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from drumline.errors import ConfigError, MissingExtraError

CONNECT_S, SILENT_S, REQUEST_S = 5.0, 10.0, 60.0
"""A request that gets no connection, no byte, or no end within this time has failed."""
HUB = "https://huggingface.co"


def connect(url: str, *, retries: int, request_s: float = REQUEST_S) -> Any:
    """A client of obstore for the objects below a URL."""
    try:
        from obstore import store

        stores: Any = store
    except ImportError:
        raise MissingExtraError(f"{url.partition('://')[0]}://", extra="cloud") from None
    scheme = url.partition("://")[0]
    how: dict[str, Any] = {"retry_config": {"max_retries": retries, "retry_timeout": timedelta(seconds=request_s)}}
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "read_timeout": timedelta(seconds=SILENT_S),
        "timeout": timedelta(seconds=request_s),
        "pool_max_idle_per_host": "128",
    }
    if scheme in ("http", "https", "hf"):
        address, headers = _web(url)
        if headers:
            client["default_headers"] = headers
        client["allow_http"] = address.startswith("http://")
        return stores.HTTPStore.from_url(address, client_options=client, **how)
    address = os.environ.get({"s3": "AWS_ENDPOINT_URL_S3", "az": "AZURE_ENDPOINT"}.get(scheme, ""), "")
    if scheme == "s3":
        how["config"] = _s3()
        address = how["config"].get("endpoint", "")
    client["allow_http"] = address.startswith("http://") or os.environ.get("STORAGE_EMULATOR_HOST", "") != ""
    return stores.from_url(url, client_options=client, **how)


def _s3() -> dict[str, str]:
    """What obstore does not read by itself: the address by its other name, and the profile in the files of AWS."""
    config = {}
    if address := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        config["endpoint"] = address
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not os.environ.get("AWS_ACCESS_KEY_ID"):
        profile = _aws_profile()
        names = {"aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key"}
        names |= {"aws_session_token": "session_token", "endpoint_url": "endpoint", "region": "region"}
        config = {names[name]: value for name, value in profile.items() if name in names} | config
    if region:
        config["region"] = region
    config.setdefault("region", "us-east-1")
    return config


def _aws_profile() -> dict[str, str]:
    """The profile AWS_PROFILE, or `default`, of ~/.aws/config and ~/.aws/credentials."""
    profile, home = os.environ.get("AWS_PROFILE", "default"), Path.home() / ".aws"
    found: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", profile if profile == "default" else f"profile {profile}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", profile),
    ):
        parser = configparser.RawConfigParser()
        with suppress(configparser.Error, OSError, UnicodeError):
            parser.read(os.environ.get(variable) or home / file, encoding="utf-8")
            found |= parser[section] if parser.has_section(section) else {}
    return found


def _web(url: str) -> tuple[str, dict[str, str]]:
    """The address of a folder on the web, and the headers that open it."""
    if url.startswith("hf://"):
        kind, repository, revision, path = hub_place(url)
        hub = os.environ.get("HF_ENDPOINT", HUB).rstrip("/")
        token = _hub_token()
        folder = "" if kind == "model" else f"{kind}s/"
        address = f"{hub}/{folder}{repository}/resolve/{revision}/{path}".rstrip("/")
        return address, {"Authorization": f"Bearer {token}"} if token else {}
    with suppress(OSError, netrc.NetrcParseError):
        if known := netrc.netrc(os.environ.get("NETRC")).authenticators(urlsplit(url).hostname or ""):
            basic = base64.b64encode(f"{known[0]}:{known[2]}".encode()).decode()
            return url, {"Authorization": f"Basic {basic}"}
    return url, {}


def hub_place(url: str) -> tuple[str, str, str, str]:
    """(model, dataset or space; owner/name; revision; path) of hf://datasets/OWNER/NAME@REVISION/PATH."""
    parts = url.removeprefix("hf://").strip("/").split("/")
    kind = {"datasets": "dataset", "spaces": "space", "models": "model"}.get(parts[0])
    parts = parts[1:] if kind else parts
    if len(parts) < 2 or not all(parts[:2]):
        raise ConfigError(f"{url} names no repository", fix="write it as hf://datasets/OWNER/NAME/FOLDER")
    name, _, revision = parts[1].partition("@")
    return kind or "model", f"{parts[0]}/{name}", revision or "main", "/".join(parts[2:])


def _hub_token() -> str | None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := os.environ.get(name):
            return token
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    with suppress(OSError):
        return Path(os.environ.get("HF_TOKEN_PATH") or home / "token").read_text(encoding="utf-8").strip() or None
    return None
