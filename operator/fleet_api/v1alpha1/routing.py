"""Routing, limits, service level, scaling and telemetry of a fleet."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fleet_api.quantities import parse_duration, parse_quantity
from fleet_api.v1alpha1.base import DNS_LABEL, TIER_NAME_MAX, ApiModel, DurationText, QuantityText
from fleet_api.v1alpha1.port import GossipSpec, SecretKey, SecretName, TlsSpec

Tokens = Annotated[int, Field(ge=1, le=1_048_576)]
HeaderName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=64)]


class LoadSpec(ApiModel):
    """The bounded-load rule."""

    bound: Annotated[float, Field(ge=1.0, le=10.0)] = Field(
        default=1.25, description="No worker gets more than this many times the mean load, 1 to 10. Default: 1.25."
    )


class RemotePrefillSpec(ApiModel):
    """When a prompt goes through a prefill worker."""

    decide: Literal["threshold", "cost"] = Field(
        default="threshold",
        description="threshold: every prompt with minUncachedTokens or more goes to a prefill worker. cost: with policy kvAware, "
        "it goes where its seconds are fewest: queues, prefill, transfer, handshake, and what others lose, learnt from the "
        "answers; an idle fleet then prefills on its decode workers. Default: threshold.",
    )
    min_uncached_tokens: Annotated[int, Field(ge=0, le=1_048_576)] = Field(
        default=64, description="Prompts with fewer uncached tokens are prefilled on the decode worker. Default: 64."
    )


class HedgeSpec(ApiModel):
    """Prompts that a prefill worker is late with are sent to a second one, too, and whoever answers first is taken."""

    after: Annotated[float, Field(ge=1.0, le=100.0)] = Field(
        default=3.0, description="Late is who needs more than this many times what it was expected to need, 1 to 100. Default: 3."
    )
    at_least: DurationText = Field(default="100ms", description="Nobody is late before this time, 1ms to 1m. Default: 100ms.")
    budget: Annotated[float, Field(ge=0.001, le=0.5)] = Field(
        default=0.05,
        description="Most of the prompts that go to prefill workers, and of their tokens, that are computed twice: 0.001 to 0.5. "
        "Default: 0.05.",
    )

    @property
    def at_least_s(self) -> float:
        """Time in seconds."""
        return parse_duration(self.at_least)


class InputTokensSpec(ApiModel):
    """Length of the prompt, as the router estimates it."""

    lt: Tokens | None = Field(default=None, description="Fewer tokens than this.")
    ge: Tokens | None = Field(default=None, description="At least so many tokens; less than lt.")


class TierConditionSpec(ApiModel):
    """What a request must look like; all that is given must fit."""

    input_tokens: InputTokensSpec | None = Field(default=None, description="Length of the prompt. Default: any.")
    header: Annotated[dict[str, Annotated[str, Field(max_length=256)]], Field(max_length=4)] | None = Field(
        default=None, description="Headers, names in lower case, and their exact values. Default: any."
    )


class TierRuleSpec(ApiModel):
    """Requests that fit go to one tier, as long as it serves; with a cascade, to that tier and nowhere else."""

    when: TierConditionSpec = Field(description="Which requests.")
    tier: Annotated[str, Field(pattern=DNS_LABEL, max_length=TIER_NAME_MAX)] = Field(description="A tier of this fleet.")


class ExplainSpec(ApiModel):
    """What every router pod remembers and logs of requests; never a prompt. Read with `fleet explain`."""

    records: Annotated[int, Field(ge=0, le=100_000)] = Field(
        default=1024,
        description="Requests that went well and are remembered, some KiB each; half as many that did not, and a quarter as many "
        "that were refused, are remembered beside them. 0: none. Default: 1024.",
    )
    log: Literal["none", "troubled", "all"] = Field(
        default="troubled",
        description="Which requests get a log line when they end, at most 20 a second: those that were not answered at the first "
        "attempt, all, or none. Default: troubled.",
    )


class EndpointPickerSpec(ApiModel):
    """The routers as Endpoint Picker of a Gateway API InferencePool: ext_proc, gRPC, on port 9002 of the router's Service."""

    failure_mode: Literal["FailOpen", "FailClose"] = Field(
        default="FailClose",
        description="What gateways are told while a router knows no endpoints yet. FailClose: 503. FailOpen: the call "
        "fails, and a gateway that may sends the request to any endpoint. Use the InferencePool's own. Default: FailClose.",
    )
    gateway_namespaces: Annotated[tuple[Annotated[str, Field(pattern=DNS_LABEL, max_length=63)], ...], Field(max_length=16)] = (
        Field(
            default=(),
            description="Namespaces of the gateways: the NetworkPolicy lets their pods reach the workers' HTTP port, past the "
            "routers' keys and limits unless the gateway asks the picker. Default: the fleet's own namespace.",
        )
    )


