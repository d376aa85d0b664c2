"""Typed configuration of a router: what the operator renders (RouterConfig, hot reloaded) and what the process is given.

Every bound has its unit in its name. Sources of the defaults: e2e figures in shared facts and the HTTP hardening numbers of
the reliability notes (64 KiB headers, 100 header fields, 4 MiB body).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

TTFT_BUDGET_S = 60.0
"""Time to the first token of requests whose class says nothing."""
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Policy = Literal["kvAware", "prefixHash", "leastLoad", "roundRobin"]
Decide = Literal["threshold", "cost"]
ResumeKind = Literal["off", "replay", "prefill"]
PrefixIndexKind = Literal["approximate", "precise"]


class TierRule(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that fit go to this tier, if it serves; all that is given must fit."""

    tier: str
    tokens_lt: int | None = None
    """Prompts with fewer tokens, as the router estimates them."""
    tokens_ge: int | None = None
    headers: dict[str, str] = {}
    """Lower-case name → the exact value."""


class AnswerCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a draft's answer not good enough. An empty one never is, nor one that was to be JSON and is not."""

    finish_reasons: tuple[str, ...] = ()
    """Reasons for its end that count against it. `length` is no such reason where clients set limits of their own."""
    phrases: tuple[str, ...] = ()
    """What it must not say, in any case of letters."""
    least_mean_logprob: float | None = None
    """Mean log-probability of its tokens, at least; asked of the engine, and kept from a client that did not ask. None: any."""


class Cascade(msgspec.Struct, frozen=True, kw_only=True):
    """Small models first: a tier's answer is held until it was checked, and the next tier is asked when it is not good enough.
    The last tier's answer goes out as it comes. Requests that a tier rule fits go to that rule's tier and nowhere else."""

    tiers: Annotated[tuple[str, ...], msgspec.Meta(min_length=2, max_length=4)]
    """From small to large."""
    check: AnswerCheck = AnswerCheck()
    held_bytes: Annotated[int, msgspec.Meta(ge=1)] = 1024 * 1024
    """Of one draft; a longer one counts as not good enough."""
    all_held_bytes: Annotated[int, msgspec.Meta(ge=1)] = 256 * 1024 * 1024
    """Of all drafts of this process; when they are taken, requests go to the last tier."""


class HedgeBounds(msgspec.Struct, frozen=True, kw_only=True):
    """When a prefill leg is sent to a second worker, too (policy/hedge.py)."""

    after: Annotated[float, msgspec.Meta(ge=1)] = 3.0
    """Times what the first one was expected to need."""
    least_s: Seconds = 0.1
    """Never earlier."""
    share: Annotated[float, msgspec.Meta(gt=0, le=0.5)] = 0.05
    """Of the prompts that go to prefill workers, and of their tokens, at most."""


class HttpBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of client connections, of one unless said."""

    header_bytes: Count = 65_536
    header_count: Count = 100
    url_bytes: Count = 8_192
    body_bytes: Count = 4 * 1024 * 1024
    header_deadline_s: Seconds = 10.0
    body_deadline_s: Seconds = 30.0
    idle_s: Seconds = 75.0
    stalled_client_s: Seconds = 60.0
    """How long a client may take none of its answer while our buffers for it are full."""
    linger_s: float = 5.0
    """A connection that we close while its client still sends is read until it has sent nothing for so long, six times as long at
    most, so that the client can read why: a socket that is closed with bytes unread is reset."""
    linger_bytes: int = 32 * 1024 * 1024
    """At most so much is read, and thrown away."""
    connections: Count = 2_048
    receiving_bytes: Count = 256 * 1024 * 1024
    """Of all bodies that this process has in part; where they are more, one that has grown long ends. A quarter as much may wait
    unread behind requests that are being answered."""


class SloClass(msgspec.Struct, frozen=True, kw_only=True):
    """A class of requests, named by their tenant or by header."""

    name: str
    priority: int = 0
    """Waiting requests of a higher one go first."""
    ttft_budget_s: Seconds = TTFT_BUDGET_S
    """Time to the first token; a request that waited 0.85 of it is turned away."""
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    """None: the router's own limit."""


class HoldBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the requests that wait in this process while the fleet wakes from zero."""

    requests: int = 256
    bytes: int = 64 * 1024 * 1024
    """Of their bodies."""
    time_s: float = 300.0
    """Longest wait of one."""


class ExplainBounds(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered and logged of requests."""

    records: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 1_024
    """Requests that were answered at the first attempt; some KiB each."""
    troubled: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 512
    """All others that got as far as a decision."""
    refused: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 256
    """Those that were turned away before one."""
    log: Literal["none", "troubled", "all"] = "troubled"
    """Which of them get a log line when they end."""
    log_lines_per_s: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 20


class PrewarmBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs of workers that meet before a client's request has to wait for their handshake."""

    pairs: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Of each worker that joins; 0: none."""
    parallel: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """Under way at once, of each router."""
    timeout_s: Seconds = 10.0
    """Of one: prefill, transfer and a token."""


class TraceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """OpenTelemetry spans."""

    endpoint: Annotated[str, msgspec.Meta(pattern=r"^(https?://[^/\s@]+(/[^\s@]*)?)?$")] = ""
    """Base URL of an OTLP/HTTP collector; empty: no spans."""
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.01
    """Share of the requests without a trace context; others are sampled as their context says."""
    per_second: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 100
    """Requests with spans, at most: a client cannot make us trace everything."""
    queue: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 4_096
    """Ended requests that wait to be sent; more are dropped and counted."""


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the fleet's spec says about routing. Fields that are not known are passed over: while an operator is upgraded, routers
    are older than it, and one that refused its configuration would keep the last one for ever."""

    fleet: str
    served_name: str
    adapters: tuple[str, ...] = ()
    """Names of the adapters over the model; each is a `model` that clients may ask for."""
    policy: Policy = "kvAware"
    load_bound: Annotated[float, msgspec.Meta(ge=1)] = 1.25
    """No worker gets more than `load_bound` x mean in-flight load (consistent hashing with bounded loads)."""
    min_uncached_tokens: int = 64
    """Prompts with fewer uncached tokens are prefilled on the decode worker."""
    decide: Decide = "threshold"
    """kvAware: all other prompts go to a prefill worker (threshold), or where they cost least (cost, see policy/cost.py)."""
    hedge: HedgeBounds | None = None
    """kvAware: a prefill leg that is late is sent to a second worker, too. None: never."""
    slow_start_s: Annotated[float, msgspec.Meta(ge=0)] = 60.0
    """A worker that joins gets its full share of the load after this long; 0: at once."""
    prewarm: PrewarmBounds = PrewarmBounds()
    session_header: str = ""
    """Lower-case name of a header whose value takes the prompt's place on the ring; empty: none."""
    tier_rules: tuple[TierRule, ...] = ()
    cascade: Cascade | None = None
    """The tiers have models of their own; None: they are all alike, and any may answer."""
    prefix_index: PrefixIndexKind = "approximate"
    """precise: believe the workers' KV events; costs the tokenising of every prompt here."""
    max_input_tokens: int = 2048
    """Longest prompt; see `lengths` for who counts."""
    max_output_tokens: int = 4096
    """Of one sequence; given to the engine with every request that asks for no less."""
    max_model_len: int = 0
    """Prompt and answer together, at the engine, which refuses longer prompts itself. 0: not known."""
    first_token_deadline_s: Seconds = 60.0
    inter_token_deadline_s: Seconds = 30.0
    resume: ResumeKind = "replay"
    """Streams that break and whose tokens are determined (greedy or seeded): ask another worker from the beginning and leave out
    what was sent (replay), or prefill prompt and sent tokens (prefill: for engines whose draws depend on seed and position alone;
    streams then carry token ids)."""
    whole_answer_most_s: Seconds = 600.0
    """Longest wait for an answer that is not streamed, all attempts together; each gets what its tokens may take up to it
    (health/patience.py). OpenAI's clients wait as long."""
    silent_s: Seconds = 15.0
    """A worker that has said nothing to anybody for so long, although somebody waits, is put out; who waits is moved once. Where
    answers come as a whole it is first asked whether it is there."""
    reused_close_s: float = 0.1
    """A pooled connection that closes within so long of a request, without a byte, was closed before the worker had it: a round
    trip and the loop's delay. The request is sent again; later than that it is a failure of the worker."""
    upstream_idle_s: Seconds = 55.0
    """Idle connections to workers are closed after about so long, before what stands between forgets them (often after 60 s)."""
    bounds: HttpBounds = HttpBounds()
    hold: HoldBounds = HoldBounds()
    return_wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 10.0
    """Longest wait for a decode worker that was there so long ago or less and cannot be asked for the moment (not ready, held,
    restarting), where no other one serves; inside `hold`'s bounds. 0: such requests are refused at once."""
    worker_slots: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Requests that one decode worker runs at once; when all are taken, more wait here. 0: not known, nothing waits."""
    queue_per_slot: Annotated[int, msgspec.Meta(ge=0)] = 4
    """At most so many requests wait per slot."""
    ttft_budget_s: Seconds = TTFT_BUDGET_S
    """Of requests of the class `default`, unless `classes` has one of that name."""
    classes: tuple[SloClass, ...] = ()
    runaway: bool = False
    """End streams that loop, do not stop or speak in control tokens."""
    explain: ExplainBounds = ExplainBounds()
    traces: TraceConfig = TraceConfig()


def renamed(asked: RouterConfig, now: RouterConfig) -> str:
    """The model's present name for a request that came under another one and waited, or is tried again; empty: it has it."""
    return "" if asked.served_name == now.served_name else now.served_name


def encode(config: RouterConfig) -> str:
    """Canonical JSON."""
    return msgspec.json.encode(config, order="deterministic").decode()


def decode(raw: str | bytes) -> RouterConfig:
    """Parse; raises `msgspec.ValidationError` naming the field."""
    return msgspec.json.decode(raw, type=RouterConfig)
