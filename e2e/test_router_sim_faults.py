"""What goes wrong at llm-d-inference-sim behind a real router process: killed before the first byte and in mid-stream, told to
stop, failing at random in its own ways (`--failure-injection-rate`), loaded with another model.

Every request ends with its own whole answer or with an error that says so.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from e2e.emulated.fleet import until
from e2e.sim.serve import ECHO, MODEL, Sim, Sims
from e2e.test_router_sim import KINDS, STREAMS, answer, text_of

pytestmark = pytest.mark.timeout(200)
SLOW_START = [*ECHO, "--time-to-first-token", "3s"]
SLOW = [*ECHO, "--inter-token-latency", "100ms"]
RANDOM = ["--mode", "random", "--inter-token-latency", "100ms"]


# -- killed -----------------------------------------------------------------------------------------------------------------
@KINDS
@STREAMS
def test_one_that_is_killed_before_the_first_byte(tmp_path: Path, kind: str, stream: bool):
    """Whoever waits for it is answered by another one, and sees nothing of it."""
    with Sims(tmp_path, 151, [SLOW_START] * 2) as fleet, fleet.client() as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(answer, client, kind, stream, text_of("killed", 2))
        busy = fleet.busy()
        assert not waiting.done()
        assert busy.kill() == -9
        assert waiting.result(20)[:2] == (text_of("killed", 2), "stop")
        assert fleet.metric("retries_total") == 1
        other = next(sim for sim in fleet.sims if sim is not busy)
        assert other.finished() == 1


MID_STREAM = [
    pytest.param([SLOW] * 2, {"temperature": 0}, True, id="greedy-and-the-other-says-the-same"),
    pytest.param([SLOW] * 2, {"seed": 5}, True, id="seeded-and-the-other-says-the-same"),
    pytest.param([SLOW] * 2, {"temperature": 1}, False, id="nobody-can-know-its-tokens"),
    pytest.param(
        [[*RANDOM, "--seed", seed] for seed in "12"], {"temperature": 0}, False, id="greedy-and-the-other-says-something-else"
    ),
]


@KINDS
@pytest.mark.parametrize(("flags", "asked", "whole"), MID_STREAM)
def test_one_that_is_killed_in_mid_stream(tmp_path: Path, kind: str, flags: list[list[str]], asked: dict[str, Any], whole: bool):
    """What the client has is the beginning of what it gets, and the rest is exact; or it is told that there is no rest."""
    text = text_of("middle", 12)
    echo = "echo" in flags[0]
    limit = {} if echo else {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
    with Sims(tmp_path, 152, flags) as fleet, fleet.client() as client:
        said, broken = killed_under(fleet, client, kind, text, asked | limit)
        resumed = {outcome: fleet.metric("resumed_total", f'"{outcome}"') for outcome in ("done", "differs", "refused")}
        assert (said == text, broken == "") == (whole, whole), (said, broken, resumed)
        assert resumed["done"] == whole
        assert resumed["refused" if echo else "differs"] == (not whole)
        assert fleet.metric("streams_broken_total") == (not whole)
        if echo:
            assert text.startswith(said)


def killed_under(fleet: Sims, client: openai.OpenAI, kind: str, text: str, asked: dict[str, Any]) -> tuple[str, str]:
    """The text of a stream whose worker is killed after its first words, and the error that ended it."""
    said, killed = "", False
    if kind == "chat":
        stream: Any = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], stream=True, **asked
        )
    else:
        stream = client.completions.create(model=MODEL, prompt=text, stream=True, **asked)
    try:
        for chunk in stream:
            for choice in chunk.choices:
                said += (choice.delta.content if kind == "chat" else choice.text) or ""
            if not killed and said.count(" ") > 5:
                killed = fleet.busy().kill() == -9
    except openai.APIError as error:
        assert killed
        return said, str(error)
    assert killed
    return said, ""


@STREAMS
def test_all_of_them_are_killed(tmp_path: Path, stream: bool):
    """An explicit error, at once."""
    with Sims(tmp_path, 153, [ECHO] * 2) as fleet, fleet.client() as client:
        assert answer(client, "chat", stream, "here")[0] == "here"
        assert [sim.kill() for sim in fleet.sims] == [-9, -9]
        for _ in range(3):
            with pytest.raises(openai.InternalServerError) as caught:
                answer(client, "chat", stream, "nobody")
            assert caught.value.status_code == 503


def test_a_prefill_worker_that_is_killed_is_not_missed(tmp_path: Path):
    """A decode worker prefills: the answer is right, and its request names no KV of the dead one."""
    with Sims(tmp_path, 154, [ECHO] * 2, [SLOW_START]) as fleet, fleet.client() as client, ThreadPoolExecutor(1) as pool:
        text = text_of("prefill", 24)
        waiting = pool.submit(answer, client, "completion", True, text)
        (giver,) = fleet.givers
        until("it prefills", lambda: giver.stats()["running"] == 1, 10.0)
        assert giver.kill() == -9
        assert waiting.result(20)[:2] == (text, "stop")
        (told,) = [told for sim in fleet.sims for told in sim.told() if told.path]
        assert "kv_transfer_params" not in told.body


@pytest.mark.parametrize("flags", [SLOW, SLOW_START], ids=["in-mid-stream", "before-the-first-byte"])
def test_one_that_is_told_to_stop_is_not_noticed(tmp_path: Path, flags: list[str]):
    """SIGTERM: it finishes what it runs, and refuses what comes after on connections that stand. Others answer that."""
    with Sims(tmp_path, 155, [flags, ECHO]) as fleet, ThreadPoolExecutor(12) as pool, fleet.client() as client:
        running = [pool.submit(answer, client, "chat", True, text_of(f"runs{i}", 8)) for i in range(6)]
        stopped = fleet.sims[0]
        until("it runs something", lambda: stopped.stats()["running"] > 0, 10.0)
        stopped.terminate()
        later = [answer(client, "chat", i % 2 == 0, text_of(f"later{i}"))[0] for i in range(24)]
        assert later == [text_of(f"later{i}") for i in range(24)]
        assert [waiting.result(30)[0] for waiting in running] == [text_of(f"runs{i}", 8) for i in range(6)]
        assert stopped.wait_end() == 0


# -- it fails by itself -----------------------------------------------------------------------------------------------------
def ends(fleet: Sims, count: int) -> Counter[str]:
    """How so many requests of four clients ended; an answer that is not its own is "wrong"."""
    with fleet.client() as client, ThreadPoolExecutor(4) as pool:
        return Counter(pool.map(lambda i: end(client, i), range(count)))


def end(client: openai.OpenAI, i: int) -> str:
    text = text_of(f"request{i}")
    try:
        said, reason, _ = answer(client, "chat" if i % 2 else "completion", i % 4 < 2, text)
    except openai.APIStatusError as error:
        return f"{error.status_code} {error.type}"
    except openai.APIError as error:
        return f"event {error.message}"
    return "right" if (said, reason) == (text, "stop") else f"wrong {said!r}"


def injected(sim: Sim) -> int:
    """Failures that it answered."""
    return sum("error" in told.body for told in sim.told("response"))


ELSEWHERE = ["server_error", "model_not_found", "rate_limit", "invalid_api_key"]


@pytest.mark.parametrize("failure", ELSEWHERE)
def test_one_of_three_that_always_fails_is_not_noticed(tmp_path: Path, failure: str):
    """Another one is asked, and soon the failing one is left alone."""
    failing = [*ECHO, "--failure-injection-rate", "100", "--failure-types", failure]
    with Sims(tmp_path, 156, [failing, ECHO, ECHO]) as fleet:
        assert ends(fleet, 80) == {"right": 80}
        assert 1 <= injected(fleet.sims[0]) <= 20
        assert fleet.metric("workers_out", "decode") == 1


REFUSALS = {
    "context_length": "400 BadRequestError",
    "invalid_request": "400 BadRequestError",
}


@pytest.mark.parametrize("failure", REFUSALS)
def test_one_of_three_that_refuses_is_quoted(tmp_path: Path, failure: str):
    """A refusal is taken for the client's own: it gets it, word for word, and only it."""
    refusing = [*ECHO, "--failure-injection-rate", "100", "--failure-types", failure]
    with Sims(tmp_path, 157, [refusing, ECHO, ECHO]) as fleet:
        found = ends(fleet, 40)
        refused = injected(fleet.sims[0])
        assert refused >= 1
        assert found == {"right": 40 - refused, REFUSALS[failure]: refused}


