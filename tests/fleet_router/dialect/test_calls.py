"""Several calls of tools in one stream, whose pieces come by turns: one block each, none before the one before it ended."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_router.dialect.calls import HELD_MOST, MOST_BYTES, Calls
from fleet_router.dialect.chat import Function, Message, ToolCall
from fleet_router.errors import RequestError
from tests.fleet_router.chat_worker import says
from tests.fleet_router.rig import Rig, run

NAMES = ("f", "g", "h")


def piece(index: int, arguments: str = "", *, first: bool = False) -> dict[str, Any]:
    said: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
    return (
        {**said, "id": f"id{index}", "type": "function", "function": {"name": NAMES[index], "arguments": ""}} if first else said
    )


BY_TURNS: list[dict[str, Any]] = [
    {"tool_calls": [piece(0, first=True), piece(1, first=True)]}, {"tool_calls": [piece(0, '{"x":'), piece(1, '{"y":')]},
    {"tool_calls": [piece(0, "1}"), piece(1, "2}")]},
]  # fmt: skip
MIXED: list[dict[str, Any]] = [
    {"content": "a"}, {"tool_calls": [piece(0, first=True), piece(2, first=True)]}, {"tool_calls": [piece(2, '{"z":3}')]},
    {"tool_calls": [piece(0, '{"x":1}')]}, {"tool_calls": [piece(1, first=True)]}, {"tool_calls": [piece(1, '{"y":2}')]},
]  # fmt: skip


def events(body: bytes) -> list[dict[str, Any]]:
    parts = [line[6:] for line in body.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(part) for part in parts]


@pytest.mark.parametrize(("deltas", "names"), [(BY_TURNS, ["f", "g"]), (MIXED, ["f", "h", "g"])], ids=["by-turns", "mixed"])
def test_anthropic_has_one_block_per_call(deltas: list[dict[str, Any]], names: list[str]):
    """Two calls became six blocks."""

    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(deltas, "tool_calls")
        asked = {"model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "x"}]}
        told = events((await rig.post(asked, "/v1/messages"))[1])
        blocks, open_at = dict[int, list[Any]](), None
        for event in told:
            if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
                blocks[event["index"]] = [event["content_block"]["name"], ""]
            if event["type"] == "content_block_start":
                assert open_at is None
                open_at = event["index"]
            elif event["type"] == "content_block_delta" and "partial_json" in event["delta"]:
                assert open_at == event["index"]
                blocks[event["index"]][1] += event["delta"]["partial_json"]
            elif event["type"] == "content_block_stop":
                open_at = None
        values = {"f": {"x": 1}, "g": {"y": 2}, "h": {"z": 3}}
        assert [(name, json.loads(said)) for name, said in blocks.values()] == [(name, values[name]) for name in names]

    run(go, prefill=0)


@pytest.mark.parametrize(("deltas", "names"), [(BY_TURNS, ["f", "g"]), (MIXED, ["f", "h", "g"])], ids=["by-turns", "mixed"])
def test_responses_have_one_item_per_call(deltas: list[dict[str, Any]], names: list[str]):
    async def go(rig: Rig) -> None:
        rig.decode[0].behave = says(deltas, "tool_calls")
        told = events((await rig.post({"model": "m", "input": "x", "stream": True}, "/v1/responses"))[1])
        done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
        calls = [(item["name"], json.loads(item["arguments"])) for item in done if item["type"] == "function_call"]
        values = {"f": {"x": 1}, "g": {"y": 2}, "h": {"z": 3}}
        assert calls == [(name, values[name]) for name in names]
        assert told[-1]["response"]["output"] == done

    run(go, prefill=0)


BEGUN: dict[str, Any] = {"tool_calls": [piece(0, first=True), piece(0, '{"x":')]}
ENDED: dict[str, Any] = {"tool_calls": [piece(0, "1}")]}
AFTER: dict[str, Any] = {"tool_calls": [piece(0, "\n")]}
SECOND: dict[str, Any] = {"tool_calls": [piece(1, first=True), piece(1, '{"y":2}')]}
BETWEEN: dict[str, tuple[list[dict[str, Any]], list[Any]]] = {
    "gap": ([BEGUN, {"content": "\n"}, ENDED], ["f", "\n"]),
    "at-once": ([BEGUN, {"content": "so", **ENDED}, {"content": " on"}, AFTER], ["f", "so on"]),
    "thought": ([BEGUN, {"reasoning": "Hm"}, ENDED, {"content": "so"}, AFTER], ["f", "?Hm", "so"]),
    "second": ([BEGUN, {"content": "\n"}, SECOND, {"content": "a"}, ENDED, {"content": "b"}], ["f", "g", "\nab"]),
    "two": ([BEGUN, {"content": "\n"}, ENDED, AFTER, SECOND, {"content": "b"}], ["f", "\n", "g", "b"]),
    "cut": ([{"content": "a"}, BEGUN, {"content": "b"}], ["a", "f", "b"]),
}


def told_by(events: list[dict[str, Any]]) -> list[str]:
    """Each block or item that was begun: a call's name, or its text, a thought's behind a question mark."""
    found = list[str]()
    for event in events:
        begun, delta = event.get("content_block") or event.get("item") or {}, event.get("delta")
        if event["type"] in ("content_block_start", "response.output_item.added"):
            found.append(begun.get("name", "?" if begun["type"] in ("thinking", "reasoning") else ""))
        elif event["type"] in ("response.output_text.delta", "response.reasoning_text.delta"):
            found[-1] += delta
        elif event["type"] == "content_block_delta":
            found[-1] += delta.get("text", "") + delta.get("thinking", "")
    return found


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("kind", BETWEEN)
def test_what_is_said_within_a_call_does_not_break_it(kind: str, path: str):
    """The rest of the arguments came as those of another call, without a name: of parsers that tell of text and of a call's end
    in one delta, and of those that tell of the gap before the next one too early."""

    async def go(rig: Rig) -> None:
        deltas, expected = BETWEEN[kind]
        rig.decode[0].behave = says(deltas, "tool_calls")
        turns = [{"role": "user", "content": "x"}]
        asked = {"max_tokens": 9, "messages": turns} if path == "/v1/messages" else {"input": turns}
        assert told_by(events((await rig.post({"model": "m", "stream": True, **asked}, path))[1])) == expected

    run(go, prefill=0)


def test_what_is_said_behind_a_call_of_other_arguments_is_held_for_so_long():
    calls, word = Calls(), Message(content="x" * (HELD_MOST // 2))
    calls.feed(ToolCall(0, "a", Function("f", "[1]")))
    assert (calls.said(word), calls.said(word), calls.said(word)) == ([], [], [word] * 3)
    assert (calls.said(word), calls.rest()) == ([word], [])


ARGUMENTS = st.lists(
    st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=4), max_size=3), min_size=1, max_size=4
)


@given(ARGUMENTS, st.data())
def test_however_pieces_are_mixed_each_call_is_whole_and_by_itself(values: list[dict[str, Any]], data: st.DataObject):
    texts = [msgspec.json.encode(value).decode() for value in values]
    left = {index: list(text) for index, text in enumerate(texts)}
    calls, out = Calls(), list[Any]()
    for index in range(len(texts)):
        out += calls.feed(ToolCall(index, f"id{index}", Function(f"f{index}", "")))
    while left:
        index = data.draw(st.sampled_from(sorted(left)))
        size = data.draw(st.integers(1, 4))
        said, left[index] = "".join(left[index][:size]), left[index][size:]
        if not left[index]:
            del left[index]
        out += calls.feed(ToolCall(index, None, Function(None, said)))
    out += calls.rest()
    order = [call.index for call in out]
    runs = [index for at, index in enumerate(order) if at == 0 or order[at - 1] != index]
    assert sorted(runs) == sorted(set(runs)) == list(range(len(texts)))
    assert ["".join(c.function.arguments or "" for c in out if c.index == index) for index in range(len(texts))] == texts
    assert [next(c for c in out if c.index == index).id for index in runs] == [f"id{index}" for index in runs]


def test_calls_that_come_one_after_the_other_wait_for_nothing():
    calls = Calls()
    for index in range(3):
        assert [call.index for call in calls.feed(ToolCall(index, "i", Function("f", "")))] in ([index], [])
        out = calls.feed(ToolCall(index, None, Function(None, '{"a":')))
        out += calls.feed(ToolCall(index, None, Function(None, "1}")))
        assert [call.function.arguments for call in out] == ['{"a":', "1}"]
    assert calls.rest() == []


def test_what_waits_is_bounded():
    calls = Calls()
    calls.feed(ToolCall(0, "i", Function("f", "")))
    half = ToolCall(1, "i", Function("g", "x" * (MOST_BYTES // 2)))
    assert calls.feed(half) == calls.feed(half) == []
    with pytest.raises(RequestError, match="longer than"):
        calls.feed(ToolCall(1, None, Function(None, "x")))


def test_the_end_of_a_call_that_was_whole_is_no_call():
    calls = Calls()
    calls.feed(ToolCall(0, "i", Function("f", "{}")))
    assert [call.index for call in calls.feed(ToolCall(1, "j", Function("g", "{")))] == [1]
    assert calls.feed(ToolCall(0, None, Function(None, "\n"))) == calls.rest() == []


def test_arguments_too_deep_to_be_looked_at_let_the_next_call_wait_for_the_end():
    """It was a RecursionError in the connection of a worker."""
    calls = Calls()
    deep = ToolCall(0, "a", Function("f", '{"a": ' + "[" * 5_000 + "]" * 5_000 + "}"))
    assert (calls.feed(deep), calls.feed(ToolCall(1, "b", Function("g", "{}")))) == ([deep], [])
    assert [call.id for call in calls.rest()] == ["b"]