class AnswerCheckSpec(ApiModel):
    """What makes a draft not good enough. One without text never is, nor one that was to be JSON and is not."""

    finish_reasons: Annotated[tuple[Annotated[str, Field(pattern=r"^[a-z_]+$", max_length=32)], ...], Field(max_length=8)] = (
        Field(
            default=(),
            description="Reasons for its end that count against it, e.g. length where clients set no limits of their own. "
            "Default: none.",
        )
    )
    phrases: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=128)], ...], Field(max_length=32)] = Field(
        default=(), description="What it must not say, in any case of letters, e.g. I don't know. Default: none."
    )
    min_mean_logprob: Annotated[float, Field(le=0.0)] | None = Field(
        default=None,
        description="Least mean log-probability of its tokens, at most 0, e.g. -0.8; engine vllm only. Default: any.",
    )


class CascadeSpec(ApiModel):
    """Ask a small model first and a larger one when the answer is not good enough: a draft is held until it was checked, so its
    first token comes when it is whole."""

    tiers: Annotated[
        tuple[Annotated[str, Field(pattern=DNS_LABEL, max_length=TIER_NAME_MAX)], ...], Field(min_length=2, max_length=4)
    ] = Field(description="All tiers of this fleet, from small to large; the last one's answer is not checked, nor held.")
    check: AnswerCheckSpec = Field(default=AnswerCheckSpec(), description="What makes a draft not good enough.")
    held_size: QuantityText = Field(
        default="1Mi", description="Most bytes of one draft, 1Ki to 4Mi; a longer one is not good enough. Default: 1Mi."
    )

    @property
    def held_bytes(self) -> int:
        """One draft in bytes."""
        return parse_quantity(self.held_size)


class PrewarmSpec(ApiModel):
    """Pairs of a prefill and a decode worker meet by a small request of the router's own (a few hundred tokens, one token out)
    before a client's request has to wait for their first handshake."""

    pairs: Annotated[int, Field(ge=0, le=64)] = Field(
        default=0, description="Pairs of each worker that joins, 0 to 64. Default: 0, clients' requests make them meet."
    )
    parallel: Annotated[int, Field(ge=1, le=64)] = Field(
        default=2, description="Most of them at a time, of each router process, 1 to 64. Default: 2."
    )
    timeout: DurationText = Field(
        default="10s", description="Longest time of one; a pair that fails three times is put out. 1s to 5m. Default: 10s."
    )

    @property
    def timeout_s(self) -> float:
        """Time in seconds."""
        return parse_duration(self.timeout)


class RoutingSpec(ApiModel):
    """How the router chooses workers."""

    policy: Literal["kvAware", "prefixHash", "leastLoad", "roundRobin"] = Field(
        default="kvAware", description="kvAware prefers workers that hold the prompt's prefix. Default: kvAware."
    )
    load: LoadSpec = Field(default=LoadSpec(), description="The bounded-load rule.")
    remote_prefill: RemotePrefillSpec = Field(default=RemotePrefillSpec(), description="When a prompt goes to a prefill worker.")
    hedge: HedgeSpec | None = Field(
        default=None,
        description="With policy kvAware: send a prompt that a prefill worker is late with to a second one, too. Default: no.",
    )
    slow_start: DurationText = Field(
        default="60s", description="A worker that joins gets its full share of the load after this long, 0s to 1h. Default: 60s."
    )
    prewarm: PrewarmSpec = Field(default=PrewarmSpec(), description="Make workers meet before clients' requests need them to.")
    return_wait: DurationText = Field(
        default="10s",
        description="Longest wait of a request that nobody can answer for a decode worker that was there so long ago or less and "
        "may be back (not ready, restarting), inside limits.hold. 0s: it gets 503 at once. 0s to 1m. Default: 10s.",
    )
    session_header: HeaderName | None = Field(
        default=None,
        description="Header, in lower case, whose value takes the place of the prompt on the hash ring: requests of a session go "
        "to the same workers while these are within their bound. Default: none.",
    )
    tier_rules: Annotated[tuple[TierRuleSpec, ...], Field(max_length=16)] = Field(
        default=(), description="Which tier a request goes to: the first rule that fits. Default: whichever costs least."
    )
    cascade: CascadeSpec | None = Field(
        default=None,
        description="Ask a small model first and a larger one when the answer is not good enough: a draft is held until it was "
        "checked, so its first token comes when it is whole. Default: any tier may answer.",
    )
    prefix_index: Literal["approximate", "precise"] = Field(
        default="approximate",
        description="What kvAware knows of the workers' caches. approximate: what the router sent. precise: their KV events; "
        "routers then tokenise prompts, read events and get the tokenizer from the workers' agents. Default: approximate.",
    )
    replicas: Annotated[int, Field(ge=1, le=32)] = Field(default=1, description="Router pods. Default: 1.")
    explain: ExplainSpec = Field(default=ExplainSpec(), description="What routers remember of their decisions.")
    endpoint_picker: EndpointPickerSpec | None = Field(
        default=None, description="Serve gateways too (Envoy and others that speak ext_proc). Default: no."
    )
    processes: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1,
        description="Router processes of a pod, which share its port: as many as it may use cores. They gossip among themselves. "
        "Default: 1.",
    )
    tls: TlsSpec | None = Field(default=None, description="TLS at the router's port. Default: plain HTTP.")
    gossip: GossipSpec | None = Field(
        default=None,
        description="Router pods tell each other what they send. Default: they do, by the key that the fleet's pods share "
        "(spec.peerKey), where that is to be had; else each goes by its own requests alone.",
    )

    @property
    def slow_start_s(self) -> float:
        """Slow start in seconds."""
        return parse_duration(self.slow_start)

    @property
    def return_wait_s(self) -> float:
        """Wait in seconds."""
        return parse_duration(self.return_wait)


