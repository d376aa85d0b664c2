"""The live worker table: endpoints from the operator, load and passive health from our own traffic."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleet_router.config import RouterConfig
from fleet_router.policy.choose import Ask, Candidate, Choice, Refusal, choose
from fleet_router.policy.prefix import PIECE_BYTES, PrefixIndex, key_chain, ring_key
from fleet_router.policy.ring import Ring
from fleet_router.request import BYTES_PER_TOKEN
from fleet_router.upstream import Pool
from fleet_wire.endpoints import Endpoint, Endpoints

INDEX_KEYS = 100_000
AVOID_FIRST_S = 1.0
AVOID_MOST_S = 30.0


@dataclass(slots=True)
class Worker:
    """One worker that may receive requests, and what we know of it."""

    endpoint: Endpoint
    pool: Pool
    inflight: int = 0
    failures: int = 0
    """In a row."""
    avoid_until: float = 0.0

    def failed(self, now: float) -> None:
        """A connect error, a broken answer or a 5xx: stay away for 1, 2, 4 … 30 s."""
        self.failures += 1
        self.avoid_until = now + min(AVOID_MOST_S, AVOID_FIRST_S * 2 ** (self.failures - 1))

    def succeeded(self) -> None:
        """An answer came: forget the failures."""
        self.failures = 0
        self.avoid_until = 0.0


@dataclass(slots=True)
class WorkerTable:
    """Workers by uid; rings are rebuilt when the set changes. Running requests keep the Worker that they hold."""

    workers: dict[str, Worker] = field(default_factory=dict)
    rings: dict[str, Ring] = field(default_factory=lambda: {"prefill": Ring(()), "decode": Ring(())})
    index: PrefixIndex = field(default_factory=lambda: PrefixIndex(INDEX_KEYS))
    turn: int = 0

    def update(self, document: Endpoints) -> None:
        """Follow the operator: new workers in, missing ones out; a worker that drains gets nothing new."""
        wanted = {endpoint.uid: endpoint for endpoint in document.workers if endpoint.state == "serving"}
        for uid in self.workers.keys() - wanted.keys():
            self.index.remove(uid)
            self.workers.pop(uid).pool.retire()
        for uid, endpoint in wanted.items():
            known = self.workers.get(uid)
            if known is None:
                self.workers[uid] = Worker(endpoint, Pool(endpoint.address, endpoint.http_port))
            else:
                known.endpoint = endpoint
        for role in self.rings:
            self.rings[role] = Ring([uid for uid, worker in self.workers.items() if worker.endpoint.role == role])

    def choose(
        self, prompt: bytes, config: RouterConfig, now: float, excluded: frozenset[str]
    ) -> tuple[Choice | Refusal, list[int]]:
        """A pair for this prompt, and its prefix keys."""
        keys = key_chain(prompt)
        self.turn += 1
        # The last piece is rarely full: without this a prompt of five bytes would count as 64 tokens.
        missing = max(0.0, len(keys) - len(prompt) / PIECE_BYTES)
        limit = config.min_uncached_tokens * BYTES_PER_TOKEN / PIECE_BYTES + missing
        ask = Ask(keys, ring_key(keys), limit, self.turn)
        found = choose(
            ask, self.candidates(now, excluded), self.index.matched(keys), self.rings, config.policy, config.load_bound
        )
        return found, keys

    def candidates(self, now: float, excluded: frozenset[str]) -> list[Candidate]:
        """Serving workers; those to be avoided only when a role has nobody else (panic), excluded ones never."""
        healthy: list[Candidate] = []
        avoided: list[Candidate] = []
        for uid, worker in self.workers.items():
            if uid in excluded:
                continue
            endpoint = worker.endpoint
            candidate = Candidate(uid, endpoint.role, (endpoint.tier, endpoint.compat), worker.inflight)
            (healthy if now >= worker.avoid_until else avoided).append(candidate)
        roles = {candidate.role for candidate in healthy}
        return healthy + [candidate for candidate in avoided if candidate.role not in roles]

    def ready(self) -> bool:
        """At least one worker can answer a whole request."""
        return any(worker.endpoint.role == "decode" for worker in self.workers.values())
