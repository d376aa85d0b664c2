"""A worker that writes down every byte it is sent: what reaches it was let through."""

from __future__ import annotations

import json
import socketserver
import threading
from typing import Any

ANSWER = json.dumps({"choices": [{"text": "ok", "finish_reason": "stop"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})


class _Handler(socketserver.StreamRequestHandler):
    server: Recorder

    def handle(self) -> None:
        while True:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                line = self.rfile.readline(65_536)
                if not line:
                    return
                head += line
            lower = head.lower()
            length = int(lower.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in lower else 0
            body = self.rfile.read(length)
            if not head.startswith((b"GET /metrics", b"GET /state")):  # the router's own questions
                with self.server.lock:
                    self.server.seen.append((head, body))
            self.wfile.write(
                f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(ANSWER)}\r\n\r\n{ANSWER}".encode()
            )


class Recorder(socketserver.ThreadingTCPServer):
    """A context manager; `seen` holds (head, body) of every request."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.seen: list[tuple[bytes, bytes]] = []
        self.lock = threading.Lock()
        super().__init__((host, int(port)), _Handler)

    def __enter__(self) -> Recorder:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def bodies(self) -> list[Any]:
        """Of requests for tokens."""
        with self.lock:
            return [json.loads(body) for head, body in self.seen if head.startswith(b"POST")]

    def bytes_seen(self) -> bytes:
        """Everything."""
        with self.lock:
            return b"".join(head + body for head, body in self.seen)
