"""The Kubernetes store against a scripted API server: pages, cuts, 410 Gone, errors in the server's words."""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from fleet_operator.cluster.interface import (
    CONFIG_MAP,
    ConflictError,
    CredentialsRefusedError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    UnauthorizedError,
    UnavailableError,
)
from fleet_operator.cluster.kube import KubeCluster
from fleet_operator.cluster.kube_http import Backoff, GoneError, KubeHttp, KubeLimits, as_go_writes, error_of, split_lines

FAST = KubeLimits(backoff_base_s=0.001, backoff_cap_s=0.01, page=2, silence_s=5)


def item(name, version, uid="u"):
    return {"metadata": {"name": name, "namespace": "d", "resourceVersion": str(version), "uid": uid, "managedFields": [{}]}}


def change(kind, obj):
    return {"type": kind, "object": {"apiVersion": "v1", "kind": "ConfigMap", **obj}}


def page(items, version, more=None):
    return {"metadata": {"resourceVersion": str(version), **({"continue": more} if more else {})}, "items": items}


class Script:
    """Answers requests in order: a dict is a page, a list is a watch that then ends, an int is an HTTP error."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.queries = []

    async def handle(self, request):
        self.queries.append(dict(request.query))
        if not self.answers:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            return web.json_response({"message": f"answer {answer}"}, status=answer)
        if isinstance(answer, list):
            lines = "".join(json.dumps(line) + "\n" for line in answer)
            return web.Response(text=lines)
        return web.json_response(answer)


@contextlib.asynccontextmanager
async def talking_to(script, limits=FAST, clock=time.monotonic):
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", script.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    configuration = Configuration()
    configuration.host = "http://127.0.0.1:" + str(runner.addresses[0][1])
    cluster = KubeCluster(KubeHttp(configuration, limits, clock=clock), limits)
    try:
        yield cluster
    finally:
        await cluster.close()
        await runner.cleanup()


async def watched(cluster, count):
    events = cluster.watch(CONFIG_MAP, "d", {"a": "b", "c": "d"})
    async with asyncio.timeout(10), contextlib.aclosing(events):
        found = [await anext(events) for _ in range(count)]
    return [(event.type, event.object["metadata"]["name"] if event.object else "") for event in found]


def scenario(script, count):
    async def run():
        async with talking_to(script) as cluster:
            return await watched(cluster, count)

    return asyncio.run(run())


def test_a_list_reads_page_by_page():
    script = Script(page([item("b", 1), item("c", 2)], 5, "next"), page([item("a", 3)], 5))

    async def run():
        async with talking_to(script) as cluster:
            return await cluster.list(CONFIG_MAP)

    found = asyncio.run(run())
    assert [obj["metadata"]["name"] for obj in found] == ["a", "b", "c"]
    assert "managedFields" not in found[0]["metadata"]
    assert script.queries == [{"limit": "2"}, {"limit": "2", "continue": "next"}]


def test_watches_take_no_connection_from_requests():
    """One for each kind and namespace: of six namespaces (66 watches) the last never began, and no request had a connection any
    more. The operator became ready of five namespaces, and of six never."""
    begun = []

    async def handle(request):
        if "watch" in request.query:
            answer = web.StreamResponse()
            await answer.prepare(request)
            begun.append(request)
            await asyncio.Event().wait()
        return web.json_response(page([], 5))

    script = Script()
    script.handle = handle

    async def follow(cluster):
        async for _ in cluster.watch(CONFIG_MAP):
            pass

    async def run():
        async with talking_to(script, dataclasses.replace(FAST, connections=2, request_s=1)) as cluster:
            watching = [asyncio.create_task(follow(cluster)) for _ in range(3)]
            async with asyncio.timeout(5):
                while len(begun) < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert await cluster.list(CONFIG_MAP) == []
            for one in watching:
                one.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    asyncio.run(run())


def test_versions_of_no_objects():
    script = Script(page(None, 5))  # so does kube-apiserver write an empty list of metadata

    async def run():
        async with talking_to(script) as cluster:
            return await cluster.versions(CONFIG_MAP)

    found = asyncio.run(run())
    assert (found.versions, found.version) == ({}, "5")


@pytest.mark.parametrize("ask", ["versions", "list"])
def test_an_answer_that_is_none_is_tried_again(ask):
    async def handle(request):
        return web.Response(text="<html>the way in is over there</html>")

    script = Script()
    script.handle = handle

    async def run():
        async with talking_to(script) as cluster:
            with pytest.raises(UnavailableError, match="not an answer of an API server"):
                await getattr(cluster, ask)(CONFIG_MAP)

    asyncio.run(run())


def test_a_list_whose_continue_token_expired_starts_again():
    script = Script(page([item("old", 1)], 5, "next"), 410, page([item("new", 7)], 8))

    async def run():
        async with talking_to(script) as cluster:
            return await cluster.list(CONFIG_MAP)

    assert [obj["metadata"]["name"] for obj in asyncio.run(run())] == ["new"]


def test_a_watch_that_ends_goes_on_from_the_last_version():
    bookmark = change("BOOKMARK", {"metadata": {"resourceVersion": "20"}})
    script = Script(page([item("a", 1)], 10), [change("MODIFIED", item("a", 12)), bookmark], [change("ADDED", item("b", 21))])
    assert scenario(script, 4) == [("ADDED", "a"), ("SYNCED", ""), ("MODIFIED", "a"), ("ADDED", "b")]
    assert [query.get("resourceVersion") for query in script.queries] == [None, "10", "20"]
    assert script.queries[1]["allowWatchBookmarks"] == "true"
    assert script.queries[0]["labelSelector"] == "a=b,c=d"


def test_a_version_that_is_gone_lists_again_and_tells_only_the_difference():
    gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}
    script = Script(
        page([item("kept", 1), item("gone", 2)], 10),
        [gone],
        page([item("kept", 1), item("made", 11), item("again", 12, "v")], 15),
        [change("DELETED", item("kept", 16))],
    )
    told = scenario(script, 7)
    assert told[:3] == [("ADDED", "kept"), ("ADDED", "gone"), ("SYNCED", "")]
    assert sorted(told[3:6]) == [("ADDED", "again"), ("ADDED", "made"), ("DELETED", "gone")]
    assert told[6] == ("DELETED", "kept")


@pytest.mark.parametrize("ask", ["watch", "list"])
def test_versions_that_are_gone_again_and_again_are_listed_ever_less_often(ask, monkeypatch):
    """A server that knows none of its own versions any more was asked for all objects as fast as it answered."""
    paused, gone = [], {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}

    async def pause(self, error):
        paused.append(type(error))

    monkeypatch.setattr(Backoff, "pause", pause)
    listed = page([item("a", 1)], 10)
    if ask == "watch":
        script = Script(listed, [gone], listed, [gone], listed, [gone], listed, [change("MODIFIED", item("a", 12))])
        assert scenario(script, 3) == [("ADDED", "a"), ("SYNCED", ""), ("MODIFIED", "a")]
    else:
        more = page([item("a", 1)], 10, "next")

        async def run():
            async with talking_to(Script(more, 410, more, 410, more, 410, listed)) as cluster:
                return await cluster.list(CONFIG_MAP)

        assert [obj["metadata"]["name"] for obj in asyncio.run(run())] == ["a"]
    assert paused == [GoneError] * 3


def test_a_watch_outlives_a_server_that_is_away():
    script = Script(503, page([item("a", 1)], 10), 500, 429, [change("MODIFIED", item("a", 12))])
    assert scenario(script, 3) == [("ADDED", "a"), ("SYNCED", ""), ("MODIFIED", "a")]
    assert [query.get("resourceVersion") for query in script.queries] == [None, None, "10", "10", "10"]


@pytest.mark.parametrize(
    "line",
    [
        {}, [], 5, {"kind": "Status", "status": "Failure"}, {"type": "ADDED"}, {"type": "ADDED", "object": {}},
        {"type": "MODIFIED", "object": {"metadata": {"name": "b"}}}, {"type": "ERROR", "object": {"code": "x"}},
        {"type": "ERROR", "object": None},
    ],
)  # fmt: skip
def test_a_line_that_is_no_event_interrupts_the_watch(line):
    """What a proxy says in JSON ended the process with a KeyError."""
    script = Script(page([item("a", 1)], 10), [line], [change("MODIFIED", item("a", 12))])
    assert scenario(script, 3) == [("ADDED", "a"), ("SYNCED", ""), ("MODIFIED", "a")]
    assert script.queries[2]["resourceVersion"] == "10"


@pytest.mark.parametrize("answer", [{}, {"metadata": {}}, {"metadata": {"resourceVersion": "1"}, "items": [5]}, {"items": []}])
def test_a_page_that_is_none_is_asked_for_again(answer):
    assert scenario(Script(answer, page([item("a", 1)], 10)), 2) == [("ADDED", "a"), ("SYNCED", "")]


def test_what_is_no_page_says_nothing_of_an_object():
    """A fleet whose API server was behind a proxy was gone, as far as its pass could see."""

    async def run():
        async with talking_to(Script({"kind": "Status", "status": "Failure"})) as cluster:
            with pytest.raises(UnavailableError, match="not a list"):
                await cluster.find(CONFIG_MAP, "d", "a")

    asyncio.run(run())


@pytest.mark.parametrize("answer", [{}, {"metadata": {}}, {"metadata": 5}, "well"])
@pytest.mark.parametrize("verb", ["get", "apply", "create", "patch", "patch_status"])
def test_what_is_no_object_is_no_answer(verb, answer):
    """A proxy's words in JSON ended the process with a KeyError where the lease, a claim or a certificate was read."""
    wish, where = {**item("a", 1), "apiVersion": "v1", "kind": "ConfigMap"}, (CONFIG_MAP, "d", "a")

    async def run():
        async with talking_to(Script(answer)) as cluster:
            await {
                "get": lambda: cluster.get(*where),
                "apply": lambda: cluster.apply(wish),
                "create": lambda: cluster.create(wish),
                "patch": lambda: cluster.patch(*where, {}),
                "patch_status": lambda: cluster.patch_status(*where, {}),
            }[verb]()

    with pytest.raises(UnavailableError, match="not an object of an API server"):
        asyncio.run(run())


