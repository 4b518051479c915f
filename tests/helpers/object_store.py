"""An object store on loopback that speaks as much of S3's protocol as a client needs: a real server for tests.

    with ObjectStore() as store:
        subprocess.run([...], env={**os.environ, **store.environ})
        store.objects["bucket/run/config.toml"]

It can be told to fail, to wait and to lie, which moto's (see `moto_server`) cannot.
"""

from __future__ import annotations

import hashlib
import re
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

KEY, SECRET = "AKIATESTTESTTEST", "canary-secret-of-the-object-store"
Fault = Callable[[str, str, bytes], "int | None"]
"""(method, bucket/name, body) of a request -> the status of an error that it gets instead; None: it is answered."""


class ObjectStore:
    """Objects by bucket/name. All buckets exist but those in `missing`; nothing is kept on disk.

    fault:    called before each request is answered; it may also wait
    opens:    what a request must have in its Authorization
    requests: (method, bucket/name) of each request
    """

    def __init__(self, port: int = 0) -> None:
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.blocks: dict[tuple[str, str], bytes] = {}
        self.missing = {"nowhere"}
        self.opens = KEY
        self.fault: Fault = lambda method, name, body: None
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (_Handler,), {"store": self}))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def environ(self) -> dict[str, str]:
        """What a client needs to find it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> ObjectStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    store: ObjectStore
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *words: Any) -> None: ...

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        split = urlsplit(self.path)
        name, query = unquote(split.path).lstrip("/"), parse_qs(split.query, keep_blank_values=True)
        self.store.requests.append((self.command, name))
        status = self.store.fault(self.command, name, body)
        if status is not None:
            self._error(status, "InternalError" if status >= 500 else "AccessDenied")
        elif self.store.opens not in self.headers.get("Authorization", ""):
            self._error(403, "InvalidAccessKeyId")
        elif name.partition("/")[0] in self.store.missing:
            self._error(404, "NoSuchBucket")
        else:
            with self.store.lock:
                getattr(self, f"_{self.command.lower()}")(name, query, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815

    def _answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            with suppress(ConnectionError):  # a client that has read enough
                self.wfile.write(content)

    def _error(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _get(self, name: str, query: dict[str, list[str]], body: bytes) -> None:
        if query.get("comp") == ["list"]:
            return self._azure_list(name, query)
        if "list-type" in query or "/" not in name:
            return self._list(name.strip("/"), query)
        content = self.store.objects.get(name)
        if content is None:
            return self._error(404, "NoSuchKey")
        # Not of the content, which may be large, or what only looks like bytes.
        tag = hashlib.md5(f"{name} {len(content)}".encode()).hexdigest()
        about = {"ETag": f'"{tag}"', "Last_Modified": "Wed, 18 Nov 2026 10:00:00 GMT"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not wanted:
            return self._answer(200, content, **about, Content_Length=str(len(content)))
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(content))
        return self._answer(206, content[start:stop], **about, Content_Range=f"bytes {start}-{stop - 1}/{len(content)}")

    _head = _get

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        prefix = f"{bucket}/{query.get('prefix', [''])[0]}"
        found = {name: content for name, content in sorted(self.store.objects.items()) if name.startswith(prefix)}
        items = "".join(
            f"<Contents><Key>{escape(name.partition('/')[2])}</Key><Size>{len(content)}</Size><ETag>&quot;x&quot;</ETag>"
            "<LastModified>2026-11-18T10:00:00.000Z</LastModified></Contents>"
            for name, content in found.items()
        )
        text = f"<ListBucketResult><Name>{bucket}</Name><IsTruncated>false</IsTruncated>{items}</ListBucketResult>"
        self._answer(200, text.encode())

    def _azure_list(self, container: str, query: dict[str, list[str]]) -> None:
        prefix = f"{container}/{query.get('prefix', [''])[0]}"
        items = "".join(
            f"<Blob><Name>{escape(name.removeprefix(f'{container}/'))}</Name><Properties>"
            f"<Content-Length>{len(content)}</Content-Length><Content-Type>x</Content-Type><Etag>x</Etag>"
            "<Last-Modified>Wed, 18 Nov 2026 10:00:00 GMT</Last-Modified></Properties></Blob>"
            for name, content in sorted(self.store.objects.items())
            if name.startswith(prefix)
        )
        text = f"<EnumerationResults><Blobs>{items}</Blobs><NextMarker/></EnumerationResults>"
        self._answer(200, text.encode())

    def _azure_delete(self, container: str, body: bytes) -> None:
        account, parts = container.partition("/")[0], list[str]()
        for number, path in enumerate(re.findall(r"DELETE /(\S+) HTTP", body.decode())):
            name = unquote(path) if path.startswith(account) else f"{account}/{unquote(path)}"
            self.store.requests.append(("DELETE", name))
            status = "202 Accepted" if self.store.objects.pop(name, None) is not None else "404 BlobNotFound"
            parts.append(
                f"--x\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
                f"HTTP/1.1 {status}\r\nx-ms-request-id: 1\r\nx-ms-version: 1\r\n\r\n"
            )
        self._answer(202, f"{''.join(parts)}--x--\r\n".encode(), Content_Type="multipart/mixed; boundary=x")

    def _put(self, name: str, query: dict[str, list[str]], body: bytes) -> None:
        if "uploadId" in query:
            self.store.parts[query["uploadId"][0]][int(query["partNumber"][0])] = body
        elif query.get("comp") == ["block"]:
            self.store.blocks[name, query["blockid"][0]] = body
        elif query.get("comp") == ["blocklist"]:
            wanted = re.findall(r"<(?:Latest|Uncommitted)>(.*?)</", body.decode())
            self.store.objects[name] = b"".join(self.store.blocks.pop((name, each)) for each in wanted)
        else:
            self.store.objects[name] = body
        self._answer(200, ETag=f'"{hashlib.md5(body).hexdigest()}"')

    def _post(self, name: str, query: dict[str, list[str]], body: bytes) -> None:
        if query.get("comp") == ["batch"]:
            self._azure_delete(name, body)
            return
        if "uploads" in query:
            number = uuid.uuid4().hex
            self.store.parts[number] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
        elif "uploadId" in query:
            parts = self.store.parts.pop(query["uploadId"][0])
            self.store.objects[name] = b"".join(parts[number] for number in sorted(parts))
            text = "<CompleteMultipartUploadResult><ETag>&quot;x&quot;</ETag></CompleteMultipartUploadResult>"
        else:
            bucket, keys = name.strip("/"), re.findall(r"<Key>(.*?)</Key>", body.decode())
            for key in keys:
                self.store.objects.pop(f"{bucket}/{key}", None)
            gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            text = f"<DeleteResult>{gone}</DeleteResult>"
        self._answer(200, text.encode())

    def _delete(self, name: str, query: dict[str, list[str]], body: bytes) -> None:
        if "uploadId" in query:
            self.store.parts.pop(query["uploadId"][0], None)
        else:
            self.store.objects.pop(name, None)
        self._answer(204)
