"""SIGTERM to one of two Endpoint Pickers of a real Envoy, which hears of it by its endpoints (EDS) at the same moment: under load
no request is lost."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.bench.proxies import process, wait_for
from e2e.envoy_picker import config, envoy
from e2e.test_router_envoy import free_ports, write_documents
from tests.fleet_router.fake_worker import FakeWorker

pytestmark = pytest.mark.timeout(300)
CLIENTS, ROUNDS = 24, 3
BODY = json.dumps({"model": "m", "prompt": "short", "max_tokens": 3}).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY)
LOADS = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


@dataclass
class Picker:
    """A router process; `grpc`: where gateways ask."""

    documents: Path
    http: int
    grpc: int

    @contextmanager
    def running(self, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        argv = [sys.executable, "-m", "fleet_router", "--follow", f"dir:{self.documents}", "--host", "127.0.0.1"]
        argv += ["--port", str(self.http), "--ext-proc-port", str(self.grpc)]
        with process(argv, log) as started:
            wait_for(f"http://127.0.0.1:{self.http}/ready", started, log)
            yield started


def told(file: Path, *pickers: Picker) -> None:
    """Envoy's endpoints are these from now on: it sees that the file was replaced."""
    rows = [{"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": one.grpc}}}} for one in pickers]
    loads = {"@type": LOADS, "cluster_name": "picker", "endpoints": [{"lb_endpoints": rows}]}
    new = file.with_suffix(".new")
    new.write_text(yaml.safe_dump({"resources": [loads]}))
    new.rename(file)


def by_endpoints(bootstrap: dict[str, Any], file: Path) -> dict[str, Any]:
    """Of an Envoy that reads them from this file."""
    (picker,) = (one for one in bootstrap["static_resources"]["clusters"] if one["name"] == "picker")
    del picker["load_assignment"]
    source = {"path_config_source": {"path": str(file)}, "resource_api_version": "V3"}
    picker |= {"type": "EDS", "eds_cluster_config": {"eds_config": source}}
    return {**bootstrap, "node": {"id": "node", "cluster": "gateway"}}


async def ask_on(address: str, found: Counter[bytes], over: Callable[[], bool]) -> None:
    """Request after request; `found`: how often each status came."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    while not over():
        writer.write(REQUEST + BODY)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        found[head.split(b" ", 2)[1]] += 1
        if b"content-length:" in head:
            await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
        else:
            await reader.readuntil(b"0\r\n\r\n")
    writer.close()


def test_a_picker_that_is_told_to_go_costs_no_request(tmp_path: Path):
    """Two to eleven of 24 under way were 500, each time."""
    at, admin = (f"127.0.0.1:{port}" for port in free_ports(2))
    documents, file = tmp_path / "documents", tmp_path / "eds.yaml"
    goes, stays = (Picker(documents, *free_ports(2)) for _ in range(2))

    async def go(opened: ExitStack, worker: FakeWorker) -> None:
        write_documents(documents, [], [worker.port])
        told(file, stays)
        bootstrap = config(at, admin, at, [f"127.0.0.1:{worker.port}"], fail_open=False, body="FULL_DUPLEX_STREAMED")
        await asyncio.to_thread(opened.enter_context, stays.running(tmp_path / "stays.log"))
        await asyncio.to_thread(opened.enter_context, envoy(at, admin, tmp_path, by_endpoints(bootstrap, file)))
        found, over = Counter[bytes](), False
        clients = [asyncio.create_task(ask_on(at, found, lambda: over)) for _ in range(CLIENTS)]
        for _ in range(ROUNDS):
            started = goes.running(tmp_path / "goes.log")
            running = await asyncio.to_thread(started.__enter__)
            told(file, stays, goes)
            await asyncio.sleep(1.5)
            told(file, stays)
            running.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(running.wait, 30) == 0
            await asyncio.to_thread(started.__exit__, None, None, None)
        over = True
        await asyncio.gather(*clients)
        print(found)
        assert found.keys() == {b"200"}
        assert found[b"200"] > CLIENTS * ROUNDS

    async def main() -> None:
        worker = await FakeWorker().start()
        with ExitStack() as opened:
            try:
                await go(opened, worker)
            finally:
                await asyncio.to_thread(opened.close)
                await worker.stop()

    asyncio.run(main())