def test_a_first_list_that_is_forbidden_is_retried_and_one_of_an_unknown_kind_is_raised():
    assert scenario(Script(403, page([], 1)), 1) == [("SYNCED", "")]
    with pytest.raises(NotFoundError, match="answer 404"):
        scenario(Script(404), 1)


def test_a_kind_that_vanishes_later_is_listed_again():
    script = Script(page([item("a", 1)], 10), 404, page([], 11))
    assert scenario(script, 3) == [("ADDED", "a"), ("SYNCED", ""), ("DELETED", "a")]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, InvalidError),
        (401, ForbiddenError),
        (403, ForbiddenError),
        (404, NotFoundError),
        (409, ConflictError),
        (410, GoneError),
        (413, InvalidError),
        (422, InvalidError),
        (429, UnavailableError),
        (500, UnavailableError),
        (504, UnavailableError),
    ],
)
def test_errors_carry_the_servers_words(status, error):
    found = error_of(status, b'{"kind": "Status", "message": "spec.replicas: Invalid value"}')
    assert type(found) is error
    assert str(found) == "spec.replicas: Invalid value"


def told_of(answers, limits=FAST, clock=time.monotonic):
    """What each of as many requests is told."""

    async def run():
        told = []
        async with talking_to(Script(*answers), limits, clock) as cluster:
            for _ in answers:
                try:
                    told.append(await cluster.list(CONFIG_MAP))
                except ForbiddenError as error:
                    told.append(error)
                except UnavailableError as error:
                    told.append(error)
        return told

    return asyncio.run(run())


