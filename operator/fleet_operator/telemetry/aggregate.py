"""Readings of workers and routers → one TierTelemetry per tier. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fleet_operator.telemetry.kvwatch import KvWatch, watched
from fleet_operator.telemetry.meter import COUNT_LIMIT, Counts
from fleet_operator.telemetry.parse import Sample, buckets, quantile, total
from fleet_planner.flip import other
from fleet_planner.roles import Role
from fleet_planner.types import Demand, KvProof, RevisionLoad, RoleLoad, TierTelemetry, TransportSeen

TTFT = "fleet_router_ttft_seconds"
ITL = "fleet_router_itl_seconds"
SENT = "fleet_router_inflight"
QUEUED = "fleet_router_queue_length"
"""Routers: requests that no worker was sent, because all run as many as they can."""
REQUESTS = "fleet_router_revision_requests_total"
ERRORS = "fleet_router_revision_errors_total"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
LEASES = "fleet:kv_leases_open"
"""Prefill workers: KV that nobody has read yet. vLLM does not say it."""
TRANSFERS = "vllm:nixl_xfer_time_seconds_count"
BLOCKS = "fleet:kv_blocks_received_total"
BYTES = "vllm:nixl_bytes_transferred_sum"
FAILED = "vllm:nixl_num_failed_transfers_total"
LATE = "vllm:nixl_num_notifications_after_expiry_total"
"""Prefill workers of vLLM: a decode worker told that it had read KV, and its lease had ended before."""
HANDED = "fleet_router_handed_over_total"
TRANSPORT = "fleet_agent_transport_info"
GBPS = "fleet_agent_probe_gbps"
MEMLOCK = "fleet_agent_memlock_bytes"
STARTED = "fleet_agent_engine_start_seconds"
ROLE_SAID = "fleet_agent_role_epoch"
"""Agents: its label is the role that they have."""
PAIR = "fleet_router_pair_failing"
"""Routers: 1 for two workers between which KV fails again and again."""
MANY_ROUTERS = 3
"""Of so many one alone is not believed when it says who fails: with two it could be either of them, and both count."""
MOVED = "fleet_router_pair_moved"
"""Routers: 1 for two workers between which KV moved lately, where one of them is in such a pair."""
HELD = "fleet_router_held"
ARRIVALS = "fleet_router_arrivals_total"
METRICS = frozenset(
    {
        f"{TTFT}_bucket",
        f"{ITL}_bucket",
        SENT,
        QUEUED,
        REQUESTS,
        ERRORS,
        RUNNING,
        WAITING,
        TRANSFERS,
        BLOCKS,
        BYTES,
        FAILED,
        HANDED,
    }
    | {TRANSPORT, GBPS, MEMLOCK, HELD, ARRIVALS, LATE, LEASES, PAIR, MOVED, STARTED, ROLE_SAID}
)
"""Every metric that anything here reads."""
ENGINES = ("vllm:", "fleet:")
"""How the names of what engines count begin."""
UNWATCHED = KvWatch()
SLOWEST_FIRST = ("none", "tcp", "emulated", "rdma", "shm")
LOAD_LIMIT = 1e6
"""More requests at once than any one engine or router holds: who says so is not believed, and counts as not read."""
LATENCY_LIMIT_S = 86_400.0
"""Nobody waits a day for a token, nor for an engine."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One exposition and when it was read."""

    samples: list[Sample]
    read_at: float


NOTHING_SAID = Reading([], 0.0)


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """A worker's exposition; `reading` None when it could not be read."""

    tier: str
    role: Role
    reading: Reading | None
    pod: str = ""
    """Its name."""


def tier_telemetry(
    tier: str,
    workers: Sequence[WorkerReading],
    routers: Sequence[Reading | None],
    earlier: Sequence[Reading | None],
    now: float,
    watch: KvWatch = UNWATCHED,
) -> TierTelemetry:
    """What is known of a tier. `earlier` are the routers' readings at the beginning of the window, same order; `watch` is what
    `watch_tier` made of this reading."""
    mine = [worker for worker in workers if worker.tier == tier]
    seen = tuple(found for worker in mine if (found := _transport(worker)) is not None)
    used, pairs = {found.transport for found in seen}, _pairs(PAIR, tier, mine, routers)
    return TierTelemetry(
        prefill=_load("prefill", tier, mine, routers, _window(routers, earlier, TTFT, tier=tier), None),
        decode=_load("decode", tier, mine, routers, None, _window(routers, earlier, ITL, tier=tier)),
        kv=_proof(mine, now, watch),
        revisions=_revisions(tier, routers, earlier),
        transport=next((name for name in SLOWEST_FIRST if name in used), None),
        transports=seen,
        engine_start_s=_engine_start_s(mine),
        idle={worker.pod: worker.reading.read_at for worker in mine if worker.reading is not None and _is_idle(worker)},
        busy={worker.pod: held for worker in mine if (held := _held(worker)) is not None},
        astray=_astray(mine),
        demand=_demand(routers),
        pairs=pairs,
        moved=_pairs(MOVED, tier, mine, routers),
        latencies_since=min((old.read_at for new, old in zip(routers, earlier, strict=True) if new and old), default=None),
        doubtful=_doubtful(tier, mine, routers) if pairs else frozenset(),
        unheard=bool(routers) and not any(routers),
    )