class QueueSpec(ApiModel):
    """Requests that wait in a router because every decode worker runs engine.maxBatch requests."""

    per_slot: Annotated[int, Field(ge=1, le=64)] = Field(
        default=4, description="At most so many wait per request that the workers run at once, more get 429 or 529. Default: 4."
    )


class HoldSpec(ApiModel):
    """Requests that wait in a router while a tier wakes from zero; the bounds are each router process's own."""

    requests: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=256, description="Most requests that one router process holds; further ones get 503. Default: 256."
    )
    size: QuantityText = Field(
        default="64Mi", description="Most bytes of their bodies that one router process holds, 4Mi to 16Gi. Default: 64Mi."
    )
    time: DurationText = Field(
        default="5m", description="Longest time that a request is held before it gets 503, 1s to 1h. Default: 5m."
    )

    @property
    def size_bytes(self) -> int:
        """Bodies in bytes."""
        return parse_quantity(self.size)

    @property
    def time_s(self) -> float:
        """Time in seconds."""
        return parse_duration(self.time)


class LimitsSpec(ApiModel):
    """What one request may ask for, and how many may wait."""

    max_input_tokens: Tokens | None = Field(
        default=None,
        description="Longest prompt in tokens, of every generating path and of each text to embed, at most engine.maxModelLen. "
        "Text above 16 bytes a token is refused as it is; what bytes do not settle is counted by a worker before it is computed. "
        "Default: engine.maxModelLen.",
    )
    max_output_tokens: Tokens = Field(
        default=4096,
        description="Most tokens that one request may generate, for each of its choices, also when it names no limit. "
        "Default: 4096.",
    )
    queue: QueueSpec = Field(default=QueueSpec(), description="Requests that wait for a worker.")
    runaway_patterns: Literal["none", "default"] = Field(
        default="none",
        description="default: a stream that repeats itself for 256 tokens, does not stop at its limit or writes control tokens "
        "as text is ended with a finish_reason. Default: none.",
    )
    hold: HoldSpec = Field(
        default=HoldSpec(),
        description="Requests that wait while a tier wakes from zero, or for a decode worker that was just there "
        "(routing.returnWait).",
    )


class LatencySpec(ApiModel):
    """A latency objective."""

    p99: DurationText = Field(description="99 of 100 such times are at most this long, 1ms to 1h.")

    @property
    def p99_s(self) -> float:
        """Objective in seconds."""
        return parse_duration(self.p99)


class SloSpec(ApiModel):
    """Latency objectives; scaling adds workers when they are missed."""

    ttft: LatencySpec | None = Field(
        default=None,
        description="Time to the first token; prefill workers are added when missed. It bounds the queue: a request that waited "
        "0.85 of it for a slot is answered 503. Default: none; the queue has 60s.",
    )
    itl: LatencySpec | None = Field(default=None, description="Time between tokens; decode workers are added when missed.")


class TargetInflightSpec(ApiModel):
    """Requests in flight per worker that scaling aims at."""

    prefill: Annotated[int, Field(ge=1, le=1024)] = Field(default=4, description="Per prefill worker. Default: 4.")
    decode: Annotated[int, Field(ge=1, le=1024)] = Field(default=16, description="Per decode worker. Default: 16.")


