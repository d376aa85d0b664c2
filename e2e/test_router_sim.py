"""llm-d-inference-sim, somebody else's stand-in for vLLM, as workers of a real router process, asked with OpenAI's client.

What our router says to a vLLM, and reads from one, is checked here by code that we did not write: answers of all kinds, errors,
the two legs of a request whose KV moves, KV events, LoRA adapters. `test_router_sim_faults.py` has what goes wrong. `make sim`
builds it from the Go module proxy; its tokenizer is its own (words), because a real one comes from a hub. For that reason prompts
of the KV event test are token ids: as text they would be other tokens here than there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai import OpenAI

from e2e.emulated.events import Events
from e2e.emulated.fleet import get, until
from e2e.kube.service import free_ports
from e2e.sim.serve import CONFIG, ECHO, MODEL, Sims

pytestmark = pytest.mark.timeout(200)
WORDS = "the router sends this to a worker and the worker says it again"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "It",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def text_of(mark: str, count: int = 1) -> str:
    """Words of which the first makes it another prompt than any other."""
    return " ".join([mark, *[WORDS] * count])


def answer(client: OpenAI, kind: str, stream: bool, text: str, **asked: Any) -> tuple[str, str | None, Any]:
    """Text, reason of the end and usage, however it was asked."""
    asked = {"model": MODEL, **asked}
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    if kind == "chat":
        found: Any = client.chat.completions.create(messages=[{"role": "user", "content": text}], **asked)
    else:
        found = client.completions.create(prompt=text, **asked)
    if not stream:
        choice = found.choices[0]
        return (choice.message.content if kind == "chat" else choice.text), choice.finish_reason, found.usage
    said, reason, usage = "", None, None
    for chunk in found:
        for choice in chunk.choices:
            said += (choice.delta.content if kind == "chat" else choice.text) or ""
            reason = choice.finish_reason or reason
        usage = chunk.usage or usage
    return said, reason, usage


def answers(client: OpenAI, kind: str, stream: bool, texts: list[str], **asked: Any) -> list[tuple[str, str | None, Any]]:
    """To six clients at once, so that no single worker can have them all."""
    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(lambda text: answer(client, kind, stream, text, **asked), texts))


KINDS = pytest.mark.parametrize("kind", ["completion", "chat"])
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
BRISK = [*ECHO, "--time-to-first-token", "50ms"]
"""It takes long enough that requests of several clients are there at once."""


# -- answers and errors -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sims]:
    """Three that say the prompt again."""
    with Sims(tmp_path_factory.mktemp("plain"), 141, [BRISK] * 3) as fleet:
        yield fleet
        fleet.quiet()


@KINDS
@STREAMS
def test_answers_arrive_whole_from_several_of_them(plain: Sims, kind: str, stream: bool):
    before = plain.finished()
    texts = [text_of(f"{kind}{stream}{i}", 1 + i % 3) for i in range(18)]
    with plain.client() as client:
        found = answers(client, kind, stream, texts)
    assert [(said, reason) for said, reason, _ in found] == [(text, "stop") for text in texts]
    for text, (_, _, usage) in zip(texts, found, strict=True):
        assert usage.completion_tokens == len(text.split())
        assert usage.prompt_tokens >= usage.completion_tokens
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    until("all are counted", lambda: sum(plain.finished().values()) == sum(before.values()) + 18, 5.0)
    after = plain.finished()
    assert min(after[uid] - before[uid] for uid in after) >= 1


@STREAMS
def test_a_function_is_called(plain: Sims, stream: bool):
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": WORDS}], "tools": [TOOL], "tool_choice": "required"}
    with plain.client() as client:
        if stream:
            deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **asked) if chunk.choices]
            calls = [call.function for delta in deltas for call in delta.tool_calls or []]
            name, arguments = calls[0].name, "".join(call.arguments or "" for call in calls)
        else:
            call = client.chat.completions.create(**asked).choices[0].message.tool_calls[0].function
            name, arguments = call.name, call.arguments
    assert name == "weather"
    assert isinstance(json.loads(arguments)["city"], str)


def test_other_dialects_and_embeddings(plain: Sims):
    """Responses are a chat of the worker's; embeddings go through as they are."""
    with plain.client() as client:
        found = client.responses.create(model=MODEL, input=WORDS)
        assert (found.output_text, found.usage and found.usage.output_tokens) == (WORDS, len(WORDS.split()))
        made = client.embeddings.create(model=MODEL, input=WORDS)
        assert len(made.data[0].embedding) == 384
        assert [model.id for model in client.models.list()] == [MODEL]


LONGER = " ".join(["word"] * 1_100)
"""Than the simulators' context of 1,024 tokens, and within what the router lets through."""
REFUSALS = [
    pytest.param({"text": WORDS, "n": 0}, openai.BadRequestError, "n must be at least 1", id="no-choices-refused-by-the-worker"),
    pytest.param({"text": LONGER}, openai.BadRequestError, "maximum context length", id="too-long-refused-by-the-worker"),
    pytest.param({"text": WORDS, "max_tokens": 0}, openai.BadRequestError, "max_tokens", id="no-tokens-refused-by-the-router"),
    pytest.param({"text": WORDS, "model": "x"}, openai.NotFoundError, "does not exist", id="no-such-model-refused-by-the-router"),
]