def _pairs(
    name: str, tier: str, workers: Sequence[WorkerReading], routers: Sequence[Reading | None]
) -> tuple[tuple[str, str], ...]:
    """(prefill, decode) names of workers that are there, as any router tells them under this `name`."""
    told = [one for reading in routers if reading is not None for one in reading.samples if one.name == name and one.value > 0]
    if not told:
        return ()
    there = {(worker.role, worker.pod) for worker in workers}
    pairs = {(one.labels.get("prefill", ""), one.labels.get("decode", "")) for one in told if one.labels.get("tier") == tier}
    return tuple(sorted(pair for pair in pairs if {("prefill", pair[0]), ("decode", pair[1])} <= there))


def _doubtful(tier: str, workers: Sequence[WorkerReading], routers: Sequence[Reading | None]) -> frozenset[str]:
    """Workers of failing pairs of which one router alone tells, where MANY_ROUTERS can be read. The others cannot say that KV
    moves between those two: a router tells of pairs that work only beside one that fails at itself."""
    read = [reading for reading in routers if reading is not None]
    if len(read) < MANY_ROUTERS:
        return frozenset()
    told = [{name for pair in _pairs(PAIR, tier, workers, [reading]) for name in pair} for reading in read]
    return frozenset(name for names in told for name in names if sum(name in others for others in told) < 2)


def watch_tier(tier: str, before: KvWatch, workers: Sequence[WorkerReading], routers: Mapping[str, Reading | None]) -> KvWatch:
    """Routers' answers against decode workers' transfers, one reading later. `routers` by a name that lasts. No KV moves to an
    engine that starts for the first time: nobody waits for its word."""
    decode = {
        worker.pod: worker.reading for worker in workers
        if worker.tier == tier and worker.role == "decode" and (worker.pod in before.moved or not _is_silent(worker.reading))
    }  # fmt: skip
    prefill = {worker.pod: worker.reading for worker in workers if worker.tier == tier and worker.role == "prefill"}
    return watched(
        before,
        {name: _count(reading, HANDED, tier=tier) for name, reading in routers.items()},
        {pod: _engine_count(reading, TRANSFERS) for pod, reading in decode.items()},
        {pod: _engine_count(reading, FAILED) for pod, reading in decode.items()},
        {pod: _engine_count(reading, LATE) for pod, reading in prefill.items()},
    )


def _demand(routers: Sequence[Reading | None]) -> Demand | None:
    """What clients want of the routers. Whoever waits at one of them waits, whatever the others say; that nobody came is known
    only when all can be read."""
    read = [reading for reading in routers if reading is not None]
    if not read:
        return None
    arrivals = _sum([total(reading.samples, ARRIVALS) if reading is not None else None for reading in routers])
    held = sum(_load_of(reading, HELD) or 0.0 for reading in read)
    prefilling = _sum([_load_of(reading, SENT, role="prefill") if reading is not None else None for reading in routers])
    return Demand(round(held), arrivals, min(reading.read_at for reading in read), prefilling)


def _count(reading: Reading | None, name: str, **labels: str) -> float | None:
    """A counter that was never raised may be absent from a worker that could be read; what no counter can be was not read."""
    counted = None if reading is None else total(reading.samples, name, **labels) or 0.0
    return counted if counted is not None and 0 <= counted < COUNT_LIMIT else None


def _engine_count(reading: Reading | None, name: str) -> float | None:
    """The same of an engine. An agent answers also while its engine does not: that one has not counted 0 then."""
    return None if _is_silent(reading) else _count(reading, name)


def _is_silent(reading: Reading | None) -> bool:
    return reading is not None and not _engine_spoke(reading.samples)


