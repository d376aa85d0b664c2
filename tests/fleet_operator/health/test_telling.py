"""Metrics with bounded labels, the three routes, and log lines without credentials."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fleet_operator.cluster.guarded import Write
from fleet_operator.cluster.interface import POD, ConflictError
from fleet_operator.health.logs import JsonFormatter, TextFormatter, masked
from fleet_operator.health.meters import REASONS_MOST, Meters
from fleet_operator.health.pulse import Pulse
from fleet_operator.health.server import Readiness, health_app, serving

RUNBOOK = Path(__file__).resolve().parents[3] / "operator/RUNBOOK.md"


class Queue:
    cost: float | None = None

    def backlog(self) -> tuple[int, float]:
        return 3, 1.5

    def ours(self) -> list[dict[str, Any]]:
        """Two that are Ready, and one that is not."""
        meta, ready = {"namespace": "ml", "name": "f"}, {"type": "Ready", "reason": "AllGood"}
        well, ill = ({"conditions": [{**ready, "status": status}]} for status in ("True", "False"))
        costly = {**well, "costPerHour": self.cost} if self.cost is not None else well
        return [{"metadata": meta, "status": status} for status in (costly, {"conditions": well["conditions"]}, ill)]

    def ownerless(self) -> int:
        return 7


def meters() -> Meters:
    return Meters(Pulse())


def value(made: Meters, line: str) -> float | None:
    found = [text.rsplit(" ", 1)[1] for text in made.text().decode().splitlines() if text.rsplit(" ", 1)[0] == line]
    return float(found[0]) if found else None


def test_passes_and_their_reasons_are_counted():
    made = meters()
    made.ended(made.began(), [])
    made.ended(made.began(), ["Forbidden", "Forbidden"])
    made.ended(made.began(), ["Unavailable"], failed=True)
    assert value(made, 'fleet_operator_reconciles_total{outcome="ok"}') == 1
    assert value(made, 'fleet_operator_reconciles_total{outcome="problems"}') == 1
    assert value(made, 'fleet_operator_reconciles_total{outcome="error"}') == 1
    assert value(made, 'fleet_operator_errors_total{reason="Forbidden"}') == 2
    assert value(made, "fleet_operator_reconcile_seconds_count") == 3


def test_what_is_alerted_on_when_it_grows_is_there_before():
    """A series that begins at 1 never grew to Prometheus: the first poisoned worker woke nobody."""
    made = meters()
    rows = [line for line in RUNBOOK.read_text().splitlines() if line.startswith("| `fleet_operator_events_total`")]
    reasons = re.findall(r"`([A-Z]\w+)`", rows[0])
    assert len(reasons) == 3
    assert [value(made, f'fleet_operator_events_total{{reason="{reason}",type="Warning"}}') for reason in reasons] == [0, 0, 0]
    assert value(made, 'fleet_operator_reconciles_total{outcome="error"}') is None, "a standby makes no passes"
    made.ended(made.began(), [])
    assert value(made, 'fleet_operator_reconciles_total{outcome="error"}') == 0


def test_writes_are_counted_by_verb_kind_and_end():
    async def scenario() -> None:
        made = meters()
        write = Write("apply", POD, "ml", "a-very-particular-name")

        async def fine() -> str:
            return "made"

        async def conflict() -> None:
            raise ConflictError("no")

        assert await made.guard(write, fine) == "made"
        with pytest.raises(ConflictError):
            await made.guard(write, conflict)
        assert value(made, 'fleet_operator_api_writes_total{kind="Pod",outcome="ok",verb="apply"}') == 1
        assert value(made, 'fleet_operator_api_writes_total{kind="Pod",outcome="Conflict",verb="apply"}') == 1
        assert b"particular" not in made.text()

    asyncio.run(scenario())


def test_reasons_from_elsewhere_cannot_grow_without_bound():
    made = meters()
    for number in range(1_000):
        made.ended(made.began(), [f"Reason{number}", 'x"}\n# evil', "y" * 100])
    text = made.text().decode()
    assert text.count("fleet_operator_errors_total{") <= REASONS_MOST + 1
    assert "evil" not in text
    assert value(made, 'fleet_operator_errors_total{reason="Other"}') == 3_000 - REASONS_MOST


def test_the_rest_is_read_when_asked():
    made = meters()
    made.observe(Queue(), lambda: True, lambda: (4, 1), lambda: 5)
    assert value(made, "fleet_operator_queue_depth") == 3
    assert value(made, "fleet_operator_queue_oldest_seconds") == 1.5
    assert value(made, "fleet_operator_leader") == 1
    assert value(made, 'fleet_operator_fleets{ready="True"}') == 2
    assert value(made, 'fleet_operator_namespaces{owner="other"}') == 1
    assert value(made, "fleet_operator_namespaces_closed") == 5
    assert value(made, "fleet_operator_ownerless_pods") == 7
    assert "fleet_operator_build_info{" in made.text().decode()
    assert "fleet_operator_cost_per_hour" not in made.text().decode(), "no price is known: that is not 0"


@pytest.mark.parametrize("of_fleets", [True, False])
def test_fleets_are_shown_by_name_unless_told_otherwise(of_fleets: bool):
    made = Meters(Pulse(), of_fleets=of_fleets)
    made.observe(Queue(), lambda: True, lambda: (4, 1))
    assert ('fleet="f"' in made.text().decode()) is of_fleets
    assert value(made, 'fleet_operator_fleets{ready="True"}') == 2


def test_what_fleets_cost_is_a_figure_where_one_says_it():
    made, queue = meters(), Queue()
    queue.cost = 12.5
    made.observe(queue, lambda: True, lambda: (4, 1))
    assert value(made, "fleet_operator_cost_per_hour") == 12.5


def test_a_standby_counts_neither_fleets_nor_what_waits():
    """Its queue grew for ever, and whoever added up replicas counted every fleet twice."""
    made = meters()
    made.observe(Queue(), lambda: False, lambda: (0, 0))
    text = made.text().decode()
    assert value(made, "fleet_operator_leader") == 0
    assert not [
        word for word in ("queue_depth", "queue_oldest_seconds", "fleets", "ownerless_pods") if f"fleet_operator_{word}" in text
    ]


async def fetch(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.request(method, f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status, await answer.text()


def test_the_three_routes(unused_port: int):
    class Ill(Pulse):
        wrong: tuple[str, ...] = ()

        def ailments(self) -> tuple[str, ...]:
            return self.wrong

    async def scenario() -> None:
        pulse, readiness = Ill(), Readiness()
        async with serving(health_app(pulse, Meters(pulse), readiness), unused_port, "127.0.0.1"):
            assert await fetch(unused_port, "/readyz") == (503, "nothing is listed yet")
            readiness.missing = ""
            assert await fetch(unused_port, "/readyz") == (200, "ok")
            assert await fetch(unused_port, "/healthz") == (200, "ok")
            pulse.wrong = ("the work loop has not turned for 121 s",)
            assert await fetch(unused_port, "/healthz") == (503, "the work loop has not turned for 121 s")
            assert (await fetch(unused_port, "/metrics"))[0] == 200
            assert (await fetch(unused_port, "/healthz", "POST"))[0] == 405
            assert (await fetch(unused_port, "/"))[0] == 404

    asyncio.run(scenario())


def test_who_drips_a_body_does_not_hold_up_the_end(unused_port: int):
    """It took ten seconds and more: aiohttp reads on to answer politely."""

    async def scenario() -> None:
        pulse = Pulse()
        async with asyncio.timeout(5):
            async with serving(health_app(pulse, Meters(pulse), Readiness()), unused_port, "127.0.0.1"):
                reader, writer = await asyncio.open_connection("127.0.0.1", unused_port)
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
                assert (await reader.readline()).startswith(b"HTTP/1.1 503")
            writer.close()

    asyncio.run(scenario())


def test_port_0_serves_nothing(unused_port: int):
    async def scenario() -> None:
        pulse = Pulse()
        async with serving(health_app(pulse, Meters(pulse), Readiness()), 0):
            with pytest.raises(aiohttp.ClientConnectorError):
                await fetch(unused_port, "/healthz")

    asyncio.run(scenario())


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


# -- logs ---------------------------------------------------------------------------------------------------------------
def logged(formatter: logging.Formatter, message: str, *args: Any, **how: Any) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    log = logging.Logger("fleet.operator")
    log.addHandler(handler)
    log.warning(message, *args, **how)
    return stream.getvalue()


def test_a_json_line_has_its_fields():
    about = {"fleet": "llama", "namespace": "ml", "reason": "Forbidden", "error": "Pod x: quota", "tier": "h100", "other": 1}
    line = json.loads(logged(JsonFormatter(), "problems=%s\n%s", "a", "b", extra=about))
    assert line["message"] == "problems=a\nb"
    assert (line["level"], line["logger"]) == ("warning", "fleet.operator")
    assert {name: line[name] for name in about if name != "other"} == {k: v for k, v in about.items() if k != "other"}
    assert "other" not in line


def test_an_exception_is_one_line_too():
    try:
        raise ValueError("token=abcdefgh12345678")
    except ValueError:
        text = logged(JsonFormatter(), "failed", exc_info=sys.exc_info())
    assert text.count("\n") == 1
    line = json.loads(text)
    assert "ValueError" in line["error"]
    assert "abcdefgh12345678" not in text


CANARY = "c4n4ry" * 6
SECRETS = [
    f"Authorization: Bearer {CANARY}", f"'authorization': 'basic {CANARY}'", f"https://user:{CANARY}@prometheus:9090/api",
    f"https://{CANARY}@prometheus:9090/api", f"https://:{CANARY}@mirror/", f"https://user:p@{CANARY}@mirror/",
    f"token={CANARY}", f'"password": "{CANARY}"', f"api_key: {CANARY}", f"hf_{CANARY}",
    f"eyJhbGciOi{CANARY}.{CANARY}.{CANARY}", f"-----BEGIN PRIVATE KEY-----\n{CANARY}\n-----END PRIVATE KEY-----",
    f"-----BEGIN EC PRIVATE KEY-----\n{CANARY}",
]  # fmt: skip


@pytest.mark.parametrize("text", SECRETS)
@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_no_credential_leaves_through_a_log_line(text: str, formatter: logging.Formatter):
    assert CANARY not in logged(formatter, "before %s after", text)
    assert CANARY not in logged(formatter, "x", extra={"error": text})


@pytest.mark.parametrize(
    "text", ["fleet=ml/llama Pod llama-h100-prefill-0 created", "tokens=5", "12 tokens/s", "https://hub/x", "hf://org/m@v2"]
)
def test_ordinary_words_stay(text: str):
    assert masked(text) == text


def test_a_line_is_bounded():
    assert len(logged(JsonFormatter(), "x" * 10**6)) < 9_000
