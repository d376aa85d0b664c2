"""Streams that break, event by event: what is said already, what is new, and where another worker begins."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleet_router.health.resume import OVERLAP_TOKENS, Again, DiffersError, Said, Start, continued, said_of, start_of
from tests.fleet_router.health.test_resume import asked, events, tokens

ONE = {"id": "c-1", "created": 5}


def left_of(said: Said, one: dict[str, Any], *, as_chat: bool = False, start: Start | None = None) -> dict[str, Any] | None:
    """What a client that has `said` gets of one event; None: nothing."""
    got = Again(said, start or Start(), as_chat=as_chat).feed(json.dumps({"id": "c-2", "created": 6, **one}).encode())
    return json.loads(got.removeprefix(b"data: ")) if got else None


def choice(text: str, ids: list[int] | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, **({} if ids is None else {"token_ids": ids}), **more}]}


@pytest.mark.parametrize(
    ("said", "one", "found"),
    [
        pytest.param(Said("ab", [1, 2]), choice("abc", [1, 2, 3]), choice("c", [3]), id="half of an event is new"),
        pytest.param(Said("ab", None), choice("abc"), choice("c"), id="neither has ids"),
        pytest.param(Said("ab", None), choice("abc", [1, 2, 3]), choice("c", [1, 2, 3]), id="what we have is without ids"),
        pytest.param(Said("ab", [1, 2]), choice("ab", [1, 2]), None, id="nothing is new"),
        pytest.param(Said("ab", [1, 2]), choice("ab", [1, 2, 3]), choice("", [3]), id="half of a letter is new"),
        pytest.param(
            Said("ab", [1, 2], finish="stop"), choice("ab", [1, 2], finish_reason="stop"), None, id="it was said that it ended"
        ),
        pytest.param(
            Said("ab", [1, 2]), choice("ab", [1, 2], finish_reason="stop"), choice("", [], finish_reason="stop"), id="its end is"
        ),
        pytest.param(
            Said(), {**choice("a"), "prompt_token_ids": [5, 6, 7, 8]}, choice("a"), id="a prompt that is not the client's"
        ),
        pytest.param(Said(), {"choices": [], "usage": None}, None, id="an event that says nothing"),
        pytest.param(
            Said(), {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}, id="what was used",
        ),
        pytest.param(
            Said(usage=True), {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}, None, id="that was said"
        ),
    ],
)  # fmt: skip
def test_what_is_new_of_an_event(said: Said, one: dict[str, Any], found: dict[str, Any] | None):
    said.id, said.created = "c-1", 5
    assert left_of(said, one) == (None if found is None else {**ONE, **found})


@pytest.mark.parametrize(
    ("said", "payload"),
    [
        pytest.param(Said("ab", [1, 2]), b"[DONE]", id="it ends with nothing said"),
        pytest.param(Said("ab", None), json.dumps(choice("a", finish_reason="stop")).encode(), id="half of the text"),
        pytest.param(Said("ab", [1, 2]), json.dumps(choice("ab", [1], finish_reason="stop")).encode(), id="of the tokens"),
        pytest.param(Said("a", finish="length"), json.dumps(choice("a", finish_reason="stop")).encode(), id="another reason"),
        pytest.param(Said(" a", None), json.dumps(choice("a")).encode(), id="a first space is lost from nothing"),
        pytest.param(Said("ab", [1, 2]), json.dumps(choice("ab", [1, 3])).encode(), id="the same text of other tokens"),
        pytest.param(Said("ab", [1, 2]), json.dumps(choice("abc", [3, 2, 1])).encode(), id="of the first one already"),
    ],
)
def test_a_worker_that_says_less_is_not_the_same(said: Said, payload: bytes):
    with pytest.raises(DiffersError):
        Again(said, Start(), as_chat=False).feed(payload)


def test_a_first_space_is_lost_from_the_first_text_only():
    """Behind sent tokens, of a tokenizer that marks words: also where events without text come first."""
    said = Said(" a b c", None)
    again = Again(said, Start(1, 2), as_chat=False)
    assert [again.feed(json.dumps(choice(text)).encode()) for text in ("", "b", " c")] == [b""] * 3
    assert json.loads(again.feed(json.dumps(choice(" d")).encode()).removeprefix(b"data: "))["choices"][0]["text"] == " d"
    once = Again(Said(" a b c", None), Start(1, 2), as_chat=False)
    once.feed(json.dumps(choice("b")).encode())
    with pytest.raises(DiffersError):
        once.feed(json.dumps(choice("c")).encode())


@pytest.mark.parametrize(("asked_for", "left"), [(20, 8), (12, 0), (5, 0)])
def test_the_least_of_tokens_counts_those_that_were_sent(asked_for: int, left: int):
    ask = asked(min_tokens=asked_for)
    rest = continued(ask, Said("x" * 12, list(range(12))), Start(12, 12), [5])
    assert (bytes(rest.fields["min_tokens"]), bytes(rest.fields["max_tokens"])) == (b"%d" % left, b"28")


@pytest.mark.parametrize(
    ("details", "left"),
    [
        ({"cached_tokens": 112}, {"cached_tokens": 18}),
        ({"cached_tokens": 16}, {"cached_tokens": 16}),
        ({"cached_tokens": None}, {"cached_tokens": None}),
        ({}, {}),
        (None, None),
    ],
)
def test_no_more_of_a_prompt_is_cached_than_it_has(details: Any, left: Any):
    """What was sent stands in the other worker's prompt and cache, and in no prompt of the client's."""
    usage = {"prompt_tokens": 118, "completion_tokens": 5, "prompt_tokens_details": details}
    got = left_of(Said("ab", None), {"choices": [], "usage": usage}, start=Start(100, 2))
    assert got == {
        **ONE, "id": None, "created": 0, "choices": [],
        "usage": {"prompt_tokens": 18, "completion_tokens": 105, "prompt_tokens_details": left},
    }  # fmt: skip


def test_what_was_used_is_told_as_of_a_chat():
    """Incident: the last event of a chat's stream named a text completion, which is what was asked for of the rest."""
    usage = {"prompt_tokens": 118, "completion_tokens": 5}
    for one in (choice("c"), {"choices": [], "usage": usage}):
        got = left_of(Said("ab", None), {**one, "object": "text_completion"}, as_chat=True, start=Start(100, 2))
        assert got is not None
        assert got["object"] == "chat.completion.chunk"