@KINDS
@pytest.mark.parametrize(("asked", "kind_of_error", "says"), REFUSALS)
def test_a_refusal_reaches_the_client_as_it_is(
    plain: Sims, kind: str, asked: dict[str, Any], kind_of_error: type[openai.APIStatusError], says: str
):
    """Once, from one worker, which is not blamed for it."""
    before = plain.metric("retries_total"), plain.metric("ejections_total")
    with plain.client() as client, pytest.raises(kind_of_error, match=says):
        answer(client, kind, False, **asked)
    assert (plain.metric("retries_total"), plain.metric("ejections_total")) == before


@KINDS
def test_an_error_within_a_stream_is_an_error_of_the_client(plain: Sims, kind: str):
    """It answers 200 before it counts a streamed prompt: the error is an event, and no text is taken for an answer."""
    with plain.client() as client, pytest.raises(openai.APIError, match="maximum context length"):
        answer(client, kind, True, LONGER)


# -- two legs ---------------------------------------------------------------------------------------------------------------
PREFILL_S = 1.5
APART = [*ECHO, "--time-to-first-token", f"{PREFILL_S}s", "--kv-cache-transfer-latency", "5ms"]
"""A decode worker that is slow when it has to prefill, and fast when its request says that the KV comes from elsewhere."""


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sims]:
    """One prefill and two decode workers."""
    with Sims(tmp_path_factory.mktemp("apart"), 142, [APART] * 2, [ECHO]) as fleet:
        yield fleet
        fleet.quiet()


@KINDS
@STREAMS
def test_a_long_prompt_is_prefilled_elsewhere_and_its_reference_handed_on(apart: Sims, kind: str, stream: bool):
    """Both legs are seen at the workers: what each was sent, what it counts, and how long its first token took."""
    (giver,), takers = apart.givers, apart.sims
    counted = lambda: (  # noqa: E731
        giver.finished("remote_decode"), sum(sim.finished() for sim in takers), apart.metric("remote_prefill_total"),
        apart.metric("handed_over_total"), sum(sim.counted("time_to_first_token_seconds_count") for sim in takers),
    )  # fmt: skip
    before, waited = counted(), sum(sim.counted("time_to_first_token_seconds_sum") for sim in takers)
    text = text_of(f"apart{kind}{stream}", 24)
    with apart.client() as client:
        said, reason, usage = answer(client, kind, stream, text, max_tokens=600)
    assert (said, reason, usage.completion_tokens) == (text, "stop", len(text.split()))
    until("both are counted", lambda: counted() == tuple(count + 1 for count in before), 10.0, lambda: (before, counted()))
    assert sum(sim.counted("time_to_first_token_seconds_sum") for sim in takers) - waited < PREFILL_S / 3
    (asked,) = [told for told in giver.told() if text in str(told.body)]
    (decoded,) = [told for sim in takers for told in sim.told() if text in str(told.body)]
    assert asked.path == decoded.path == ("/v1/chat/completions" if kind == "chat" else "/v1/completions")
    assert (asked.body["max_tokens"], asked.body["stream"]) == (1, False)
    assert asked.body["kv_transfer_params"]["do_remote_decode"] is True
    given = giver.told("response")[-1].body["kv_transfer_params"]
    assert given["do_remote_prefill"] is True
    assert decoded.body["kv_transfer_params"] == given
    assert {name: value for name, value in decoded.body.items() if name != "kv_transfer_params"} == {
        "model": MODEL, "max_tokens": 600, "prompt" if kind == "completion" else "messages": asked.body.get("prompt")
        or asked.body["messages"], **({"stream": True, "stream_options": {"include_usage": True}} if stream else {}),
    }  # fmt: skip


def test_a_short_prompt_has_one_leg(apart: Sims):
    """The control of the test above: without a reference the worker takes its time to prefill, and is not told of any KV."""
    waited = sum(sim.counted("time_to_first_token_seconds_sum") for sim in apart.sims)
    before = apart.metric("remote_prefill_total")
    with apart.client() as client:
        assert answer(client, "completion", False, "short")[0] == "short"
    assert apart.metric("remote_prefill_total") == before
    (told,) = [told for sim in apart.sims for told in sim.told() if told.body.get("prompt") == "short"]
    assert "kv_transfer_params" not in told.body
    passed = lambda: sum(sim.counted("time_to_first_token_seconds_sum") for sim in apart.sims) - waited  # noqa: E731
    until("it is counted", lambda: passed() >= PREFILL_S, 10.0)


def test_what_the_prefill_worker_refuses_is_refused(apart: Sims):
    """No decode worker is asked, and nobody is asked twice."""
    before = [len(sim.told()) for sim in [*apart.sims, *apart.givers]]
    with apart.client() as client, pytest.raises(openai.BadRequestError, match="maximum context length"):
        answer(client, "completion", True, LONGER)
    after = [len(sim.told()) for sim in [*apart.sims, *apart.givers]]
    assert [more - less for more, less in zip(after, before, strict=True)] == [0, 0, 1]