def test_credentials_that_are_refused_for_a_moment_may_be_taken_in_the_next():
    """A single-namespace operator ended (exit 2) at one 401 of an API server that had just started."""
    first, then, again, no_right = told_of([401, page([], 1), 401, 403])
    assert [type(error) for error in (first, again)] == [UnauthorizedError] * 2
    assert (then, type(no_right)) == ([], ForbiddenError)
    assert (first.reason, first.retry) == ("Unauthorized", True)
    assert "refuses our credentials (answer 401); after 60 s of that they are taken for wrong" in str(first)


def test_credentials_that_are_refused_for_long_are_wrong():
    limits = dataclasses.replace(FAST, refused_s=0.0)
    (error,) = told_of([401], limits)
    assert (type(error), error.reason) == (CredentialsRefusedError, "Unauthorized")
    assert "has refused our credentials for 0 s: answer 401" in str(error)


def test_only_an_answer_to_somebody_known_ends_the_time_of_refusals():
    told = told_of([401, 401, 401, 403, 401, 401], clock=iter((100.0, 130.0, 161.0, 200.0, 230.0)).__next__)
    kinds = [UnauthorizedError, UnauthorizedError, CredentialsRefusedError, ForbiddenError, UnauthorizedError, UnauthorizedError]
    assert [type(error) for error in told] == kinds


