"""A Hugging Face hub on this machine, as far as listing and fetching files go."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """Repositories by name, each a mapping from file name to bytes; and what to do wrong."""

    repos: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    cut_after: int | None = None
    """Drop the connection after this many bytes of a file, once."""
    status: int | None = None
    """Answer everything with this status."""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and Range header of every request."""
    url: str = ""


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """`hub` at `hub.url` as long as the block runs."""

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if self.hub.status is not None:
            self._send(self.hub.status, b"{}")
            return
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo, rest = "/".join(parts[2:4]), parts[4:]
        else:
            repo, rest = "/".join(parts[:2]), parts[2:]
        files = self.hub.repos.get(repo)
        if files is None:
            self._send(404, b'{"error": "Repository not found"}', **{"X-Error-Code": "RepoNotFound"})
        elif rest[:1] == ["tree"]:
            tree = [{"type": "file", "path": n, "size": len(d), "oid": _etag(d)} for n, d in files.items()]
            self._send(200, json.dumps(tree).encode())
        elif rest[:1] == ["resolve"]:
            self._file(repo, files, "/".join(rest[2:]))
        else:
            siblings = [{"rfilename": name} for name in files]
            self._send(200, json.dumps({"id": repo, "sha": "0" * 40, "siblings": siblings}).encode())

    def _file(self, repo: str, files: dict[str, bytes], name: str) -> None:
        if repo in self.hub.gated and self.headers.get("Authorization") != "Bearer good":
            self._send(403, b"{}", **{"X-Error-Code": "GatedRepo"})
            return
        if name not in files:
            self._send(404, b"{}", **{"X-Error-Code": "EntryNotFound"})
            return
        data = files[name]
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        extra = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": "0" * 40, "Accept-Ranges": "bytes"}
        if start:
            extra["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(206 if start else 200, data[start:], **extra)

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.hub.cut_after
        if cut is not None and len(body) > cut and "ETag" in headers:
            self.hub.cut_after = None
            self.wfile.write(body[:cut])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return
        self.wfile.write(body)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
