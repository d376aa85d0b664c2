"""History and undo: what is restored, what stays, and that going back really gives the old revision."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

import pytest

from fleet_api.parse import parse_fleet
from fleet_cli.errors import InputError
from fleet_cli.main import main
from fleet_cli.rollout.history import Entry, entries, previous, progress, returned, table
from fleet_operator.render.revision import RESTARTED_AT, revision_inputs, revision_of
from tests.fleet_operator.world import manifest


def inputs(fleet: dict[str, Any]) -> dict[str, Any]:
    parsed = parse_fleet(fleet)
    return revision_inputs(parsed, parsed.spec.tiers[0])


def tier(**more: Any) -> dict[str, Any]:
    return {"name": "t", "accelerator": {"type": "h100", "count": 2}, **more}


OLD = manifest(
    engine={"type": "vllm", "args": ["--x"]}, limits={"maxOutputTokens": 9, "maxInputTokens": 5}, rollout={"drainTimeout": "9s"},
    tiers=[tier(decode={"maxReplicas": 4}, kvTransfer={"transport": "tcp"})],
)  # fmt: skip
NEW = manifest(
    model={"source": "file:///other"}, engine={"maxBatch": 3}, limits={"maxInputTokens": 7}, rollout={"paused": True},
    tiers=[tier(decode={"maxReplicas": 6, "warm": 1}, ratio={"decode": 3})],
)  # fmt: skip


def test_undo_restores_what_pods_are_made_from_and_nothing_else():
    back = returned(NEW, "t", inputs(OLD))
    assert inputs(back) == inputs(OLD)
    assert back["spec"]["tiers"][0]["decode"] == {"maxReplicas": 6, "warm": 1}
    assert back["spec"]["tiers"][0]["ratio"] == {"decode": 3}
    assert back["spec"]["limits"] == {"maxInputTokens": 7, "maxOutputTokens": 9}
    assert back["spec"]["rollout"] == {"paused": True, "drainTimeout": "9s"}
    assert inputs(returned(back, "t", inputs(NEW))) == inputs(NEW)


def test_undo_keeps_labels_of_pods_which_belong_to_no_revision():
    marked = manifest(tiers=[tier(decode={"podTemplate": {"labels": {"team": "a"}, "priorityClassName": "low"}})])
    before = manifest(tiers=[tier(decode={"podTemplate": {"priorityClassName": "high"}})])
    back = returned(marked, "t", inputs(before))
    assert back["spec"]["tiers"][0]["decode"]["podTemplate"] == {"labels": {"team": "a"}, "priorityClassName": "high"}


def test_undo_of_a_restart_goes_back_to_the_revision_before_it():
    restarted = manifest()
    restarted["metadata"]["annotations"] = {RESTARTED_AT: "2026-11-21T00:00:00Z", "mine": "stays"}
    back = returned(restarted, "t", inputs(manifest()))
    assert back["metadata"]["annotations"] == {"mine": "stays"}
    again = returned(back, "t", inputs(restarted))
    assert inputs(again) == inputs(restarted)


def entry(number: int, revision: str) -> Entry:
    return Entry("t", number, revision, "", {})


FOUND = [entry(1, "aaaaaaaa"), entry(2, "bbbbbbbb"), entry(3, "cccccccc")]


@pytest.mark.parametrize(
    ("status", "number", "goal"),
    [
        pytest.param({"revision": "cccccccc"}, None, "bbbbbbbb", id="the-one-before"),
        pytest.param({"revision": "aaaaaaaa"}, None, "cccccccc", id="the-newest-other"),
        pytest.param({"revision": "bbbbbbbb", "rollout": {"failed": "cccccccc"}}, None, "bbbbbbbb", id="not-the-failed-one"),
        pytest.param({"revision": "cccccccc"}, 1, "aaaaaaaa", id="by-number"),
        pytest.param(
            {"revision": "cccccccc", "rollout": {"stable": "aaaaaaaa", "target": "cccccccc"}},
            None,
            "aaaaaaaa",
            id="what-served-before-a-rollout-that-goes-on",
        ),
        pytest.param(
            {"revision": "cccccccc", "rollout": {"stable": "cccccccc", "previous": "aaaaaaaa"}},
            None,
            "aaaaaaaa",
            id="what-served-before-it-and-not-what-was-left-before",
        ),
        pytest.param(
            {"revision": "aaaaaaaa", "rollout": {"stable": "aaaaaaaa", "target": "aaaaaaaa", "failed": "cccccccc"}},
            None,
            "aaaaaaaa",
            id="while-it-rolls-back",
        ),
        pytest.param(
            {"revision": "cccccccc", "rollout": {"stable": "cccccccc", "previous": "99999999"}},
            None,
            "bbbbbbbb",
            id="what-is-not-stored-any-more",
        ),
    ],
)
def test_which_revision_is_returned_to(status: dict[str, Any], number: int | None, goal: str):
    fleet = {"status": {"tiers": [{"name": "t", **status}]}}
    assert previous(FOUND, fleet, "t", number).revision == goal


def test_an_undo_of_what_was_rolled_back_or_not_begun_leaves_what_serves_alone() -> None:
    """Incident: it took the fleet from the good revision, to which a canary had gone back, to the one before that."""
    held = manifest(engine={"maxBatch": 3}, rollout={"paused": True})
    parsed = parse_fleet(held)
    mine = [entry(1, "aaaaaaaa"), entry(2, "bbbbbbbb"), entry(3, revision_of(parsed, parsed.spec.tiers[0]))]
    waiting = {**held, "status": {"tiers": [{"name": "t", "revision": "bbbbbbbb", "rollout": {"stable": "bbbbbbbb"}}]}}
    assert previous(mine, waiting, "t", None).revision == "bbbbbbbb"
    waiting["spec"] = {**held["spec"], "rollout": {}}
    failed = {"failed": mine[2].revision, "stable": "bbbbbbbb", "previous": "aaaaaaaa"}
    waiting["status"] = {"tiers": [{"name": "t", "revision": "bbbbbbbb", "rollout": failed}]}
    assert previous(mine, waiting, "t", None).revision == "bbbbbbbb"


def test_what_is_not_stored_is_named():
    with pytest.raises(InputError, match="tier t has no revision 9; stored are: 1, 2, 3"):
        previous(FOUND, {}, "t", 9)
    with pytest.raises(InputError, match="no other revision"):
        previous(FOUND[:1], {"status": {"tiers": [{"name": "t", "revision": "aaaaaaaa"}]}}, "t", None)


def test_the_history_marks_what_runs():
    fleet = {"status": {"tiers": [{"name": "t", "rollout": {"stable": "bbbbbbbb", "failed": "cccccccc"}}]}}
    lines = table(FOUND, fleet).splitlines()
    assert [line.split()[2:] for line in lines[1:]] == [["aaaaaaaa"], ["bbbbbbbb", "stable"], ["cccccccc", "rolled", "back"]]


def test_foreign_objects_are_passed_over():
    assert entries([{"metadata": {"name": "x"}, "revision": 1, "data": {}}]) == []
    half = {"name": "x", "labels": {"inferencefleet.io/tier": "t"}}
    assert entries([{"metadata": half, "revision": 1, "data": {"inputs": {}}}]) == []


@pytest.mark.parametrize(
    ("reason", "generation", "over", "failed"),
    [
        ("Complete", 1, True, False),
        ("Progressing", 1, False, False),
        ("RolledBack", 1, True, True),
        ("Complete", 2, False, False),
    ],
)
def test_progress(reason: str, generation: int, over: bool, failed: bool):
    condition = {"type": "RollingOut", "reason": reason, "message": "words"}
    fleet = {"metadata": {"generation": generation}, "status": {"observedGeneration": 1, "conditions": [condition]}}
    assert progress(fleet)[1:] == (over, failed)


@pytest.mark.parametrize("reason", ["Progressing", "Complete", "Deleting", "HeldByFinalizer"])
def test_the_rollout_of_a_deleted_fleet_that_is_still_there_is_over(reason: str):
    """It was followed for as long as --timeout lets, and one that had been complete was told as such."""
    conditions = [{"type": "RollingOut", "status": "False", "reason": reason, "message": "words"}]
    meta = {"generation": 1, "deletionTimestamp": "2026-01-01T00:00:00Z"}
    told = progress({"metadata": meta, "status": {"observedGeneration": 1, "conditions": conditions}})
    assert told == ("the fleet is deleted: nothing is rolled out any more", True, True)


def test_a_spec_that_the_operator_refuses_is_no_rollout_that_is_complete():
    """The condition of the rollout stands as the last accepted spec left it: a pipeline was told that its change is out."""
    refused = {"type": "Accepted", "status": "False", "reason": "Invalid", "message": "spec.tiers[0]: wrong"}
    conditions = [refused, {"type": "RollingOut", "reason": "Complete", "message": "words"}]
    fleet = {"metadata": {"generation": 2}, "status": {"observedGeneration": 2, "conditions": conditions}}
    assert progress(fleet) == ("Invalid: spec.tiers[0]: wrong", True, True)
    assert progress({**fleet, "status": {**fleet["status"], "observedGeneration": 1}})[1] is False


def test_a_status_that_somebody_edited_is_no_traceback():
    """Of a condition the CRD asks for its type alone, of a tier's status for nothing."""
    conditions = [{"type": "Accepted", "status": "False"}, {"type": "RollingOut", "status": "True"}]
    fleet = {"metadata": {"generation": 1}, "status": {"observedGeneration": 1, "conditions": conditions, "tiers": [{}]}}
    assert progress(fleet) == ("no reason: ", True, True)
    fleet["status"]["conditions"] = conditions[1:]
    assert progress(fleet) == ("no reason: ", False, False)
    found = [Entry("t", 1, "aaaaaaaa", "", {}), Entry("t", 2, "bbbbbbbb", "", {})]
    assert previous(found, fleet, "t", None).number == 2
    assert len(table(found, fleet).splitlines()) == 3


