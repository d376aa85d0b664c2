"""The live worker table: endpoints from the operator, load and passive health from our own traffic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet_router.config import RouterConfig
from fleet_router.policy.adapters import version_of
from fleet_router.policy.choose import Ask, Candidate, Choice, Refusal, choose
from fleet_router.policy.prefix import PIECE_BYTES, PrefixIndex, adapter_seed, key_chain, ring_key
from fleet_router.policy.ring import Ring
from fleet_router.policy.split import to_canary
from fleet_router.request import BYTES_PER_TOKEN
from fleet_router.upstream import CollectingUpstream, Pool, Upstream
from fleet_wire.endpoints import Endpoint, Endpoints, Split

INDEX_KEYS = 100_000
AVOID_FIRST_S = 1.0
AVOID_MOST_S = 30.0


@dataclass(slots=True, eq=False)
class Worker(Candidate):
    """One worker that may receive requests, and what we know of it."""

    endpoint: Endpoint
    pool: Pool
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

    def succeeded(self) -> None:
        """An answer came: forget the failures."""
        self.failures = 0
        self.avoid_until = 0.0


def new_worker(endpoint: Endpoint) -> Worker:
    """Only a prefill worker's answers are read; a decode worker's are handed on."""
    kind = CollectingUpstream if endpoint.role == "prefill" else Upstream
    pool = Pool(endpoint.address, endpoint.http_port, kind)
    return Worker(endpoint.uid, endpoint.role, (endpoint.tier, endpoint.compat), 0, endpoint, pool)


@dataclass(slots=True)
class Share:
    """Requests since a split began."""

    seen: int = 0
    taken: int = 0


@dataclass(slots=True)
class WorkerTable:
    """Workers by uid; rings are rebuilt when the set changes. Running requests keep the Worker that they hold."""

    workers: dict[str, Worker] = field(default_factory=dict)
    by_role: dict[str, list[Worker]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    rings: dict[str, Ring] = field(default_factory=lambda: {"prefill": Ring(()), "decode": Ring(())})
    index: PrefixIndex = field(default_factory=lambda: PrefixIndex(INDEX_KEYS))
    turn: int = 0
    shares: dict[Split, Share] = field(default_factory=dict)
    """What each canary got so far."""

    def update(self, document: Endpoints) -> None:
        """Follow the operator: new workers in, missing ones out; a worker that drains gets nothing new."""
        wanted = {endpoint.uid: endpoint for endpoint in document.workers if endpoint.state == "serving"}
        # one that changed its role is another worker: its connections read answers in another way, and its cache is not counted
        stays = {uid for uid, worker in self.workers.items() if uid in wanted and wanted[uid].role == worker.role}
        for uid in self.workers.keys() - stays:
            self.index.remove(uid)
            self.workers.pop(uid).retire()
        for uid, endpoint in wanted.items():
            known = self.workers.get(uid)
            if known is None:
                self.workers[uid] = new_worker(endpoint)
            else:
                known.follow(endpoint)
        self.shares = {split: self.shares.get(split, Share()) for split in document.splits}
        for role in self.rings:
            self.by_role[role] = [worker for worker in self.workers.values() if worker.role == role]
            self.rings[role] = Ring([worker.uid for worker in self.by_role[role]])

    def choose(
        self, prompt: bytes, config: RouterConfig, now: float, excluded: frozenset[str], seed: int = 0, adapter: str = ""
    ) -> tuple[Choice | Refusal, list[int]]:
        """A pair for this prompt, and its prefix keys, which begin with the tenant's `seed` and the adapter's version."""
        candidates, version = self.candidates(now, excluded), ""
        if adapter:
            candidates, version = under(adapter, candidates)
            if not candidates["decode"]:
                return Refusal(f"adapter {adapter} is on no decode worker now"), []
        keys = key_chain(prompt, adapter_seed(seed, version))
        self.turn += 1
        # The last piece is rarely full: without this a prompt of five bytes would count as 64 tokens.
        missing = max(0.0, len(keys) - len(prompt) / PIECE_BYTES)
        limit = config.min_uncached_tokens * BYTES_PER_TOKEN / PIECE_BYTES + missing
        ask = Ask(keys, ring_key(keys), limit, self.turn)
        matched = self.index.matched(keys)
        for split, share in self.shares.items():
            candidates = self._split(split, share, candidates, matched)
        found = choose(ask, candidates, matched, self.rings, config.policy, config.load_bound)
        return found, keys

    def _split(
        self, split: Split, share: Share, candidates: dict[str, list[Worker]], matched: Mapping[str, int]
    ) -> dict[str, list[Worker]]:
        """Only the canary's workers of this tier, or all but these."""
        decodes = [worker for worker in candidates["decode"] if worker.endpoint.tier == split.tier]
        canary = [worker for worker in decodes if worker.endpoint.revision == split.revision]
        if not canary or len(canary) == len(decodes):
            return candidates  # one side alone serves
        pieces = [0, 0]
        for worker in decodes:
            side = worker.endpoint.revision == split.revision
            pieces[side] = max(pieces[side], matched.get(worker.uid, 0))
        chosen = to_canary(split.percent, share.seen, share.taken, pieces[1], pieces[0])
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
