"""`fleet explain`: records of a real router in words, asked over HTTP; what happens when nobody has one or one may not ask."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import ssl
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from e2e.certs import Authority
from fleet_cli.explain.told import told
from fleet_cli.main import main
from fleet_router.config import HedgeBounds
from tests.fleet_router.rig import CONFIG, Rig, ask, run, until
from tests.fleet_router.rig import http as http_request


def explained(rig: Rig, *arguments: str) -> Any:
    return asyncio.to_thread(main, ["explain", *arguments, "--url", f"http://127.0.0.1:{rig.port}"])


def test_a_request_is_explained_in_words(capsys: pytest.CaptureFixture[str]):
    async def go(rig: Rig) -> None:
        await rig.raw(http_request(ask(stream=True), "connection: close", "x-request-id: mine"))
        assert await explained(rig, "mine") == 0

    run(go, prefill=2)
    text = capsys.readouterr().out
    assert text.startswith("request   mine, ")
    assert "prompt 2002 bytes, stream" in text
    assert "answered  status 200, decided after 0." in text
    assert "decision  remote prefill, prefill-" in text
    assert "about 500 tokens, 500 not cached, 500 to move" in text
    assert text.count("<- chosen") == 2
    assert text.count("prefill  prefill-") == 2


def test_a_worker_that_was_passed_over_has_no_cost_and_is_told(capsys: pytest.CaptureFixture[str]):
    """Incident: with one busy worker in the fleet `fleet explain` ended with a traceback."""

    async def go(rig: Rig) -> None:
        rig.context.table.by_role["decode"][-1].free_at = rig.context.clock() + 100.0
        await rig.raw(http_request(ask(), "connection: close", "x-request-id: mine"))
        assert await explained(rig, "mine") == 0

    run(go, decode=2, config=msgspec.structs.replace(CONFIG, decide="cost"))
    text = capsys.readouterr().out
    assert sum(line.strip().startswith("decode   decode-") for line in text.splitlines()) == 2
    assert sum(line.endswith("passed over with its own prefill") for line in text.splitlines()) == 1


def test_a_prompt_that_two_were_asked_for_says_so(capsys: pytest.CaptureFixture[str]):
    config = msgspec.structs.replace(CONFIG, hedge=HedgeBounds(after=1.0, least_s=0.02))

    async def go(rig: Rig) -> None:
        async def late(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            if sum(len(worker.seen) for worker in rig.prefill) == 1:
                await until(lambda: any(worker.is_left(writer) for worker in rig.prefill if writer in worker.readers))
                return True
            return False

        rig.context.hedges.saved, rig.context.hedges.saved_tokens = 1.0, 1e6
        for worker in rig.prefill:
            worker.behave = late
        await rig.raw(http_request(ask(), "connection: close", "x-request-id: mine"))
        assert await explained(rig, "mine") == 0

    run(go, prefill=2, config=config)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "late: prefill-" in line]
    assert line.endswith(": won")


def test_what_went_wrong_with_a_second_leg_is_told():
    hedge = {"prefill": "prefill-1", "at_s": 0.1, "outcome": "failed", "why": "prefill answered 500"}
    said = told(
        {
            "request_id": "mine",
            "at": 0.0,
            "state": "answered",
            "tries": [{"at_s": 0.0, "reason": "remote prefill", "hedge": hedge}],
        }
    )
    assert "late: prefill-1 asked, too, at 0.100 s: failed, prefill answered 500" in said


def test_records_as_they_are_and_the_latest_ones(capsys: pytest.CaptureFixture[str]):
    async def go(rig: Rig) -> None:
        for _ in range(3):
            await rig.post(ask(prompt="short"))
        assert await explained(rig, "--json") == 0

    run(go)
    found = json.loads(capsys.readouterr().out)
    assert [one["state"] for one in found] == ["answered"] * 3
    assert found[0]["at"] > found[2]["at"]


def test_an_unknown_request_is_exit_code_1(capsys: pytest.CaptureFixture[str]):
    async def go(rig: Rig) -> None:
        assert await explained(rig, "nobody") == 1

    run(go)
    assert "no router has a record of request nobody" in capsys.readouterr().err


def test_a_right_is_needed_and_the_key_is_never_an_argument(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from tests.fleet_router.test_explain import KEYS, parse_tenants, tenants

    async def go(rig: Rig) -> None:
        rig.router._desk.tenants_needed = True
        rig.router.know(parse_tenants(tenants()))
        await rig.raw(http_request(ask(prompt="short"), f"authorization: Bearer {KEYS['none']}", "connection: close"))
        assert await explained(rig) == 1
        monkeypatch.setenv("FLEET_API_KEY", KEYS["none"])
        assert await explained(rig) == 1
        (tmp_path / "key").write_text(KEYS["all"] + "\n")
        assert await explained(rig, "--key-file", str(tmp_path / "key")) == 0

    run(go)
    said = capsys.readouterr()
    assert "API key" in said.err
    assert "need a key with that right" in said.err
    assert "tenant t-none" in said.out
    assert not any(key in said.out + said.err for key in KEYS.values())


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", "x", "--url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err == f"fleet: {DEAD}: {REFUSED}\n"


KUBECTL = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  *get*pods*) echo '{{"items": [{{"metadata": {{"name": "r-1"}}, "spec": {{"containers": []}}, "status": {{"phase": "Running"}}}},
                               {{"metadata": {{"name": "r-2"}}, "status": {{"phase": "Pending"}}}}]}}' ;;
  *port-forward*) echo "Forwarding from 127.0.0.1:{port} -> 8080"; exec sleep 60 ;;
esac
"""