class BudgetSpec(ApiModel):
    """What a fleet may cost: devices, money by the hour, or both."""

    gpus: Annotated[int, Field(ge=0, le=1_000_000)] | None = Field(
        default=None,
        description="Most devices of all tiers together. The minimum of every tier comes first, then the tiers in their order; "
        "minima are asked for beyond it, too, and a rollout adds its surge. Default: no limit.",
    )
    per_hour: Annotated[float, Field(ge=0.0, le=1_000_000_000.0)] | None = Field(
        default=None,
        description="Most that the devices of all tiers together may cost an hour, by cost.perGpuHour of every tier, in the same "
        "currency; the rules are those of gpus. Default: no limit.",
    )


class ToZeroSpec(ApiModel):
    """No worker at all while nobody asks: prefill and decode go together, and come back together for the first request."""

    enabled: bool = Field(
        default=False,
        description="true: an idle fleet has no workers; its router holds the requests that wake it. A tier with warm workers "
        "keeps its workers. Default: false.",
    )
    idle: DurationText = Field(
        default="30m",
        description="The fleet gives its workers up after so long without a request, and at the earliest so long after it woke; "
        "a fleet whose load is unknown keeps them. 5s to 24h. Default: 30m.",
    )

    @property
    def idle_s(self) -> float:
        """Idle time in seconds."""
        return parse_duration(self.idle)


class ScalingSpec(ApiModel):
    """How the operator sizes the tiers."""

    mode: Literal["auto", "manual", "external"] = Field(
        default="auto",
        description="auto follows the load; manual follows only /scale of the worker pools; external, too, and each role has a "
        "WorkerPool FLEET-TIER-ROLE for all of its revisions, whose name lasts, for an HPA or KEDA. Default: auto.",
    )
    target_inflight: TargetInflightSpec = Field(default=TargetInflightSpec(), description="Requests in flight per worker.")
    scale_down_window: DurationText = Field(
        default="2m", description="Workers leave only after the load stayed low for this long, at most 24h. Default: 2m."
    )

    capacity_wait: DurationText = Field(
        default="5m",
        description="A worker without a node for this long, or refused by a quota, caps its tier at what exists, for as long; "
        "then it is tried again. 1s to 24h. Default: 5m.",
    )
    budget: BudgetSpec | None = Field(default=None, description="Most devices, and most money by the hour. Default: no limit.")
    to_zero: ToZeroSpec = Field(default=ToZeroSpec(), description="Whether an idle fleet keeps its workers.")

    @property
    def capacity_wait_s(self) -> float:
        """Wait in seconds."""
        return parse_duration(self.capacity_wait)

    @property
    def scale_down_window_s(self) -> float:
        """Window in seconds."""
        return parse_duration(self.scale_down_window)


class PrometheusSpec(ApiModel):
    """A Prometheus server to read metrics from."""

    url: Annotated[str, Field(pattern=r"^https?://[^/\s@]+(/[^\s@]*)?$", max_length=2048)] = Field(
        description="Base URL, e.g. http://prometheus.monitoring:9090; without credentials, because everybody can read them here."
    )


class TraceHeadersRef(ApiModel):
    """A key of a Secret of the fleet's namespace; the operator never reads it."""

    name: SecretName = Field(description="Name of the Secret.")
    key: SecretKey = Field(
        default="headers",
        description="Key in its data: name=value,name=value, percent-encoded as in OTEL_EXPORTER_OTLP_HEADERS, e.g. "
        "authorization=Bearer%20TOKEN. Default: headers.",
    )


class TracesSpec(ApiModel):
    """OpenTelemetry spans of requests, from the routers."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s@]+(/[^\s@]*)?$", max_length=2048)] = Field(
        description="OTLP/HTTP collector, e.g. http://collector.monitoring:4318; without credentials, because everybody can read "
        "them here."
    )
    headers_secret_ref: TraceHeadersRef | None = Field(
        default=None,
        description="Headers for the collector, e.g. a token. Routers read them when they start; without the Secret they start, "
        "too, and send none. Default: none.",
    )
    sample: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        default=0.01,
        description="Share of the requests without a trace context that get spans; others are sampled as their context says. At "
        "most 100 requests a second per router. Default: 0.01.",
    )


class TelemetrySpec(ApiModel):
    """Where load and latency come from, and where spans go."""

    prometheus: PrometheusSpec | None = Field(
        default=None, description="Read from Prometheus. Default: the operator scrapes workers and routers itself."
    )
    interval: DurationText = Field(default="5s", description="Time between two readings, 1s to 5m. Default: 5s.")
    traces: TracesSpec | None = Field(default=None, description="Send spans to a collector. Default: none are made.")

    @property
    def interval_s(self) -> float:
        """Interval in seconds."""
        return parse_duration(self.interval)
