"""What the planner sees. Frozen data only; every time is a UNIX timestamp in seconds passed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fleet_planner.memory import CLOCK_UNSET, NEVER_RESTED, ClockMemory, RestMemory, ScaleMemory
from fleet_planner.roles import Role

Verdict = tuple[Literal["True", "False", "Unknown"], str, str]  # status, reason and message of a condition


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """One worker pod as the API shows it."""

    name: str
    uid: str
    role: Role
    tier: str
    revision: str
    ordinal: int
    ip: str | None
    node: str | None
    phase: str
    """Pending | Running | Succeeded | Failed | Unknown."""
    ready: bool
    terminating: bool
    created_at: float
    ready_since: float | None
    message: str = ""
    """Why it is not ready: waiting or termination message of the container, or the scheduler's words."""
    unschedulable: bool = False
    unready_since: float | None = None  # when it ceased to be ready, or was made; None: it is ready, or that is not known
    gated: bool = False  # the scheduler may not look at it yet: a queue lets it in
    restarts: int = 0
    blocked: bool = False
    rejected: bool = False  # its node turned it away before anything of it ran
    held: bool = False  # so it was, or it came to a node that goes away, a moment ago: it does not go yet
    silent: bool = False
    """It cannot be started (its image, or a Secret that it names, is not to be had); it was ready, and runs without an answer."""
    crashes: int = 0
    """How often the worker's own container ended by itself; what others put beside it does not count."""
    beside: str = ""  # what keeps its pod from being ready though the worker itself is, in the kubelet's words
    compat: str = ""  # KV compatibility hash that it was made with
    member: int = 0
    """Its place in a worker that spans several nodes; 0 leads."""
    group: str = ""
    """Uid of the leader that it was made to follow; empty for leaders."""
    scheduled_at: float | None = None  # when it got its node
    leaving: str = ""
    """Why its node goes away (cordoned, not ready, tainted); empty while it stays."""
    sick: str = ""
    """What is wrong with its node's devices: no new request should go there."""
    accused: tuple[str, ...] = ()  # conditions of its node that call devices bad, as TYPE=STATUS
    suspected: str = ""  # they call too many nodes bad to be believed, in words (`node_conditions.py`)
    deletion_cost: int = 0  # controller.kubernetes.io/pod-deletion-cost: among equals the cheapest goes first
    busy: float | None = None  # requests that it runs; None: unknown
    serving: bool = False  # the routers are told to use it
    told: bool = False  # they are told of it: it serves, is held, or is absent
    flipping: Role | None = None
    """The role that it was told to take; `role` is the one that it still has by its label. Its own: it is told that once more."""
    flip_since: float = 0.0
    flipped: bool = False  # it once had the other role: its times say nothing of a cold start
    astray: str = ""  # why it is not believed to have the role of its label, in words (`astray.py`)
    excused: str = ""  # it would be, but too many say so at once: it serves on
    righted: bool = False  # it was so once, and was told its role
    drain_s: float = 30.0  # longest time that it may take for its streams and leases
    gone_by: float | None = None  # when its grace is over; None: it does not go, or that is not known


