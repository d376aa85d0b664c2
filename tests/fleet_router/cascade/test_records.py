"""What is remembered and counted of a request that took several models: one request, whatever its drafts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from fleet_router.config import AnswerCheck, ExplainBounds, TierRule
from fleet_router.explain.spans import SERVER, spans_of
from fleet_router.explain.trace import Trace
from fleet_router.health.budget import SHARE
from tests.fleet_router.cascade.ladder import SMALL, Ladder, climbing, config
from tests.fleet_router.chat_worker import says
from tests.fleet_router.fake_worker import answer
from tests.fleet_router.rig import http

REPLACED = "the draft of tier small is not what the client gets"


async def failing(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    answer(writer, 500, {})
    return True


async def refusing(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    answer(writer, 400, {"error": {"message": "no"}})
    return True


async def rows(ladder: Ladder, query: str = "") -> list[dict[str, Any]]:
    got = await ladder.rig.raw(http(b"", "connection: close", path=f"/debug/decisions{query}", method="GET"))
    found: list[dict[str, Any]] = json.loads(got.partition(b"\r\n\r\n")[2])["decisions"]
    return found


def tiers_of(row: dict[str, Any]) -> list[str]:
    """Each attempt's: names of workers are those of their ports."""
    return [one.get("decode", "nobody") for one in row["tries"]]


def test_a_request_has_one_record_with_its_drafts_inside():
    async def go(ladder: Ladder) -> None:
        ladder.behave("small", says(SMALL, "length"))
        ladder.behave("middle", says(SMALL, "length"))
        await ladder.talk(headers=("x-request-id: mine",))
        (row,) = await rows(ladder, "?id=mine")
        assert (row["state"], row["status"], "error" in row) == ("answered", 200, False)
        assert tiers_of(row) == [f"decode-{ladder[tier].port}" for tier in ladder.tiers]
        first, second, third = row["tries"]
        assert first["why"] == f"{REPLACED}: finish_length"
        assert (second["why"], "why" in third) == (f"{REPLACED}: finish_length".replace("small", "middle"), False)
        assert 0 < first["at_s"] < first["failed_s"] <= second["at_s"] < third["at_s"] <= row["first_byte_s"] <= row["ended_s"]
        assert row["waited_s"] <= first["at_s"]

    climbing(go, config("small", "middle", "large"))


def test_drafts_push_nobody_out_of_the_memory_of_decisions():
    bounds = ExplainBounds(records=3, troubled=3)

    async def go(ladder: Ladder) -> None:
        ladder.behave("small", says(SMALL, "length"))
        for number in range(3):
            await ladder.talk(headers=(f"x-request-id: r{number}",))
        assert sorted(row["request_id"] for row in await rows(ladder)) == ["r0", "r1", "r2"]
        recorder = ladder.rig.context.recorder
        assert (len(recorder.smooth), len(recorder.troubled)) == (3, 0)  # a draft that is replaced is no trouble

    climbing(go, config(explain=bounds))


@pytest.mark.parametrize(
    ("behave", "why", "smooth"),
    [
        (failing, f"decode answered 500; {REPLACED}: failed", False),
        (says(SMALL, "length"), f"{REPLACED}: finish_length", True),
    ],
    ids=["a-worker-that-fails", "a-draft"],
)
def test_what_went_wrong_with_a_draft_is_told_and_is_trouble(behave: Any, why: str, smooth: bool):
    async def go(ladder: Ladder) -> None:
        ladder.behave("small", behave)
        await ladder.talk()
        (row,) = await rows(ladder)
        assert (row["state"], row["tries"][0]["why"]) == ("answered", why)
        assert len(ladder.rig.context.recorder.smooth) == smooth

    climbing(go, config())


def test_a_tier_without_workers_is_in_the_record_and_was_not_waited_for():
    async def go(ladder: Ladder) -> None:
        ladder.rig.apply([], ladder.tiers["large"], ladder.rig.context.config)
        await ladder.talk()
        (row,) = await rows(ladder)
        assert tiers_of(row) == ["nobody", f"decode-{ladder['large'].port}"]
        (record,) = ladder.rig.context.recorder.records()
        assert not record.waited

    climbing(go, config())


@pytest.mark.parametrize(
    ("small", "large", "state", "status", "first"),
    [
        (says(SMALL), says(SMALL), "answered", 200, True),
        (refusing, says(SMALL), "refused", 400, True),
        (says(SMALL, "length"), refusing, "refused", 400, True),
        (says(SMALL, "length"), failing, "failed", 503, False),
    ],
    ids=["kept", "refused", "refused-by-the-last", "the-last-fails"],
)
def test_a_record_ends_as_its_request_does(small: Any, large: Any, state: str, status: int, first: bool):
    async def go(ladder: Ladder) -> None:
        ladder.behave("small", small)
        ladder.behave("large", large)
        assert (await ladder.talk())[0] == status
        (row,) = await rows(ladder)
        assert (row["state"], row["status"], "first_byte_s" in row) == (state, status, first)
        found = ladder.counted()
        assert found['inference_objective_request_total{model_name="m",target_model_name="m"}'] == 1

    climbing(go, config())


def test_a_request_brings_its_share_of_a_retry_once():
    async def go(ladder: Ladder) -> None:
        budget = ladder.rig.context.budget
        ladder.behave("small", says(SMALL, "length"))
        before = budget.saved
        await ladder.talk()
        assert budget.saved == pytest.approx(before + SHARE)
        await ladder.talk(headers=("x-tier: large",))
        assert budget.saved == pytest.approx(before + 2 * SHARE)
        assert ladder.counted()["fleet_router_arrivals_total"] == 2

    rules = (TierRule(tier="large", headers={"x-tier": "large"}),)
    climbing(go, msgspec.structs.replace(config(check=AnswerCheck(finish_reasons=("length",))), tier_rules=rules))


def test_all_attempts_are_spans_of_one_request():
    async def go(ladder: Ladder) -> None:
        ladder.behave("small", says(SMALL, "length"))
        await ladder.talk()
        (record,) = ladder.rig.context.recorder.records()
        root, *legs = map(json.loads, spans_of(record, Trace("a" * 32, "", 1), 0))
        assert (root["kind"], [leg["name"] for leg in legs]) == (SERVER, ["decode", "decode"])
        assert {leg["parentSpanId"] for leg in legs} == {root["spanId"]}
        assert len({leg["spanId"] for leg in legs}) == 2

    climbing(go, config())


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_in_the_judge_is_told_and_no_request_waits_for_ever(stream: bool):
    async def go(ladder: Ladder) -> None:
        status, _, body = await asyncio.wait_for(ladder.talk(stream=stream), 4)
        assert (status, json.loads(body)["error"]["code"]) == (500, "router_failed")
        assert ladder.rig.context.desk.faults.count == 1
        assert ladder.asked == {"small": 1, "large": 0}
        assert ladder.settled()

    climbing(go, config(check=AnswerCheck(phrases=(5,))))  # type: ignore[arg-type]