def test_a_count_with_every_event_is_not_the_one_at_the_end():
    events = [{**choice("a"), "usage": {"prompt_tokens": 3}}, {"choices": [], "usage": {"prompt_tokens": 3}}]
    made = [b"data: " + json.dumps(one).encode() + b"\n\n" for one in events]
    found = [said_of(b"".join(made[:count])) for count in (1, 2)]
    assert [one.usage for one in found if one is not None] == [False, True]


def test_nobody_begins_in_the_middle_of_a_letter():
    """Of one whose bytes are several tokens the text comes with the last of them."""
    made = [choice("a", [1]), choice("", [2]), choice("é", [3]), choice("b", [4])]
    said = said_of(b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in made))
    assert said is not None
    assert (said.ids, said.steps) == ([1, 2, 3, 4], [(1, 1), (3, 2), (4, 3)])


def test_the_reason_of_the_end_is_kept_when_an_empty_chunk_follows():
    one, after = events([5, 6]), b'data: {"choices":[{"text":"","finish_reason":null}]}\n\n'
    said = said_of(b"".join([*one[:2], after]))
    assert said is not None
    assert said.finish == "length"


@pytest.mark.parametrize("more", [{"stop": []}, {"stop": None}, {"frequency_penalty": 0.0}, {"repetition_penalty": 1}])
def test_a_rule_that_says_nothing_does_not_look_back(more: dict[str, Any]):
    said = said_of(b"".join(events(tokens([5], 30), finish=False)))
    assert said is not None
    assert start_of(asked(max_tokens=40, **more), said).tokens == 30 - OVERLAP_TOKENS


@pytest.mark.parametrize("more", [{"stop": ["x"]}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}, {"max_tokens": None}])
def test_rules_that_look_back_make_it_begin_from_nothing(more: dict[str, Any]):
    said = said_of(b"".join(events(tokens([5], 30), finish=False)))
    assert said is not None
    assert start_of(asked(max_tokens=40), said).tokens > 0
    assert start_of(asked(**more), said) == Start()