def test_a_fleet_in_a_cluster_is_asked_by_port_forward(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """kubectl is a stand-in here: no kubelet runs in unit tests."""

    async def go(rig: Rig) -> None:
        script = tmp_path / "kubectl"
        script.write_text(KUBECTL.format(log=tmp_path / "log", port=rig.port))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        await rig.raw(http_request(ask(), "connection: close", "x-request-id: mine"))
        assert await asyncio.to_thread(main, ["explain", "mine", "--fleet", "llama", "-n", "ml"]) == 0

    run(go)
    asked = (tmp_path / "log").read_text().splitlines()
    assert asked[0].startswith("--namespace ml get pods -l inferencefleet.io/fleet=llama,inferencefleet.io/role=router")
    assert [line for line in asked if "port-forward" in line] == ["--namespace ml port-forward pod/r-1 :8080 --address 127.0.0.1"]
    assert "remote prefill" in capsys.readouterr().out


def test_a_refused_request_has_no_decision_to_tell():
    said = told(
        {"request_id": "r", "at": 0.0, "state": "refused", "status": 429, "error": {"code": "c", "reason": "r"}, "tries": []}
    )
    assert said == "request   r, 1970-01-01T00:00:00.000+00:00\nrefused   status 429, error c, reason r\n"


def test_a_pair_that_the_router_made_meet_is_told():
    one = {"reason": "remote prefill", "prefill": "p", "decode": "d", "cost_s": 0.1, "prewarmed_s": 0.75}
    said = told({"request_id": "r", "at": 0.0, "state": "ended", "tries": [one]})
    assert "p -> d, expected 0.1000 s, met before any request (0.7500 s)" in said


def test_many_candidates_are_counted():
    rows = [{"role": "decode", "worker": f"d-{i}", "cost_s": 0.1, "missing_tokens": 1, "local_s": 0.2} for i in range(11)]
    one = {"reason": "local prefill costs less", "decode": "d-9", "decided_s": 0.00002, "candidates": rows}
    said = told({"request_id": "r", "at": 0.0, "state": "running", "tries": [one]})
    assert "and 2 more" in said
    assert "with its own prefill  <- chosen" in said
    assert "decided in 20 us" in said


class Answers(http.server.BaseHTTPRequestHandler):
    """A port that is no router's, or one."""

    answer: tuple[int, object] = (200, {})
    headers_sent: Mapping[str, str] = {}

    def do_GET(self) -> None:
        body = json.dumps(self.answer[1]).encode()
        self.send_response(self.answer[0])
        for name, value in self.headers_sent.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def answering(
    status: int, body: object, tls: ssl.SSLContext | None = None, headers: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    kind = type("Answering", (Answers,), {"answer": (status, body), "headers_sent": headers})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http{'s' if tls is not None else ''}://127.0.0.1:{server.server_port}"
        server.shutdown()


RECORD = {"at": 1.0, "request_id": "r1", "state": "answered"}
DEAD = "http://127.0.0.1:9"
REFUSED = "no answer of a router (ConnectError: [Errno 111] Connection refused)"


def test_a_certificate_that_is_not_trusted_is_named_and_what_to_ask_instead(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """It was 'no answer of a router (ConnectError)', as if nobody was there."""
    files = Authority(tmp_path, "own-ca").leaf("127.0.0.1")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*files)
    with answering(200, {"decisions": [RECORD]}, tls) as url:
        assert main(["explain", "r1", "--url", url]) == 1
    said = capsys.readouterr().err
    assert "certificate verify failed" in said
    assert "its admin port (8081) answers plain HTTP" in said


@pytest.mark.parametrize("dead_first", [True, False])
def test_a_dead_router_does_not_hide_anothers_record(capsys: pytest.CaptureFixture[str], dead_first: bool):
    with answering(200, {"decisions": [RECORD]}) as alive:
        urls = [DEAD, alive] if dead_first else [alive, DEAD]
        assert main(["explain", "r1", *(part for url in urls for part in ("--url", url))]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("request   r1, ")
    assert said.err == f"fleet: {DEAD}: {REFUSED}; its records are missing here\n"


def test_records_alone_are_on_standard_output(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """`fleet explain --json 2>&-` wrote the router that is missing in front of the JSON."""
    monkeypatch.setattr("sys.stderr", None)
    with answering(200, {"decisions": [RECORD]}) as alive:
        assert main(["explain", "r1", "--json", "--url", alive, "--url", DEAD]) == 0
    assert json.loads(capsys.readouterr().out) == [RECORD]


@pytest.mark.parametrize("key", ["sk-ä", "sk-a\nsk-b", "sk-\x00"], ids=["umlaut", "two-lines", "nul"])
def test_a_key_that_no_header_takes_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, key: str):
    """It was called a router that does not answer."""
    (tmp_path / "key").write_text(key)
    assert main(["explain", "r1", "--key-file", str(tmp_path / "key")]) == 2
    assert capsys.readouterr().err == f"fleet: --key-file {tmp_path}/key: a key is one line of ASCII text\n"


def test_a_key_from_standard_input_that_is_closed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", None)
    assert main(["explain", "r1", "--key-file", "-"]) == 2
    assert capsys.readouterr().err == "fleet: --key-file -: standard input is closed\n"


def test_without_any_record_a_dead_router_is_the_answer(capsys: pytest.CaptureFixture[str]):
    """It may have been the one that had it."""
    with answering(404, {"error": {"code": "no_record"}}) as alive:
        assert main(["explain", "r1", "--url", alive, "--url", DEAD]) == 1
    assert capsys.readouterr().err == f"fleet: {DEAD}: {REFUSED}\n"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, ["not", "ours"]), (404, {"error": "none"}), (200, {"decisions": None}), (200, []), (200, {"decisions": [1]}),
        (200, {"decisions": [{"at": "noon"}]}), (500, None),
    ],
)  # fmt: skip
def test_what_no_router_says_is_one_line(capsys: pytest.CaptureFixture[str], status: int, body: object):
    with answering(status, body) as url:
        assert main(["explain", "r1", "--url", url]) == 1
        assert capsys.readouterr().err == f"fleet: {url}: no answer of a router (status {status})\n"