@dataclass(frozen=True, slots=True)
class FlipReport:
    """What a worker that is to change its role says of itself, and what was proven of it."""

    role: Role | None = None
    """The role that it says it has; None: it did not answer yet."""
    phase: str = ""
    refused: str = ""
    """It declined before anything had changed: it goes on in its old role."""
    problem: str = ""
    """Why it cannot be trusted in its new role."""
    proof: str = ""
    """How its new role was proven, in words; empty: it was not, yet."""


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """What decides whether a worker may run there."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[tuple[str, str, str], ...] = ()
    """(key, value, effect)."""
    devices: frozenset[str] = frozenset()
    """Extended resources that it has any of."""
    leaving: bool = False
    """Cordoned, lost or going away."""


@dataclass(frozen=True, slots=True)
class FetchPod:
    """One pod that fetches, or has fetched."""

    name: str
    uid: str
    node: str
    key: str
    phase: str
    created_at: float
    message: str = ""
    terminating: bool = False
    placed: bool = False
    """The scheduler let it on its node; before it runs its image may have to come."""
    outlived: bool = False
    """Its node is another machine by now, under the same name."""


@dataclass(frozen=True, slots=True)
class FetchWanted:
    """A pod to create."""

    name: str
    node: str
    key: str
    tier: str


@dataclass(frozen=True, slots=True)
class AdapterSeen:
    """What a worker says about one adapter."""

    name: str
    source: str = ""
    """The wished source as the worker was told it; empty when it is to go, or was only published and not reported yet."""
    state: str = "Loaded"
    """Loaded | Loading | Failed | Unloading."""
    digest: str = ""
    """Of the version that its engine has; empty: none."""
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class ObservedPool:
    """One WorkerPool object."""

    name: str
    uid: str
    role: Role
    tier: str
    revision: str
    replicas: int
    """spec.replicas as it stands: differs from `planned` when somebody used /scale."""
    planned: int | None
    """What the operator last wrote (annotation inferencefleet.io/planned)."""
    size: int | None = None
    """Workers that the whole role should have, all revisions together (annotation inferencefleet.io/size)."""
    wish: int | None = None
    """Workers that a user or load asks for, where nodes, quota or budget allow less (annotation inferencefleet.io/wish)."""


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """Demand and latency of one role of one tier, averaged over the telemetry window. None = no data, never zero."""

    inflight: float | None = None
    """Requests inside this role's legs (router) or running + waiting (engines): whichever is known, the larger."""
    ttft_p99_s: float | None = None
    itl_p99_s: float | None = None
    measured_at: float | None = None


@dataclass(frozen=True, slots=True)
class KvProof:
    """Engine counters of one tier: what moved by KV transfer since the workers started."""

    transfers: int
    blocks: int
    bytes: int
    failed: int
    measured_at: float
    answers_since: int | None = None
    """Answers of the router whose prompt another worker prefilled, since a transfer was last seen; None when not comparable."""
    failed_since: int | None = None
    """Transfers that failed since then."""
    late: int = 0
    """Transfers of the last thousands that vLLM's prefill workers heard of after the lease's end."""


@dataclass(frozen=True, slots=True)
class TransportSeen:
    """What one worker says about its transport: "tcp", "shm", "rdma", "emulated" (RDMA's lanes, the CPUs' work), or "none" when
    nothing worked."""

    pod: str
    transport: str
    gbps: float | None = None
    """Of the probe at its start."""
    memlock_bytes: int | None = None
    """How much memory it may lock for a NIC; None: nothing limits it, or it does not matter."""


@dataclass(frozen=True, slots=True)
class RevisionLoad:
    """What clients got from one revision: over the telemetry window, and since its first request."""

    requests: float
    errors: float
    total_requests: float = 0.0
    total_errors: float = 0.0
    ttft_p99_s: float | None = None
    itl_p99_s: float | None = None
    partial: bool = False
    """Some router could not be read: it counted more."""
    streams: float | None = None
    """Requests of the window whose latency is known; None: nobody says."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a fleet's routers say of their clients."""

    held: int
    """Requests that wait for a worker in the routers that could be read."""
    arrivals: float | None
    """Requests that ever came to any of the routers; None when one of them could not be read or does not count them."""
    measured_at: float
    prefilling: float | None = None
    """Requests for which routers wait for a prefill worker that they know; None when one of them does not say."""


@dataclass(frozen=True, slots=True)
class TierTelemetry:
    """All that is known about one tier's load."""

    prefill: RoleLoad = RoleLoad()
    decode: RoleLoad = RoleLoad()
    kv: KvProof | None = None
    transport: str | None = None  # that the workers report as in use, the slowest of them; None when unknown
    engine_start_s: float | None = None  # what their engines took to their first token, the median; None when unknown
    transports: tuple[TransportSeen, ...] = ()  # of each worker that reports one
    problem: str | None = None
    """Why nothing is known, when the source itself failed."""
    revisions: dict[str, RevisionLoad] = field(default_factory=dict)
    """By revision; one that no router has counted yet is absent."""
    busy: dict[str, float] = field(default_factory=dict)
    """By pod name: requests that the worker runs; one that could not be read is absent."""
    idle: dict[str, float] = field(default_factory=dict)
    """By pod name: when it was read, of workers that then ran nothing and had no lease open."""
    astray: dict[str, Role] = field(default_factory=dict)  # by pod name: the role that agents say, where it is not their pod's
    demand: Demand | None = None
    """Of the whole fleet, whichever tier its requests go to; None when no router could be read."""
    pairs: tuple[tuple[str, str], ...] = ()  # (prefill, decode) names: between these KV fails again and again, routers say
    moved: tuple[tuple[str, str], ...] = ()  # beside those: between these it moved lately
    latencies_since: float | None = None  # when what the p99s are of began; None: not known
    unheard: bool = False  # no router could be read: without a p99 it is not known whether an objective is met
    doubtful: frozenset[str] = frozenset()  # names in `pairs` of which one router alone tells, out of so many that others should