def test_an_unknown_field_is_invalid_although_the_server_says_500():
    words = "failed to create typed patch object (d/x; v1, Kind=Pod): .spec.colour: field not declared in schema"
    found = error_of(500, json.dumps({"message": words}).encode())
    assert (type(found), str(found), found.retry) == (InvalidError, words, False)


@pytest.mark.parametrize("body", [b"", b"not json", b"[]", b"\xff"])
def test_an_answer_that_is_no_status_still_makes_a_message(body):
    assert str(error_of(502, body))


def test_a_kind_that_a_cluster_does_not_have_is_told_as_such():
    """So kube-apiserver answers for a group that it does not serve: "404 page not found" was all that a fleet's status said."""
    found = error_of(404, b"404 page not found\n")
    assert (type(found), str(found)) == (
        NotFoundError,
        "this cluster's API server has no such kind of object, or its CRD is not applied (404 page not found)",
    )


def test_retry_after_is_kept():
    found = error_of(429, b"{}", "7")
    assert isinstance(found, UnavailableError)
    assert found.retry_after_s == 7


def test_nobody_listening_is_unavailable():
    async def run():
        configuration = Configuration()
        configuration.host = "http://127.0.0.1:1"
        cluster = KubeCluster(KubeHttp(configuration, FAST), FAST)
        try:
            await cluster.get(CONFIG_MAP, "d", "x")
        finally:
            await cluster.close()

    with pytest.raises(UnavailableError, match="ClientConnectorError"):
        asyncio.run(run())


@pytest.mark.parametrize(
    "chunks",
    [
        [b'{"a":1}\n{"b":2}\n'],
        [b'{"a"', b":1}", b'\n{"b":2}', b"\n"],
        [b'{"a":1}\n{"b":2}\n{"c":'],
        [bytes([byte]) for byte in b'{"a":1}\n{"b":2}\n'],
    ],
)
def test_lines_of_a_watch_come_whole_out_of_any_chunks(chunks):
    async def arriving() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def go():
        return [line async for line in split_lines(arriving(), 100)]

    assert asyncio.run(go()) == [b'{"a":1}', b'{"b":2}']


def test_a_line_of_a_watch_has_a_bound():
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 30

    async def go():
        return [line async for line in split_lines(endless(), 100)]

    with pytest.raises(ValueError, match="longer than 100 bytes"):
        asyncio.run(go())


@pytest.mark.parametrize(
    ("body", "written"),
    [
        ({"b": {"d": [1, "x"], "c": None}, "a": True}, '{"a":true,"b":{"c":null,"d":[1,"x"]}}'),
        ({"price": 4.25, "small": 1e-7}, '{"price":4.25,"small":1e-7}'),
        ([{"op": "add", "value": "<a>&b"}], '[{"op":"add","value":"\\u003ca\\u003e\\u0026b"}]'),
        ({"a": "\u2028\u2029\x01\n\\", "ü": "é"}, '{"a":"\\u2028\\u2029\\u0001\\n\\\\","ü":"é"}'),
        ({"text": "1.0,2.0"}, '{"text":"1.0,2.0"}'),
    ],
)
def test_a_body_is_written_as_the_api_server_writes_it_anew(body, written):
    """Incident: `kubectl delete ifleet --cascade=orphan` never ended: the API compares a stored template's data byte by byte."""
    assert as_go_writes(body).decode() == written
    assert json.loads(as_go_writes(body)) == body
