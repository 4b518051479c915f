"""What a repository of the Hugging Face Hub needs besides reading: writing, listing and removing files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drumline.errors import MissingExtraError


class Hub:
    """The files of a folder of a repository, as commits. Reads go by HTTP, see `access`."""

    def __init__(self, kind: str, repository: str, revision: str, folder: str) -> None:
        try:
            from huggingface_hub import HfApi
        except ImportError:
            raise MissingExtraError("writing to hf://", extra="hf") from None
        self._api = HfApi()
        self._where: dict[str, Any] = {"repo_id": repository, "repo_type": kind, "revision": revision}
        self._folder = folder

    def put(self, name: str, content: Path | bytes) -> None:
        self._api.upload_file(path_or_fileobj=content, path_in_repo=self._path(name), **self._where)

    def list(self, prefix: str) -> dict[str, int]:
        from huggingface_hub.hf_api import RepoFile

        entries = self._api.list_repo_tree(path_in_repo=self._path(prefix) or None, recursive=True, **self._where)
        cut = len(self._folder) + 1 if self._folder else 0
        return {each.path[cut:]: each.size for each in entries if isinstance(each, RepoFile)}

    def delete(self, name: str) -> None:
        from huggingface_hub.errors import EntryNotFoundError

        try:
            self._api.delete_file(self._path(name), **self._where)
        except EntryNotFoundError:
            return

    def _path(self, name: str) -> str:
        return "/".join(part for part in (self._folder, name.strip("/")) if part)