def _engine_spoke(samples: list[Sample]) -> bool:
    return any(sample.name.startswith(ENGINES) for sample in samples)


def _load_of(reading: Reading, name: str, **labels: str) -> float | None:
    """Requests at this moment."""
    found = total(reading.samples, name, **labels)
    return found if found is not None and 0 <= found < LOAD_LIMIT else None


def _transport(worker: WorkerReading) -> TransportSeen | None:
    """The words of the worker's agent; a word that we do not know is none."""
    if worker.reading is None:
        return None
    told = {sample.labels.get("transport") for sample in worker.reading.samples if sample.name == TRANSPORT and sample.value == 1}
    name = next((name for name in SLOWEST_FIRST if name in told), None)
    if name is None:
        return None
    memlock = total(worker.reading.samples, MEMLOCK)
    locked = round(memlock) if memlock is not None and 0 <= memlock < COUNT_LIMIT else None
    return TransportSeen(worker.pod, name, total(worker.reading.samples, GBPS), locked)


def _load(
    role: Role,
    tier: str,
    workers: list[WorkerReading],
    routers: Sequence[Reading | None],
    ttft: float | None,
    itl: float | None,
) -> RoleLoad:
    """In flight: the larger of what routers sent or let wait and what engines hold. A role with an unreadable worker is still
    known when every router can be read, because they know all that they sent; else it is unknown. As old as the oldest reading
    in it."""
    mine = [worker for worker in workers if worker.role == role]
    sent = _sum([_sent(reading, role, tier) for reading in routers])
    held = _sum([_held(worker) for worker in mine])
    used = [] if sent is None else list(routers)
    used += [] if held is None else [worker.reading for worker in mine]
    known = [value for value in (sent, held) if value is not None]
    if not known:
        return RoleLoad()
    oldest = min(reading.read_at for reading in used if reading is not None)
    return RoleLoad(inflight=max(known), ttft_p99_s=ttft, itl_p99_s=itl, measured_at=oldest)


def _sent(reading: Reading | None, role: Role, tier: str) -> float | None:
    """With its part of those that wait in the router: they are taken to want what those want that run. Workers are sent no more
    than they run at once, and where scaling aims at as many the tier would never grow, whoever waits and is turned away."""
    if reading is None:
        return None
    sent, waiting = _told(reading, SENT, role=role, tier=tier), _told(reading, QUEUED)
    if sent is None or waiting is None:
        return None
    every = _told(reading, SENT) if sent and waiting else None
    return sent * (1 + waiting / every) if every else sent


def _told(reading: Reading, name: str, **labels: str) -> float | None:
    """A router that has sent nothing yet has no line of it."""
    said = total(reading.samples, name, **labels) is not None
    return _load_of(reading, name, **labels) if said else 0.0


def _held(worker: WorkerReading) -> float | None:
    if worker.reading is None:
        return None
    running, waiting = (_load_of(worker.reading, name) for name in (RUNNING, WAITING))
    return None if running is None or waiting is None else running + waiting


def _engine_start_s(workers: list[WorkerReading]) -> float | None:
    """The median of those that say it."""
    told = [total(worker.reading.samples, STARTED) for worker in workers if worker.reading is not None]
    return median(known) if (known := [took for took in told if took is not None and 0 < took < LATENCY_LIMIT_S]) else None


def _is_idle(worker: WorkerReading) -> bool:
    return _held(worker) == 0 and _count(worker.reading, LEASES) == 0


def _astray(workers: list[WorkerReading]) -> dict[str, Role]:
    """What agents say that is not what their pods' labels say. One that says nothing, or several roles at once, says nothing."""
    found: dict[str, Role] = {}
    for worker in workers:
        told = {one.labels.get("role") for one in worker.reading.samples if one.name == ROLE_SAID} if worker.reading else set()
        if told == {other(worker.role)}:
            found[worker.pod] = other(worker.role)
    return found


def _sum(values: list[float | None]) -> float | None:
    """None when there is nothing, or when one is missing: a part is not the whole."""
    return sum(value for value in values if value is not None) if values and None not in values else None


def _revisions(tier: str, routers: Sequence[Reading | None], earlier: Sequence[Reading | None]) -> dict[str, RevisionLoad]:
    """What clients got from each revision over the window. Each is counted among its own samples: of a router, or a Prometheus,
    that tells of thousands all samples were read anew for each, for minutes in which no fleet was looked at."""
    now, before = ([_by_revision(tier, reading) for reading in readings] for readings in (routers, earlier))
    names = {name for found in now if found is not None for name, one in found.items() if _has(one, REQUESTS)}
    return {name: _revision_load(tier, name, _of(name, now), _of(name, before)) for name in sorted(names)}


