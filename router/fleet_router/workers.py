"""The live worker table: endpoints from the operator, load and passive health from our own traffic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fleet_router.config import RouterConfig
from fleet_router.hints import NO_HINTS, Hints
from fleet_router.kvindex.approximate import adapter_seed, key_chain, ring_key
from fleet_router.policy import choose as simple
from fleet_router.policy.adapters import version_of
from fleet_router.policy.candidate import Candidate
from fleet_router.policy.choose import NO_DECODE, Choice, Refusal
from fleet_router.policy.cost import CostAsk, Offer
from fleet_router.policy.ring import Ring
from fleet_router.policy.routing import Routing
from fleet_router.policy.side import Steps, Usable
from fleet_router.policy.split import to_canary
from fleet_router.policy.tiers import tier_of
from fleet_router.policy.trip import Trip
from fleet_router.upstream import CollectingUpstream, Pool, Upstream
from fleet_wire.endpoints import Endpoint, Endpoints, Split

AVOID_FIRST_S = 1.0
AVOID_MOST_S = 30.0


@dataclass(slots=True)
class Trouble:
    """Until when somebody is to be avoided: before that every worker is asked, after it none."""

    until: float = 0.0


@dataclass(slots=True, eq=False)
class Worker(Candidate):
    """One worker that may receive requests, and what we know of it."""

    endpoint: Endpoint = field(kw_only=True)
    pool: Pool = field(kw_only=True)
    trouble: Trouble = field(kw_only=True, default_factory=Trouble)
    failures: int = 0
    """In a row."""
    avoid_until: float = 0.0
    _reading: Pool | None = None

    def reading(self) -> Pool:
        """Connections whose answers are read, for translated requests; a prefill worker's always are."""
        if self.role == "prefill":
            return self.pool
        if self._reading is None:
            self._reading = Pool(self.endpoint.address, self.endpoint.http_port, CollectingUpstream)
        return self._reading

    def retire(self) -> None:
        """It left: its connections end."""
        self.pool.retire()
        if self._reading is not None:
            self._reading.retire()

    def follow(self, endpoint: Endpoint) -> None:
        """The operator says something new of it."""
        self.endpoint = endpoint
        self.role = endpoint.role
        self.group = (endpoint.tier, endpoint.compat)

    def failed(self, now: float) -> None:
        """A connect error, a broken answer or a 5xx: stay away for 1, 2, 4 … 30 s."""
        self.failures += 1
        self.avoid_until = now + min(AVOID_MOST_S, AVOID_FIRST_S * 2 ** (self.failures - 1))
        self.trouble.until = max(self.trouble.until, self.avoid_until)

    def succeeded(self) -> None:
        """An answer came: forget the failures."""
        self.failures = 0
        self.avoid_until = 0.0


def new_worker(endpoint: Endpoint, trouble: Trouble) -> Worker:
    """Only a prefill worker's answers are read; a decode worker's are handed on."""
    kind = CollectingUpstream if endpoint.role == "prefill" else Upstream
    pool = Pool(endpoint.address, endpoint.http_port, kind)
    group = (endpoint.tier, endpoint.compat)
    return Worker(endpoint.uid, endpoint.role, group, 0, endpoint=endpoint, pool=pool, trouble=trouble)


@dataclass(slots=True)
class Share:
    """Requests since a split began."""

    seen: int = 0
    taken: int = 0


NO_CONFIG = RouterConfig(fleet="", served_name="", slow_start_s=0.0)


@dataclass(frozen=True, slots=True)
class _Allowed:
    sides: dict[str, list[Worker]]
    version: str
    """Of the adapter; empty without one."""


