"""A Hugging Face Hub on loopback: as much of it as writing, listing, reading and removing small files takes."""

from __future__ import annotations

import base64
import json
import re
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_canary"


class Hub:
    """files: of the repository some/one, a model, by their paths."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: Any) -> None: ...

    def _handle(self) -> None:
        body = self._body()
        path = unquote(urlsplit(self.path).path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, b"{}")
            return
        with self.hub.lock:
            if path.startswith("/some/one/resolve/main/"):
                self._file(path.removeprefix("/some/one/resolve/main/"))
            else:
                self._answer(200, json.dumps(self._api(path, body)).encode())

    do_GET = do_POST = do_HEAD = _handle  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        about = {"Content-Type": "application/json", "Last-Modified": "Wed, 18 Nov 2026 10:00:00 GMT", **headers}
        for key, value in {**about, "Content-Length": str(len(content))}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            with suppress(ConnectionError):
                self.wfile.write(content)

    def _file(self, name: str) -> None:
        content = self.hub.files.get(name)
        if content is None:
            return self._answer(404, b"", X_Error_Code="EntryNotFound")
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not wanted:
            return self._answer(200, content, ETag='"x"')
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(content))
        ranges = {"Content_Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        return self._answer(206, content[start:stop], ETag='"x"', **ranges)

    def _api(self, path: str, body: bytes) -> Any:
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            return {"files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in files]}
        if "/commit/" in path:
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    self.hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    self.hub.files.pop(line["value"]["path"], None)
            number = "0" * 40
            return {"success": True, "commitOid": number, "commitUrl": f"{self.hub.address}/some/one/commit/{number}"}
        if "/tree/main" in path:
            folder = path.partition("/tree/main")[2].strip("/")
            found = {name: each for name, each in self.hub.files.items() if name.startswith(folder)}
            return [{"type": "file", "path": name, "size": len(each), "oid": "1" * 40} for name, each in found.items()]
        return {}