# -- KV events --------------------------------------------------------------------------------------------------------------
BLOCK = 16


def test_prefixes_go_where_kv_events_say_that_they_are(tmp_path: Path):
    """Each of four is asked for prompts of its own behind the router's back: only its events can tell who holds what."""
    config = msgspec.structs.replace(CONFIG, prefix_index="precise")
    ports = free_ports(8)
    flags = ["--enable-kvcache", "--kv-cache-size", "4096", "--block-size", str(BLOCK), "--use-vllm-map-event-format"]
    wanted = [[*ECHO, *flags, "--zmq-endpoint", f"tcp://127.0.0.1:{port}", "--event-batch-size", "1"] for port in ports[:4]]
    fleet = Sims(tmp_path, 143, wanted, config=config)
    with ExitStack() as stack:
        for sim, heard, said in zip(fleet.sims, ports[:4], ports[4:], strict=True):
            sim.events_port = said
            stack.enter_context(Events(f"127.0.0.1:{heard}", f"{sim.host}:{said}", listens=True))
        stack.enter_context(fleet)
        streams = lambda: fleet.metric("kv_streams", 'state="partial"')  # noqa: E731
        until("all of them are listened to", lambda: streams() == 4, 20.0)
        prompts = [[[1_000 * (4 * turn + i) + k for k in range(6 * BLOCK)] for i in range(4)] for turn in range(5)]
        for prompt_of in prompts:
            for sim, prompt in zip(fleet.sims, prompt_of, strict=True):
                url = f"http://{sim.host}:{sim.port}/v1/completions"
                get(url, {"model": MODEL, "prompt": prompt, "max_tokens": 4})
        until("all blocks are known", lambda: fleet.metric("kv_blocks") == 5 * 4 * 6, 15.0, lambda: fleet.metric("kv_blocks"))
        with fleet.client() as client:
            for prompt_of in prompts:
                for sim, prompt in zip(fleet.sims, prompt_of, strict=True):
                    before = fleet.finished()
                    found = client.completions.create(model=MODEL, prompt=[*prompt, 1, 2, 3], max_tokens=4)
                    assert found.usage is not None
                    assert found.usage.prompt_tokens_details is not None
                    assert found.usage.prompt_tokens_details.cached_tokens == len(prompt)
                    until("it is counted", lambda at=before, uid=sim.uid: fleet.finished()[uid] == at[uid] + 1, 5.0)  # type: ignore[misc]


# -- adapters ---------------------------------------------------------------------------------------------------------------
def adapters(*names: str) -> list[str]:
    found = [json.dumps({"name": name, "path": f"/adapters/{name}"}) for name in names]
    return [*BRISK, "--max-loras", "4", *(["--lora-modules", *found] if found else [])]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sims]:
    """One without an adapter, one with `sql`, one with `sql` and `law`; the router was told of `law` at the first as well."""
    config = msgspec.structs.replace(CONFIG, adapters=("sql", "law", "none"))
    fleet = Sims(tmp_path_factory.mktemp("adapted"), 144, [adapters(), adapters("sql"), adapters("sql", "law")], config=config)
    for sim, names in zip(fleet.sims, (["law"], ["sql"], ["sql", "law"]), strict=True):
        sim.adapters = dict.fromkeys(names, "d")
    with fleet:
        yield fleet
        fleet.quiet()


@pytest.mark.parametrize(
    ("model", "has", "again"),  # who may answer, and whether one that may not is asked
    [
        pytest.param("sql", {1, 2}, False, id="both-that-have-it"),
        pytest.param("law", {2}, True, id="unloaded-at-one-of-two-unknown-to-the-router"),
        pytest.param(MODEL, {0, 1, 2}, False, id="the-model-itself"),
    ],
)
@STREAMS
def test_an_adapter_is_asked_of_those_that_have_it(adapted: Sims, model: str, has: set[int], again: bool, stream: bool):
    before, retries = adapted.finished(), adapted.metric("retries_total")
    texts = [text_of(f"{model}{stream}{i}") for i in range(30)]
    with adapted.client() as client:
        assert [said for said, _, _ in answers(client, "chat", stream, texts, model=model)] == texts
    until("all are counted", lambda: sum(adapted.finished().values()) == sum(before.values()) + 30, 5.0)
    assert {i for i, sim in enumerate(adapted.sims) if sim.finished() > before[sim.uid]} <= has
    assert (adapted.metric("retries_total") > retries) == again
    assert adapted.metric("ejections_total") == 0


def test_an_adapter_that_nobody_has_is_an_explicit_error(adapted: Sims):
    """The router knows the name; no worker has it."""
    with adapted.client() as client, pytest.raises(openai.APIStatusError) as caught:
        answer(client, "chat", False, WORDS, model="none")
    assert (caught.value.status_code, caught.value.code) == (503, "adapter_not_loaded")
