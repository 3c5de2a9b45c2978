"""A server of Google Cloud Storage's XML API in memory, with one bucket: `weights`.

Objects have generations, which a PUT may be conditional on, and ETags. It asks for a bearer token,
and takes any. What the emulators of Google's store lack: they take no PUT.
"""

from __future__ import annotations

import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "weights"


class Server(ThreadingHTTPServer):
    """Serves on loopback until it is closed."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.generations, self.lock = count(1_700_000_000_000_000), threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any
    _asked: ClassVar[dict[str, list[str]]] = {}

    def _begin(self) -> str:
        split = urlsplit(self.path)
        self._asked = parse_qs(split.query, keep_blank_values=True)
        return unquote(split.path).removeprefix(f"/{BUCKET}").removeprefix("/")

    def _say(self, status: int, body: bytes = b"", **headers: object) -> None:
        self.send_response(status)
        length = headers.pop("Content_Length", len(body))
        for name, value in {"Content-Length": length, **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._say(status, f"<Error><Code>{code}</Code></Error>".encode())

    def do_GET(self) -> None:
        key = self._begin()
        if "Bearer " not in self.headers.get("Authorization", ""):
            self._refuse(401, "AuthenticationRequired")
        elif not key:
            self._list()
        elif key not in self.server.objects:
            self._refuse(404, "NoSuchKey")
        else:
            data, generation = self.server.objects[key]
            marks = {"ETag": _etag(data), "x-goog-generation": generation}
            if self.headers.get("If-Match", marks["ETag"]) != marks["ETag"]:
                self._refuse(412, "PreconditionFailed")
            elif found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                start, stop = int(found[1]), min(len(data), int(found[2] or len(data)) + 1)
                marks["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
                self._say(206, data[start:stop], **marks)
            else:
                self._say(200, data, Last_Modified="Sat, 28 Nov 2026 00:00:00 GMT", **marks)

    do_HEAD = do_GET

    def _list(self) -> None:
        prefix, delimiter = (self._asked.get(name, [""])[0] for name in ("prefix", "delimiter"))
        keys, folders = list[str](), set[str]()
        for key in sorted(self.server.objects):
            rest = key.removeprefix(prefix)
            if key.startswith(prefix) and delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
            elif key.startswith(prefix):
                keys.append(key)
        lines = [
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.server.objects[key][0])}</Size>"
            f"<LastModified>2026-11-28T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(_etag(self.server.objects[key][0]))}</ETag></Contents>"
            for key in keys
        ]
        some = (f"<Prefix>{escape(each)}</Prefix>" for each in sorted(folders))
        lines += [f"<CommonPrefixes>{each}</CommonPrefixes>" for each in some]
        self._say(200, f"<ListBucketResult>{''.join(lines)}</ListBucketResult>".encode())

    def do_PUT(self) -> None:
        key, data = self._begin(), self.rfile.read(int(self.headers["Content-Length"]))
        if "uploadId" in self._asked:
            number = int(self._asked["partNumber"][0])
            self.server.parts[self._asked["uploadId"][0]][number] = data
            self._say(200, ETag=_etag(data))
            return
        wanted = self.headers.get("x-goog-if-generation-match")
        with self.server.lock:
            now = self.server.objects.get(key, (b"", 0))[1]
            if wanted is not None and int(wanted) != now:
                self._refuse(412, "PreconditionFailed")
                return
            self._keep(key, data)

    def _keep(self, key: str, data: bytes, body: bytes = b"") -> None:
        made = self.server.objects[key] = data, next(self.server.generations)
        self._say(200, body, ETag=_etag(data), x_goog_generation=made[1])

    def do_POST(self) -> None:
        key = self._begin()
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "uploads" in self._asked:
            name = str(next(self.server.generations))
            self.server.parts[name] = {}
            root = "InitiateMultipartUploadResult"
            self._say(200, f"<{root}><UploadId>{name}</UploadId></{root}>".encode())
            return
        parts = self.server.parts.pop(self._asked["uploadId"][0])
        data = b"".join(parts[number] for number in sorted(parts))
        root = "CompleteMultipartUploadResult"
        self._keep(key, data, f"<{root}><ETag>{_etag(data)}</ETag></{root}>".encode())

    def do_DELETE(self) -> None:
        key = self._begin()
        if "uploadId" in self._asked:
            self.server.parts.pop(self._asked["uploadId"][0], None)
        elif self.server.objects.pop(key, None) is None:
            self._refuse(404, "NoSuchKey")
            return
        self._say(204)

    def log_message(self, *_: object) -> None:
        pass


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