KUBECONFIG = """
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: u, user: {}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
"""


@pytest.mark.parametrize(
    ("kubeconfig", "code", "words"),
    [
        (KUBECONFIG, 1, "no answer of the API server at http://127.0.0.1:1: Failed to establish a new connection: [Errno 111]"),
        ("clusters: [", 2, "no usable kubeconfig"),
        ("[]", 2, "no usable kubeconfig"),
        (None, 2, "no usable kubeconfig"),
    ],
    ids=["nobody-listens", "no-yaml", "no-kubeconfig", "a-folder"],
)
def test_a_cluster_that_cannot_be_asked_is_one_line(
    kubeconfig: str | None, code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path if kubeconfig is None else tmp_path / "config"
    if kubeconfig is not None:
        path.write_text(kubeconfig)
    assert main(["rollout", "status", "f", "--kubeconfig", str(path), "--timeout", "0"]) == code
    said = capsys.readouterr().err
    assert said.startswith(f"fleet: {words}")
    assert said.count("\n") == 1


def test_a_kubeconfig_that_was_given_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Of a path with a mistake in it nothing was said but that no configuration was found."""
    assert main(["rollout", "status", "f", "--kubeconfig", str(tmp_path / "confg")]) == 2
    assert capsys.readouterr().err.startswith(f"fleet: no usable kubeconfig {tmp_path}/confg: ")


FORBIDDEN = b'{"kind":"Status","code":403,"message":"inferencefleets is forbidden: User \\"u\\" cannot get resource"}'
FLEET = b'{"metadata":{"name":"f"},"spec":{"tiers":[{"name":"t"}]}}'


@pytest.fixture
def answers(tmp_path: Path) -> Iterator[Callable[[int, str, bytes], str]]:
    """Starts what answers everything alike; the path of a kubeconfig for it."""
    servers: list[HTTPServer] = []

    def start(status: int, kind: str, body: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                return

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        Thread(target=servers[0].serve_forever, daemon=True).start()
        path = tmp_path / "config"
        path.write_text(KUBECONFIG.replace("127.0.0.1:1", f"127.0.0.1:{servers[0].server_port}"))
        return str(path)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("action", "answer", "words"),
    [
        ("status", (200, "text/html", b"<html>sign in</html>"), "is no API server: it sent no fleet f"),
        ("undo", (200, "application/json", b"<html>sign in</html>"), "is no API server: it sent no"),
        ("pause", (200, "application/json", b"null"), "is no API server: it sent no fleet f"),
        ("history", (200, "application/json", FLEET), "is no API server: it sent no list of revisions"),
        ("pause", (403, "application/json", FORBIDDEN), 'User "u" cannot get resource'),
        ("pause", (502, "text/html", b"<html>"), "Bad Gateway (fleet f"),
    ],
    ids=["a-portal", "that-says-json", "null", "no-list", "a-missing-right", "a-proxy"],
)
def test_what_an_api_server_says_is_one_line(
    answers: Callable[[int, str, bytes], str],
    action: str,
    answer: tuple[int, str, bytes],
    words: str,
    capsys: pytest.CaptureFixture[str],
):
    """A portal that answers 200 with a page was a traceback; of a refusal only the status was told, not the right or field."""
    assert main(["rollout", action, "f", "-n", "n", "--kubeconfig", answers(*answer)]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("arguments", [["", "--timeout", "0"], ["f", "--timeout", "nan"]], ids=["no-name", "no-time"])
def test_what_could_only_wait_for_ever_is_refused(arguments: list[str]):
    with pytest.raises(SystemExit) as ended:
        main(["rollout", "status", *arguments])
    assert ended.value.code == 2


class Api(HTTPServer):
    """Says one thing after another, the last for ever, and keeps what it was asked. None: it says nothing."""

    def __init__(self, *says: tuple[int, bytes] | None) -> None:
        self.asked: list[str] = []
        ended = self.ended = Event()

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.do_GET()

            def do_GET(self) -> None:
                api = cast(Api, self.server)
                said = says[min(len(api.asked), len(says) - 1)]
                api.asked.append(self.path)
                if said is None:
                    ended.wait(10)
                    return
                self.send_response(said[0])
                self.send_header("content-length", str(len(said[1])))
                self.end_headers()
                self.wfile.write(said[1])

            def log_message(self, *_: object) -> None:
                return

        super().__init__(("127.0.0.1", 0), Handler)

    def kubeconfig(self, folder: Path, contexts: str = "[{name: x, context: {cluster: c, user: u}}]") -> str:
        path = folder / "config"
        text = KUBECONFIG.replace("127.0.0.1:1", f"127.0.0.1:{self.server_port}")
        path.write_text(text.replace("[{name: x, context: {cluster: c, user: u}}]", contexts))
        return str(path)

    def __enter__(self) -> Api:
        Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.shutdown()
        self.server_close()


def rolling(reason: str) -> tuple[int, bytes]:
    conditions = [{"type": "RollingOut", "status": "True", "reason": reason, "message": "words"}]
    return 200, json.dumps({"metadata": {"name": "f"}, "spec": {}, "status": {"conditions": conditions}}).encode()


@pytest.mark.parametrize(
    ("contexts", "more", "asked"),
    [
        ("[{name: x, context: {cluster: c, namespace: here}}, {name: y, context: {cluster: c, namespace: there}}]", (), "here"),
        (
            "[{name: x, context: {cluster: c, namespace: here}}, {name: y, context: {cluster: c, namespace: there}}]",
            ("--context", "y"),
            "there",
        ),
        ("[{name: x, context: {cluster: c, namespace: here}}, {name: y, context: {cluster: c}}]", ("--context", "y"), "default"),
        ('[{name: x, context: {cluster: c, namespace: ""}}]', (), "default"),
        ("[{name: x, context: {cluster: c, namespace: here}}]", ("-n", "mine"), "mine"),
    ],
    ids=["the-current-one", "another", "another-that-names-none", "an-empty-name", "as-asked"],
)
def test_the_namespace_is_the_one_of_the_context_that_was_asked_for(
    contexts: str, more: tuple[str, ...], asked: str, tmp_path: Path
):
    """With --context the namespace of the current context was taken: `undo` went to a fleet of another namespace."""
    with Api(rolling("Complete")) as api:
        assert main(["rollout", "status", "f", *more, "--kubeconfig", api.kubeconfig(tmp_path, contexts)]) == 0
    assert api.asked == [f"/apis/inferencefleet.io/v1alpha1/namespaces/{asked}/inferencefleets/f"]


def test_an_api_server_that_says_nothing_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """`--timeout` ended nothing: the request itself had no bound."""
    monkeypatch.setattr("fleet_cli.rollout.command.WITHIN_S", (10.0, 0.1))
    with Api(None) as api:
        assert main(["rollout", "status", "f", "--timeout", "0", "--kubeconfig", api.kubeconfig(tmp_path)]) == 1
    assert "Read timed out" in capsys.readouterr().err


def test_who_follows_a_rollout_waits_for_an_api_server_that_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """One 503 in the middle told a pipeline that its rollout had failed."""
    monkeypatch.setattr("fleet_cli.rollout.command.WATCH_S", 0.0)
    with Api(rolling("Progressing"), (503, b"{}"), (503, b"{}"), rolling("Complete")) as api:
        assert main(["rollout", "status", "f", "--kubeconfig", api.kubeconfig(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out == "Progressing: words\nComplete: words\n"
    assert said.err.count("asking again") == said.err.count("\n") == 1


def test_who_stops_waiting_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It ended with 1 and no word of why, as one that failed does."""
    with Api(rolling("Progressing")) as api:
        assert main(["rollout", "status", "f", "--timeout", "0", "--kubeconfig", api.kubeconfig(tmp_path)]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("Progressing: words\n", "fleet: the rollout of fleet f is not over after 0 s (--timeout)\n")


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        ((404, b"404 page not found\n"), 1, "has no InferenceFleets"),
        ((404, b'{"kind": "Status", "message": "not found"}'), 2, "no fleet f in namespace default"),
        ((503, b"{}"), 1, "Service Unavailable"),
    ],
    ids=["no-crds", "no-fleet", "at-first"],
)
def test_what_is_not_there_is_named(
    said: tuple[int, bytes], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Where the CRDs are not installed, a fleet was told to be missing."""
    with Api(said) as api:
        assert main(["rollout", "status", "f", "--kubeconfig", api.kubeconfig(tmp_path)]) == code
    assert words in capsys.readouterr().err


MODIFIED = 409, b'{"kind": "Status", "message": "the object has been modified"}'


@pytest.mark.parametrize(
    ("conflicts", "code", "asked", "words"),
    [(0, 0, 2, "rollouts are paused"), (2, 0, 6, "rollouts are paused"), (9, 1, 10, "the object has been modified")],
    ids=["at-once", "again", "not-for-ever"],
)
def test_a_status_that_is_written_meanwhile_is_no_reason_to_refuse_a_pause(
    conflicts: int, code: int, asked: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A rollout writes a status each second, and who wanted to stop it was told that the object has been modified."""
    fleet = rolling("Progressing")
    with Api(*(fleet, MODIFIED) * conflicts, fleet, fleet) as api:
        assert main(["rollout", "pause", "f", "--kubeconfig", api.kubeconfig(tmp_path)]) == code
    said = capsys.readouterr()
    assert words in said.out + said.err
    assert len(api.asked) == asked


def test_a_restart_of_a_paused_fleet_says_what_it_waits_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It said that every worker is replaced, and none was."""
    for paused in (True, False):
        fleet = {"metadata": {"name": "f"}, "spec": {"rollout": {"paused": paused}}}
        with Api((200, json.dumps(fleet).encode())) as api:
            assert main(["rollout", "restart", "f", "--kubeconfig", api.kubeconfig(tmp_path)]) == 0
        assert ("rollouts are paused: it begins after `fleet rollout resume f`" in capsys.readouterr().out) is paused
