"""Between a worker's KV events and a router: batches that are lost, swapped or said twice on a connection that stands, and a
replay port that says nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Literal

import zmq

Mode = Literal["pass", "lose", "swap", "twice"]


class Events(threading.Thread):
    """Publishes what it hears at `source` on `at`, changed as `mode` says; a context manager. `listens`: whoever publishes to
    `source` connects to it."""

    def __init__(self, source: str, at: str, *, listens: bool = False) -> None:
        super().__init__(daemon=True)
        self.mode: Mode = "pass"
        self.changed = 0
        """Batches that were lost, swapped or said twice."""
        self._over = threading.Event()
        self._context = zmq.Context()
        self._in, self._out = self._context.socket(zmq.SUB), self._context.socket(zmq.PUB)
        self._in.setsockopt(zmq.SUBSCRIBE, b"")
        (self._in.bind if listens else self._in.connect)(f"tcp://{source}")
        self._out.bind(f"tcp://{at}")

    def __enter__(self) -> Events:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join(5)
        self._in.close(0)
        self._out.close(0)
        self._context.term()

    def run(self) -> None:
        held: list[bytes] | None = None
        while not self._over.is_set():
            if not self._in.poll(100):
                continue
            batch = self._in.recv_multipart()
            mode = self.mode
            self.changed += mode != "pass"
            if mode == "lose":
                continue
            if mode == "swap" and held is None:
                held = batch
                continue
            self._out.send_multipart(batch)
            if mode == "twice":
                self._out.send_multipart(batch)
            if held is not None:
                self._out.send_multipart(held)
                held = None


class Replays(threading.Thread):
    """TCP from `at` to `source`; while `silent` connections are taken and nothing is said. Counts them."""

    def __init__(self, source: str, at: str) -> None:
        super().__init__(daemon=True)
        self.silent = False
        self.asked = 0
        host, port = at.split(":")
        self._server = socket.create_server((host, int(port)))
        self._source = source.split(":")
        self._open: list[socket.socket] = []

    def __enter__(self) -> Replays:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in [self._server, *self._open]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                self.asked += 1
                self._open.append(client)
                if self.silent:
                    continue
                worker = socket.create_connection((self._source[0], int(self._source[1])))
                self._open.append(worker)
                for one, other in ((client, worker), (worker, client)):
                    threading.Thread(target=self._copy, args=(one, other), daemon=True).start()

    @staticmethod
    def _copy(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65_536):
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)
