"""Collectors that take spans and then behave badly."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fleet_router.config import TraceConfig
from fleet_router.explain import export
from fleet_router.explain.export import Exported, Exporter


def test_what_a_collector_took_is_not_sent_again_for_an_answer_that_has_no_end(monkeypatch: pytest.MonkeyPatch):
    """Its 200 was no answer until all of its body was there: one that dripped held the thread, and with it all spans, for as long
    as it did; one that fell silent got the same spans three times, and they were counted as dropped."""
    monkeypatch.setattr(export, "TIMEOUT_S", 0.3)
    over, bodies = threading.Event(), list[bytes]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "65536")
            self.end_headers()
            while not over.wait(0.1):
                self.wfile.write(b" ")

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        exporter = Exporter(TraceConfig(endpoint=f"http://127.0.0.1:{server.server_port}"), "f", lambda: 0.0, Exported())
        sending = threading.Thread(target=lambda: bodies.append(b"%d" % exporter._post(b"spans")), daemon=True)
        sending.start()
        sending.join(10)
        assert bodies == [b"spans", b"1"]
    finally:
        over.set()
        server.shutdown()
        server.server_close()