def _by_revision(tier: str, reading: Reading | None) -> dict[str, Reading] | None:
    """What it says of each revision of a tier; None when it could not be read."""
    if reading is None:
        return None
    found: dict[str, Reading] = {}
    for sample in reading.samples:
        if (name := sample.labels.get("revision")) and sample.labels.get("tier") == tier:
            found.setdefault(name, Reading([], reading.read_at)).samples.append(sample)
    return found


def _of(name: str, readings: Sequence[Mapping[str, Reading] | None]) -> list[Reading | None]:
    return [found.get(name, NOTHING_SAID) if found is not None else None for found in readings]


def _has(reading: Reading, name: str) -> bool:
    return any(sample.name == name for sample in reading.samples)


def _revision_load(
    tier: str, name: str, routers: Sequence[Reading | None], earlier: Sequence[Reading | None]
) -> RevisionLoad:  # fmt: skip
    never: list[None] = [None] * len(routers)
    mine = {"tier": tier, "revision": name}
    return RevisionLoad(
        requests=_counted(routers, earlier, REQUESTS, **mine),
        errors=_counted(routers, earlier, ERRORS, **mine),
        total_requests=_counted(routers, never, REQUESTS, **mine),
        total_errors=_counted(routers, never, ERRORS, **mine),
        ttft_p99_s=_window(routers, earlier, TTFT, **mine),
        itl_p99_s=_window(routers, earlier, ITL, **mine),
        partial=None in routers,
        streams=_counted(routers, earlier, f"{TTFT}_bucket", le="+Inf", **mine),
    )


def _counted(routers: Sequence[Reading | None], earlier: Sequence[Reading | None], name: str, **labels: str) -> float:
    """How much a counter grew over the window, all routers together; one that went back (a restart) counts from zero."""
    grown = 0.0
    for new, old in zip(routers, earlier, strict=True):
        after = (total(new.samples, name, **labels) or 0.0) if new is not None else 0.0
        before = (total(old.samples, name, **labels) or 0.0) if old is not None else 0.0
        grown += after - before if after >= before else after
    return grown


def _window(routers: Sequence[Reading | None], earlier: Sequence[Reading | None], name: str, **labels: str) -> float | None:
    """Worst p99 of any router over the window."""
    found = [
        quantile(buckets(old.samples, name, **labels) if old is not None else None, buckets(new.samples, name, **labels), 0.99)
        for new, old in zip(routers, earlier, strict=True)
        if new is not None
    ]
    known = [value for value in found if value is not None and 0 <= value < LATENCY_LIMIT_S]
    return max(known) if known else None


def kv_counts(samples: list[Sample]) -> Counts | None:
    """What one engine counted of KV transfers; None when it cannot be, or when its agent spoke alone."""
    if not _engine_spoke(samples):
        return None
    counts = [total(samples, name) or 0.0 for name in (TRANSFERS, BLOCKS, BYTES, FAILED)]
    if not all(0 <= count < COUNT_LIMIT for count in counts):
        return None
    return round(counts[0]), round(counts[1]), round(counts[2]), round(counts[3])


def decode_counts(tier: str, workers: Sequence[WorkerReading]) -> dict[str, Counts | None]:
    """KV counters of a tier's decode workers by pod; None for one that could not be read."""
    mine = [worker for worker in workers if worker.tier == tier and worker.role == "decode"]
    return {worker.pod: kv_counts(worker.reading.samples) if worker.reading is not None else None for worker in mine}


def _proof(workers: list[WorkerReading], now: float, watch: KvWatch) -> KvProof | None:
    """Counters of the tier's decode workers; None when none can be read, or when they count what cannot be."""
    told = [worker.reading.samples for worker in workers if worker.role == "decode" and worker.reading is not None]
    read = [kv_counts(samples) for samples in told if _engine_spoke(samples)]
    known = [counts for counts in read if counts is not None]
    if not read or len(known) < len(read):
        return None
    transfers, blocks, size, failed = (sum(column) for column in zip(*known, strict=True))
    return KvProof(
        transfers=transfers,
        blocks=blocks,
        bytes=size,
        failed=failed,
        measured_at=now,
        answers_since=watch.answers,
        late=watch.late,
        failed_since=watch.failed,
    )
