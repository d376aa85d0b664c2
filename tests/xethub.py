"""A hub whose large files lie in Xet's storage, as all of huggingface.co: as much of both as their libraries ask for."""

from __future__ import annotations

import json
import time
from hashlib import sha256
from typing import Any

from tests.hub import LARGE, HubHandler, etag

CHUNK = 60_000


def xet_hash(body: bytes) -> str:
    """Some name of 64 digits that is not the body's sha256, as Xet's are not."""
    return sha256(b"xet" + body).hexdigest()


def packed(body: bytes) -> list[bytes]:
    """The chunks of a xorb, not compressed: version, 3 bytes of the length, scheme, 3 bytes of the length."""
    pieces = [body[start : start + CHUNK] for start in range(0, len(body), CHUNK)]
    return [b"\0" + len(piece).to_bytes(3, "little") + b"\0" + len(piece).to_bytes(3, "little") + piece for piece in pieces]


class XetHandler(HubHandler):
    """One xorb per file."""

    def respond(self) -> None:
        path = self.path.split("?")[0]
        here = f"http://127.0.0.1:{self.server.server_address[1]}"
        files = {xet_hash(body): (name, body) for files in self.server.repositories.values() for name, body in files.items()}
        found = files.get(path.rsplit("/", 1)[-1])
        if "/xet-read-token/" in path:
            headers = {"X-Xet-Cas-Url": here, "X-Xet-Access-Token": "t", "X-Xet-Token-Expiration": str(int(time.time()) + 3600)}
            self.answer(200, b"{}", headers)
        elif "/reconstructions/" in path:
            self.reconstruction(path, found[1] if found is not None else None, here)
        elif path.startswith("/xorbs/") and found is not None:
            name, body = found
            self.server.sent.append(name)
            self.xorb(b"".join(packed(b"?" + body[1:] if name in self.server.lies else body)))
        else:
            super().respond()

    def reconstruction(self, path: str, body: bytes | None, here: str) -> None:
        if body is None or not path.startswith("/v1/"):
            self.answer(404, b"{}", {})
            return
        name = path.rsplit("/", 1)[-1]
        chunks = packed(body)
        whole = {"start": 0, "end": len(chunks)}
        fetch = {"range": whole, "url": f"{here}/xorbs/{name}", "url_range": {"start": 0, "end": sum(map(len, chunks)) - 1}}
        terms = [{"hash": name, "unpacked_length": len(body), "range": whole}]
        found = {"offset_into_first_range": 0, "terms": terms, "fetch_info": {name: [fetch]}}
        self.answer(200, json.dumps(found).encode(), {"content-type": "application/json"})

    def xorb(self, body: bytes) -> None:
        self.answer(206, body, {"content-range": f"bytes 0-{len(body) - 1}/{len(body)}"})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        if "/tree/" in self.path and status == 200:
            body = json.dumps([self.in_tree(entry) for entry in json.loads(body)]).encode()
        elif "/resolve/" in self.path and status == 200 and self.path.split("?")[0].endswith(LARGE):
            route = f"http://127.0.0.1:{self.server.server_address[1]}/api/models/acme/tiny/xet-read-token/{self.server.commit}"
            headers = {**headers, "X-Xet-Hash": xet_hash(body), "X-Xet-Refresh-Route": route}
        super().answer(status, body, headers)

    def in_tree(self, entry: dict[str, Any]) -> dict[str, Any]:
        name = entry["path"]
        if not name.endswith(LARGE):
            return entry
        (body,) = {files[name] for files in self.server.repositories.values() if name in files}
        lfs = {"oid": etag(name, body), "size": entry["size"], "pointerSize": 130}
        return {**entry, "oid": "0" * 40, "lfs": lfs, "xetHash": xet_hash(body)}