SILENT_KUBECTL = """#!/bin/sh
case "$*" in
  *get*pods*) echo '{{"items": [{{"metadata": {{"name": "r-1"}}, "spec": {{"containers": []}}, "status": {{"phase": "Running"}}}},
      {{"metadata": {{"name": "r-2"}}, "spec": {{"containers": []}}, "status": {{"phase": "Running"}}}},
      {{"metadata": {{"name": "r-3"}}, "spec": {{"containers": []}}, "status": {{"phase": "Running"}}}}]}}' ;;
  *r-1*) exec sleep 60 ;;
  *r-2*) echo "error: pod r-2 is gone"; exit 1 ;;
  *r-3*) echo "a warning"; echo "Forwarding from 127.0.0.1:{port} -> 8080"; exec sleep 60 ;;
esac
"""


def test_a_kubectl_that_says_nothing_is_not_waited_for_for_ever(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fleet_cli.explain.forward.FORWARD_S", 0.5)
    with answering(200, {"decisions": [RECORD]}) as url:
        script = tmp_path / "kubectl"
        script.write_text(SILENT_KUBECTL.format(port=url.rpartition(":")[2]))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        assert main(["explain", "r1", "--fleet", "llama"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("request   r1, ")
    assert "port-forward pod/r-1: it said nothing within 0.5 s; its records" in said.err
    assert "port-forward pod/r-2: error: pod r-2 is gone; its records" in said.err


TRIED = 'E1122 19:09:55.796363 1 memcache.go:265] "Unhandled Error" err="no group list"'


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("echo hello", 1, "kubectl get pods sent no list of pods: hello"),
        ("echo '[]'", 1, "kubectl get pods sent no list of pods: []"),
        ("printf '\\377'", 1, "kubectl get pods sent no list of pods: \ufffd"),
        ("printf 'who is \\377?' >&2; exit 1", 1, "kubectl: who is \ufffd?"),
        (
            f"for i in 1 2 3 4 5 6 7 8 9; do echo '{TRIED}' >&2; done; echo 'it was refused' >&2; exit 1",
            1,
            "kubectl: it was refused",
        ),
        ("exit 3", 1, "kubectl: it ended with 3 and said nothing"),
        (None, 2, "kubectl cannot be run: Permission denied"),
    ],
    ids=["text", "no-list", "bytes", "bytes-of-an-error", "tried-often", "silent", "no-program"],
)
def test_whatever_kubectl_says_is_one_line(
    script: str | None,
    code: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """All but the refused ones were tracebacks; these began in the middle of a line about an earlier try."""
    program = tmp_path / "kubectl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755 if script is not None else 0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["explain", "--fleet", "f"]) == code
    said = capsys.readouterr().err
    assert said.startswith(f"fleet: {words}")
    assert said.count("\n") == 1


@pytest.mark.parametrize("url", ["", "127.0.0.1:8080", "router", "ftp://router", "http://", "http://[::1", "http://a:b"])
def test_a_url_that_is_none_is_named(url: str, capsys: pytest.CaptureFixture[str]):
    """It was 'no answer of a router', as if one had been asked."""
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--url", url])
    assert ended.value.code == 2
    assert f"{url!r} is not http://HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["-n", "--kubeconfig", "--context"])
def test_a_cluster_without_a_fleet_is_named(option: str, capsys: pytest.CaptureFixture[str]):
    """It was passed over: this machine was asked, where nobody listens, or which has another fleet."""
    with answering(200, {"decisions": [RECORD]}) as url:
        assert main(["explain", "r1", "--url", url, option, "x"]) == 2
    said = capsys.readouterr()
    assert said.err == "fleet: -n, --kubeconfig and --context say where a fleet is: --fleet NAME is missing\n"
    assert said.out == ""


def test_an_empty_request_id_is_not_the_latest_ones(capsys: pytest.CaptureFixture[str]):
    """A shell's variable that was never set."""
    with pytest.raises(SystemExit) as ended:
        main(["explain", ""])
    assert ended.value.code == 2
    assert "'' is not a request id" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"at": 1e30},
        {"at": 10**400},
        {"at": float("nan")},
        {"tries": 3},
        {"tries": [{}]},
        {"error": "none"},
        {"tries": [{"reason": "r", "cost_s": "1"}]},
    ],
)
def test_a_record_that_cannot_be_told_is_named_and_hides_no_other(change: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    """Of a router of another version, or of no router: a traceback came instead of both."""
    odd = {**RECORD, "request_id": "odd", **change}
    with answering(200, {"decisions": [odd, RECORD]}) as url:
        assert main(["explain", "--url", url]) == 1
        said = capsys.readouterr()
        assert "request   r1, 1970-" in said.out
        assert said.err.count("\n") == 1
        assert said.err.startswith(
            "fleet: the record of request odd cannot be told in words (is the router of another version?): "
        )
        assert main(["explain", "--url", url, "--json"]) == 0


def test_what_clients_named_moves_no_cursor(capsys: pytest.CaptureFixture[str]):
    """A request's name and path are its client's words; the terminal is the operator's."""
    with answering(200, {"decisions": [{**RECORD, "request_id": "a\x1b[2J\x9b1Ab", "path": "/v1/ü\nx"}]}) as url:
        assert main(["explain", "--url", url]) == 0
    assert capsys.readouterr().out.startswith(r"request   a\x1b[2J\x9b1Ab, 1970-01-01T00:00:01.000+00:00, /v1/ü\nx" + "\n")