@dataclass(slots=True)
class WorkerTable:
    """Workers by uid; rings are rebuilt when the set changes. Running requests keep the Worker that they hold."""

    workers: dict[str, Worker] = field(default_factory=dict)
    by_role: dict[str, list[Worker]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    rings: dict[str, Ring] = field(default_factory=lambda: {"prefill": Ring(()), "decode": Ring(())})
    """Of all groups together, for the policies that do not go by cost."""
    routing: Routing = field(default_factory=Routing)
    turn: int = 0
    shares: dict[Split, Share] = field(default_factory=dict)
    """What each canary got so far."""
    trouble: Trouble = field(default_factory=Trouble)

    def update(self, document: Endpoints, now: float = 0.0, config: RouterConfig = NO_CONFIG) -> None:
        """Follow the operator: new workers in, missing ones out; a worker that drains gets nothing new."""
        wanted = {endpoint.uid: endpoint for endpoint in document.workers if endpoint.state == "serving"}
        # one that changed its role is another worker: its connections read answers in another way, and its cache is not counted
        stays = {uid for uid, worker in self.workers.items() if uid in wanted and wanted[uid].role == worker.role}
        for uid in self.workers.keys() - stays:
            self.workers.pop(uid).retire()
        for uid, endpoint in wanted.items():
            known = self.workers.get(uid)
            if known is None:
                self.workers[uid] = new_worker(endpoint, self.trouble)
            else:
                known.follow(endpoint)
        self.shares = {split: self.shares.get(split, Share()) for split in document.splits}
        for worker in self.workers.values():
            worker.slots = config.worker_slots
        self.routing.update(list(self.workers.values()), now, config.slow_start_s)
        for role, ring in self.rings.items():
            self.by_role[role] = [worker for worker in self.workers.values() if worker.role == role]
            self.rings[role] = Ring([worker.uid for worker in self.by_role[role]], ring)

    def choose(
        self,
        prompt: bytes,
        config: RouterConfig,
        now: float,
        excluded: frozenset[str],
        seed: int = 0,
        adapter: str = "",
        hints: Hints = NO_HINTS,
    ) -> tuple[Choice | Refusal, list[int]]:
        """A pair for this prompt, and its prefix keys, which begin with the tenant's `seed` and the adapter's version."""
        routing = self.routing
        allowed = self._allowed(now, excluded, adapter)
        if allowed is not None and not allowed.sides["decode"]:
            return (Refusal(f"adapter {adapter} is on no decode worker now") if adapter else NO_DECODE), []
        keys = key_chain(prompt, adapter_seed(seed, allowed.version) if allowed is not None else seed)
        self.turn += 1
        is_ids = prompt[:1] == b"[" and prompt[1:2].isdigit()
        size = max(1, len(prompt))
        tokens = hints.tokens or (prompt.count(b",") + 1.0 if is_ids else size / routing.bytes_per_token.value)
        steps: Steps = routing.known(keys, size, tokens, ~hints.precise)
        if hints.blocks:
            steps = sorted([*steps, *hints.blocks], reverse=True)
        key = key_chain(hints.session)[0] if hints.session else ring_key(keys)
        tier = tier_of(config.tier_rules, tokens, hints.headers) if config.tier_rules else ""
        if config.policy == "kvAware":
            usable = _only(self._sides(allowed.sides, steps)) if allowed is not None else None
            ask = CostAsk(
                tokens, key, now, config.load_bound, config.min_uncached_tokens, config.decide == "cost", hints.local,
                hints.others, adapter, bool(hints.session),
            )  # fmt: skip
            offer = routing.decide(ask, steps, tier=tier, usable=usable)
            if offer is None:
                return NO_DECODE, keys
            return Choice(offer.prefill.uid if offer.prefill else None, offer.decode.uid, offer.reason, offer, ask), keys
        sides = allowed.sides if allowed is not None else self.candidates(now, excluded)
        candidates = self._sides(_of_tier(sides, tier), steps)
        plain = simple.Ask(key, tokens, math.inf if hints.local else config.min_uncached_tokens, self.turn)
        return simple.choose(plain, candidates, steps, self.rings, config.policy, config.load_bound), keys

    def depart(self, choice: Choice, now: float, adapter: str, *, stream: bool) -> Trip | None:
        """The first leg is sent; None for policies that learn nothing."""
        offer = choice.offer
        if not isinstance(offer, Offer):
            return None
        group = self.routing.groups[offer.decode.group]
        return Trip(group, offer, now, stream=stream, adapter=adapter)

    def _allowed(self, now: float, excluded: frozenset[str], adapter: str) -> _Allowed | None:
        """Who may be chosen, and the adapter's version; None: everybody."""
        if not excluded and not adapter and self.trouble.until <= now and not self.shares:
            return None
        found = self.candidates(now, excluded)
        return _Allowed(*under(adapter, found)) if adapter else _Allowed(found, "")

    def _sides(self, candidates: dict[str, list[Worker]], steps: Steps) -> dict[str, list[Worker]]:
        """Every split has said which side it is for this request."""
        for split, share in self.shares.items():
            candidates = self._split(split, share, candidates, steps)
        return candidates

    def _split(self, split: Split, share: Share, candidates: dict[str, list[Worker]], steps: Steps) -> dict[str, list[Worker]]:
        """Only the canary's workers of this tier, or all but these."""
        decodes = [worker for worker in candidates["decode"] if worker.endpoint.tier == split.tier]
        canary = [worker for worker in decodes if worker.endpoint.revision == split.revision]
        if not canary or len(canary) == len(decodes):
            return candidates  # one side alone serves
        mine = _bits(canary)
        others = _bits(decodes) & ~mine
        chosen = to_canary(split.percent, share.seen, share.taken, _most(steps, mine), _most(steps, others))
        share.seen += 1
        share.taken += chosen

        def stays(worker: Worker) -> bool:
            return worker.endpoint.tier != split.tier or (worker.endpoint.revision == split.revision) == chosen

        return {role: [worker for worker in workers if stays(worker)] for role, workers in candidates.items()}

    def candidates(self, now: float, excluded: frozenset[str]) -> dict[str, list[Worker]]:
        """Serving workers by role; those to be avoided only when a role has nobody else (panic), excluded ones never."""
        found = {}
        for role, workers in self.by_role.items():
            allowed = [worker for worker in workers if worker.uid not in excluded] if excluded else workers
            found[role] = [worker for worker in allowed if worker.avoid_until <= now] or allowed
        return found

    def ready(self) -> bool:
        """At least one worker can answer a whole request."""
        return bool(self.by_role["decode"])


def _only(sides: dict[str, list[Worker]]) -> Usable:
    uids = {worker.uid for workers in sides.values() for worker in workers}
    return lambda worker: worker.uid in uids


def _of_tier(sides: dict[str, list[Worker]], tier: str) -> dict[str, list[Worker]]:
    """Of this tier, if it serves."""
    if not any(worker.endpoint.tier == tier for worker in sides["decode"]):
        return sides
    return {role: [worker for worker in workers if worker.endpoint.tier == tier] for role, workers in sides.items()}


def under(adapter: str, candidates: dict[str, list[Worker]]) -> tuple[dict[str, list[Worker]], str]:
    """Those that have one version of an adapter, and which; both legs run under the same one."""
    version = version_of(adapter, (worker.endpoint.adapters for worker in candidates["decode"]))
    found = {
        role: [worker for worker in workers if version and worker.endpoint.adapters.get(adapter) == version]
        for role, workers in candidates.items()
    }
    return found, f"{adapter}@{version}"


def slots_of(table: WorkerTable, config: RouterConfig) -> dict[str, int]:
    """Requests that each tier runs at once: what its serving decode workers do. Empty when that is not known."""
    found: dict[str, int] = {}
    for worker in table.by_role["decode"]:
        if config.worker_slots:
            found[worker.endpoint.tier] = found.get(worker.endpoint.tier, 0) + config.worker_slots
    return found


def _bits(workers: Sequence[Worker]) -> int:
    found = 0
    for worker in workers:
        found |= worker.bit
    return found


def _most(steps: Steps, among: int) -> float:
    """Most tokens that one of these holds."""
    return max((tokens for tokens, mask in steps if mask & among), default=0.0)