def test_all_of_them_fail_at_random(tmp_path: Path):
    """Every third answer of each is an error of any kind: no answer is wrong, none is missing, each error is explicit."""
    failing = [*ECHO, "--failure-injection-rate", "33"]
    with Sims(tmp_path, 158, [failing] * 3) as fleet:
        found = ends(fleet, 200)
        print(dict(found), [injected(sim) for sim in fleet.sims])
        explicit = {"502 ", "503 "}
        odd = [one for one in found if one != "right" and one not in REFUSALS.values() and one[:4] not in explicit]
        assert odd == []
        assert sum(found.values()) == 200
        assert found["right"] >= 80
        assert sum(injected(sim) for sim in fleet.sims) >= 30
        for sim in fleet.sims:
            sim.set(failure_injection_rate=0)
        until("all is well again", lambda: ends(fleet, 8) == {"right": 8}, 60.0)


# -- it is another ----------------------------------------------------------------------------------------------------------
def test_one_that_serves_another_model_is_left_alone(tmp_path: Path):
    """It answers 404 for the fleet's model: another one is asked, and it is put out."""
    with Sims(tmp_path, 159, [[*ECHO, "--model", "another"], ECHO]) as fleet:
        assert ends(fleet, 40) == {"right": 40}
        assert fleet.metric("workers_out", "decode") == 1
        assert fleet.sims[0].finished() == 0
        assert injected(fleet.sims[0]) >= 1