@dataclass(frozen=True, slots=True)
class RouterPod:
    """One pod of a router that is not on its way out."""

    name: str
    created_at: float
    ready: bool = False
    message: str = ""
    """The kubelet's or the scheduler's words; of one that is ready: about the end before its last start."""
    restarts: int = 0
    ended_at: float | None = None
    """When its container ended the last time, by its node's clock."""
    pending: bool = False
    """Its containers have not been started yet."""
    beside: str = ""
    """What keeps it from being ready though the router itself is, in the kubelet's words."""


@dataclass(frozen=True, slots=True)
class RouterView:
    """The router Deployment."""

    desired: int
    ready: int
    message: str = ""
    silent: str = ""
    """Name of a pod that is not ready and says nothing; empty where a message explains why none is."""
    pods: tuple[RouterPod, ...] = ()
    refused: str = ""
    """Why the API server takes no further pod of it."""


@dataclass(frozen=True, slots=True)
class Template:
    """What a tier's pods are made from, as the renderer hashed it."""

    revision: str
    """First 8 hex digits of a hash over everything that a running pod cannot change."""
    compat: str
    """KV moves only between workers with equal hashes."""
    gpus: tuple[int, int] = (0, 0)  # devices of one prefill and of one decode worker, all of its nodes together
    nodes: tuple[int, int] = (1, 1)  # pods of each
    number: int = 0  # place in the history, growing
    flippable: bool = False  # a worker of one role can become one of the other in place: equal pods apart from the role
    starts_anew: bool = False  # its engine is started once more for that
    price: float | None = None  # of one device for an hour, when it was stored; None: nobody said one
    key: str | None = None  # `peerkey.told` of the Secret that its pods have; None: they have none


@dataclass(frozen=True, slots=True)
class Problem:
    """One write that failed; `reason` is the API's CamelCase reason."""

    reason: str
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Observed:
    """One fleet as it is: objects and telemetry with their ages."""

    pods: tuple[ObservedPod, ...] = ()
    pools: tuple[ObservedPool, ...] = ()
    targets: tuple[ObservedPool, ...] = ()  # scale targets that stand for a role, whatever its revisions
    router: RouterView | None = None
    templates: dict[str, Template] = field(default_factory=dict)
    """By tier name: what the spec asks for."""
    awaited: str = ""
    """Of the tier that is planned: the revision of the spec that waits for its model, while `templates` has the one before it."""
    stored: dict[str, dict[str, Template]] = field(default_factory=dict)
    """By tier name and revision: templates that pods can still be made from."""
    telemetry: dict[str, TierTelemetry] = field(default_factory=dict)
    telemetry_read: bool = True
    """False until the operator has read it for the first time since it started: what the status says of it then stands."""
    memory: dict[str, ScaleMemory] = field(default_factory=dict)
    flips: dict[str, FlipReport] = field(default_factory=dict)
    """By uid: workers that are to change their role."""
    rest: RestMemory = NEVER_RESTED
    clock: ClockMemory = CLOCK_UNSET
    clock_set_s: float = 0.0
    """By how much the operator's clock was set since the last pass."""
    heard: Demand | None = None
    """What routers of a fleet at zero said between two readings of its telemetry."""
    nodes: tuple[ObservedNode, ...] | None = None
    """None: they cannot be read."""
    fetching: tuple[FetchPod, ...] = ()
    adapters: dict[str, tuple[AdapterSeen, ...]] = field(default_factory=dict)
    """By uid: what workers say of their adapters; one that has said nothing yet has what the routers were told last."""
    problems: tuple[Problem, ...] = ()
    """What the last apply could not do, in words; empty when all was applied."""
    resolved: dict[str, Any] | None = None  # `fleet.resolved()`, where it is known already
    makes_keys: bool = True  # the operator makes keys for fleets, and may
