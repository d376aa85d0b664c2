"""As much of a model hub as snapshot_download asks for, over HTTP: some repositories, one commit each, a few branches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LARGE = ".safetensors"
"""Files that a hub keeps by their sha256; it knows the others by git's hash."""


def etag(name: str, body: bytes) -> str:
    if name.endswith(LARGE):
        return sha256(body).hexdigest()
    return sha1(f"blob {len(body)}\0".encode() + body, usedforsecurity=False).hexdigest()


class Hub(ThreadingHTTPServer):
    """`sent` lists the files that were downloaded; `lies` names those that arrive with a wrong byte."""

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]], commit: str = "c" * 40) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.repositories = repositories
        self.commit = commit
        self.sent: list[str] = []
        self.lies: set[str] = set()
        self.sizes: dict[str, int] = {}
        self.tokens: set[str] = set()


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.respond()

    def do_GET(self) -> None:
        self.respond()

    def respond(self) -> None:
        path, hub = self.path.split("?")[0], self.server
        hub.tokens.add(self.headers.get("authorization", ""))
        for name, files in hub.repositories.items():
            if path.startswith((f"/api/models/{name}/", f"/{name}/")):
                self.of_repository(path, name, files)
                return
        self.missing("RepoNotFound")

    def of_repository(self, path: str, repository: str, files: Mapping[str, bytes]) -> None:
        commit = self.server.commit
        if path in (f"/api/models/{repository}/revision/{name}" for name in ("main", "v2", commit)):
            listing = {"id": repository, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
            self.answer(200, json.dumps(listing).encode(), {"content-type": "application/json"})
            return
        if path == f"/api/models/{repository}/tree/{commit}":
            tree = [
                {"type": "file", "path": name, "size": self.size(name, body), "oid": etag(name, body)}
                for name, body in files.items()
            ]
            self.answer(200, json.dumps(tree).encode(), {"content-type": "application/json"})
            return
        name = path.removeprefix(f"/{repository}/resolve/{commit}/")
        if name not in files:
            self.missing("RevisionNotFound" if path.startswith("/api/models/") else "EntryNotFound")
            return
        body = files[name]
        headers = {"ETag": f'"{etag(name, body)}"', "X-Repo-Commit": commit}
        if self.command == "GET":
            self.server.sent.append(name)
            body = b"?" + body[1:] if name in self.server.lies else body
        elif name in self.server.sizes:
            headers["X-Linked-Size"] = str(self.server.sizes[name])
        self.answer(200, body, headers)

    def size(self, name: str, body: bytes) -> int:
        return self.server.sizes.get(name, len(body))

    def missing(self, code: str) -> None:
        self.answer(404, b"{}", {"X-Error-Code": code, "X-Error-Message": f"{code} says the hub"})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""
