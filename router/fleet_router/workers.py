"""The live worker table: endpoints from the operator, load and passive health from our own traffic."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from fleet_router.admission.usage import estimated_at, only_text
from fleet_router.among import bits_of, most_of, of_tier, only, other_than, under, within
from fleet_router.ask import Ask, Hints
from fleet_router.config import Decide, RouterConfig
from fleet_router.follow.identity import Identity
from fleet_router.health.absent import Absent, awaited, followed
from fleet_router.health.breaker import Breaker
from fleet_router.health.pairs import PairHealth
from fleet_router.health.panic import askable
from fleet_router.health.races import Races
from fleet_router.hints import NO_HINTS
from fleet_router.kvindex.pieces import adapter_seed, key_chain, ring_key
from fleet_router.kvindex.underway import united
from fleet_router.lengths import TEMPLATE_TOKENS
from fleet_router.policy import choose as simple
from fleet_router.policy.candidate import Candidate
from fleet_router.policy.choose import NO_DECODE
from fleet_router.policy.chosen import Choice, Refusal, SimpleAsk
from fleet_router.policy.ring import Ring, cap_of
from fleet_router.policy.routing import Routing
from fleet_router.policy.side import Steps, Usable
from fleet_router.policy.split import Share, to_canary
from fleet_router.policy.terms import CostAsk, Offer
from fleet_router.policy.tiers import tier_of
from fleet_router.policy.trip import Trip
from fleet_router.request import sequences_of
from fleet_router.upstream import CollectingUpstream, Pool, Upstream
from fleet_wire.endpoints import Endpoint, Endpoints, Split

NOT_ANY: Final[frozenset[str]] = frozenset()
PAIRS_TRIED: Final = 4
"""Pairs that are put out and were passed over for one request; then the decode worker prefills."""
PAIRS_TOLD: Final = 32
"""Pairs that are named in the metrics as failing, and as many beside them between which KV moves."""


@dataclass
class Trouble:
    """How many workers of the table have a breaker that is not closed: with 0 nobody has to be looked at."""

    out: int = 0
    ejections: int = 0


@dataclass(eq=False)
class Worker(Candidate):
    """One worker that may receive requests, and what we know of it."""

    endpoint: Endpoint = field(kw_only=True)
    pool: Pool = field(kw_only=True)
    trouble: Trouble = field(kw_only=True, default_factory=Trouble)
    breaker: Breaker = field(default_factory=Breaker)
    heard_at: float = 0.0
    """When an answer of it began last."""
    alive_at: float = 0.0
    """When it last answered the question whether it is there."""
    lost_at: float = 0.0
    """When it was first not reached, or died in an answer, since it was last heard of."""
    asked_at: float = 0.0
    """When it was last asked whether it is back."""
    closed_before: int = 0
    """Of `pool.closed_by_peer`, when it was looked at last."""
    unproven: bool = True
    """It has not been asked who it is since it joined, failed or closed a connection."""
    races: Races = field(default_factory=Races)
    """That it lost (hedges)."""
    read_once: bool = False
    """Prefill: its last reference names no lease of ours."""
    warmed: dict[str, float] = field(default_factory=dict)
    """Prefill: decode workers that it was made to meet before any request, and seconds of that first transfer."""
    _reading: Pool | None = None

    def reading(self) -> Pool:
        """Connections whose answers are read, for translated requests; a prefill worker's always are."""
        if self.role == "prefill":
            return self.pool
        if self._reading is None:
            self._reading = _pool(self.endpoint, CollectingUpstream)
        return self._reading

    def retire(self) -> None:
        """It left: its connections end."""
        self.trouble.out -= not self.breaker.closed
        self.trouble = Trouble()  # requests that hold it may still tell of it
        self.pool.retire()
        self.reading().retire()  # also where nobody has read an answer yet: a request that holds it may be about to

    def expire_idle(self, now: float, idle_s: float) -> None:
        """Close connections that nobody has used for so long."""
        self.pool.expire(now, idle_s)
        if self._reading is not None:
            self._reading.expire(now, idle_s)

    def follow(self, endpoint: Endpoint) -> None:
        """The operator says something new of it."""
        self.endpoint = endpoint
        self.role = endpoint.role
        self.group = (endpoint.tier, endpoint.compat)

    def failed(self, now: float, *, gone: bool = False) -> None:
        """A connect error (`gone`), a broken answer or a 5xx."""
        self.unproven = True
        if gone:
            self.lost(now)
        before = self.breaker.closed
        if self.breaker.failed(now, gone=gone):
            self._put_out(before)

    def lost(self, now: float) -> None:
        """Nobody listens there, or its connection broke under a request."""
        if not self.is_lost:
            self.lost_at = now

    @property
    def is_lost(self) -> bool:
        """It was, and nothing was heard of it since."""
        return self.lost_at > self.heard_at and self.lost_at > self.alive_at

    def put_out(self, now: float) -> None:
        """It is to be left alone for a while, whatever it answered so far."""
        before = self.breaker.closed
        self.breaker.open(now)
        self._put_out(before)

    def _put_out(self, closed_before: bool) -> None:
        self.trouble.out += closed_before
        self.trouble.ejections += 1

    def answers(self, sent_at: float, now: float) -> None:
        """An answer begins to what was sent then."""
        self.heard_at = now
        if self.breaker.until and self.breaker.answers(sent_at):
            self.trouble.out -= 1


def _pool(endpoint: Endpoint, kind: type[Upstream]) -> Pool:
    return Pool(endpoint.address, endpoint.http_port, kind, Identity(endpoint).proven)


def place_of(endpoint: Endpoint) -> tuple[str, int, int]:
    """Where it is reached: a pod that was made anew after its node's restart has its old uid and another address."""
    return (endpoint.address, endpoint.http_port, endpoint.agent_port)


def new_worker(endpoint: Endpoint, trouble: Trouble) -> Worker:
    """Only a prefill worker's answers are read; a decode worker's are handed on."""
    pool = _pool(endpoint, CollectingUpstream if endpoint.role == "prefill" else Upstream)
    group = (endpoint.tier, endpoint.compat)
    return Worker(endpoint.uid, endpoint.role, group, 0, endpoint=endpoint, pool=pool, trouble=trouble)


NO_CONFIG: Final = RouterConfig(fleet="", served_name="", slow_start_s=0.0)


@dataclass(frozen=True)
class _Allowed:
    sides: dict[str, list[Worker]]
    version: str
    """Of the adapter; empty without one."""


@dataclass
class WorkerTable:
    """Workers by uid; rings are rebuilt when the set changes. Running requests keep the Worker that they hold."""

    workers: dict[str, Worker] = field(default_factory=dict)
    by_role: dict[str, list[Worker]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    rings: dict[str, Ring] = field(default_factory=lambda: {"prefill": Ring(()), "decode": Ring(())})
    """Of all groups together, for the policies that do not go by cost."""
    routing: Routing = field(default_factory=Routing)
    turn: int = 0
    bound: float = NO_CONFIG.load_bound
    shares: dict[Split, Share] = field(default_factory=dict)
    """What each canary got so far."""
    trouble: Trouble = field(default_factory=Trouble)
    pairs: PairHealth = field(default_factory=PairHealth)
    strangers: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """Uids at whose place somebody else answers, and which: the document may name another one later."""
    absent: dict[str, Absent] = field(default_factory=dict)
    """Decode workers that are not in the table for the moment."""

    def update(self, document: Endpoints, now: float = 0.0, config: RouterConfig = NO_CONFIG) -> None:
        """Follow the operator: new workers in, missing ones out; a worker that drains gets nothing new."""
        found = {endpoint.uid: place_of(endpoint) for endpoint in document.workers}
        self.strangers = {uid: place for uid, place in self.strangers.items() if found.get(uid) == place}
        wanted = {e.uid: e for e in document.workers if e.state == "serving" and e.uid not in self.strangers}
        # one that changed its role or place is another worker: its connections read answers in another way, or go elsewhere, and
        # its cache is not counted, or gone
        stays = {
            uid for uid, worker in self.workers.items()
            if uid in wanted and wanted[uid].role == worker.role and found[uid] == place_of(worker.endpoint)
        }  # fmt: skip
        left: dict[str, tuple[Endpoint, float]] = {}
        for uid in self.workers.keys() - stays:
            worker = self.workers.pop(uid)
            if worker.role == "decode":
                left[uid] = (worker.endpoint, worker.lost_at if worker.is_lost else now)
            worker.retire()
        self.absent = followed(self.absent, document, left, wanted, now)
        for uid, endpoint in wanted.items():
            known = self.workers.get(uid)
            if known is None:
                self.workers[uid] = new_worker(endpoint, self.trouble)
            else:
                known.follow(endpoint)
        self.shares = {split: self.shares.get(split, Share()) for split in document.splits}
        self.bound = config.load_bound
        for worker in self.workers.values():
            worker.slots = config.worker_slots
        self.routing.update(list(self.workers.values()), now, config.slow_start_s)
        self.pairs.keep(frozenset(stays))  # who has just joined has none
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
        *,
        last_resort: bool = False,
    ) -> tuple[Choice | Refusal, list[int]]:
        """A pair for this prompt, and its prefix keys, which begin with the tenant's `seed` and the adapter's version.
        `last_resort`: whether workers that failed may be asked goes by those alone that can answer this request."""
        routing = self.routing
        free = not (excluded or adapter or self.trouble.out or self.shares)
        allowed = None if free else self._allowed(now, excluded, adapter, hints.tier, last_resort=last_resort)
        if allowed is not None and not allowed.sides["decode"]:
            return (Refusal(f"adapter {adapter} is on no decode worker now") if adapter else NO_DECODE), []
        keys = routing.beginnings.key_chain(prompt, adapter_seed(seed, allowed.version) if allowed is not None else seed)
        self.turn += 1
        size = len(prompt) or 1
        tokens = hints.tokens or self.tokens_of(prompt)
        steps: Steps = routing.known(keys, size, tokens, ~hints.precise)
        if hints.precise:
            steps = united([*steps, *hints.blocks, *routing.coming(keys, size, tokens, hints.precise)])
        elif hints.blocks:
            steps = united([*steps, *hints.blocks])
        session = key_chain(hints.session)[0] if hints.session else None
        key = ring_key(keys) if session is None else session
        tier = hints.tier or (tier_of(config.tier_rules, tokens, hints.headers) if config.tier_rules else "")
        if config.policy == "kvAware":
            usable = only(self._sides(allowed.sides, steps, session)) if allowed is not None else None
            if hints.tier:
                usable = within(hints.tier, usable)
            ask = CostAsk(
                tokens, key, now, config.load_bound, config.min_uncached_tokens, config.decide == "cost", hints.local,
                hints.others, adapter, bool(hints.session), hints.keeps,
            )  # fmt: skip
            offer = routing.decide(ask, steps, tier=tier, usable=usable)
            if offer is not None and self.pairs.breakers and self._blocked(offer, now):
                offer = self._around(ask, steps, tier, usable, offer)
            if offer is None:
                return NO_DECODE, keys
            return Choice(offer.prefill.uid if offer.prefill else None, offer.decode.uid, offer.reason, offer, ask), keys
        sides = allowed.sides if allowed is not None else self.candidates(now, excluded)
        candidates = self._sides(of_tier(sides, tier, strict=bool(hints.tier)), steps, session)
        plain = SimpleAsk(key, tokens, math.inf if hints.local else config.min_uncached_tokens, self.turn)
        choice = simple.choose(plain, candidates, steps, self.rings, config.policy, config.load_bound)
        if isinstance(choice, Choice) and choice.prefill and self.pairs.blocks(choice.prefill, choice.decode, now):
            choice = Choice(None, choice.decode, "the pair is put out")
        return choice, keys

    def returns(self, tier: str, adapter: str, now: float, within_s: float, excluded: frozenset[str] = NOT_ANY) -> bool:
        """A decode worker that could answer such a request served so long ago or less, and may again. An empty tier: any."""
        since = now - within_s
        return within_s > 0 and (
            awaited(self.absent, tier, adapter, since)
            or any(
                worker.is_lost and worker.lost_at >= since and worker.uid not in excluded
                for worker in self.by_role["decode"]
                if tier in ("", worker.group[0]) and (not adapter or adapter in worker.endpoint.adapters)
            )
        )

    def reached(self) -> bool:
        """Some decode worker may be asked, as far as is known."""
        return any(not worker.is_lost for worker in self.by_role["decode"])

    def would_choose(
        self, prompt: bytes, config: RouterConfig, now: float, excluded: frozenset[str], seed: int, adapter: str, hints: Hints
    ) -> Choice | Refusal:
        """The same for somebody who only asks: it is nobody's turn, and no part of a canary's share."""
        turn, shares = self.turn, self.shares
        self.shares = {split: replace(share) for split, share in shares.items()}
        found, _ = self.choose(prompt, config, now, excluded, seed, adapter, hints)
        self.turn, self.shares = turn, shares
        return found

    def tokens_of(self, prompt: bytes) -> float:
        """About how many it has: counted where it comes as ids, a picture for what it is charged."""
        return estimated_at(prompt, self.routing.bytes_per_token.value) or 1.0

    def measured(self, prompt: bytes, tokens: int) -> None:
        """A worker has counted them; more than there are bytes and a template has teach nobody."""
        if tokens <= len(prompt) + TEMPLATE_TOKENS and only_text(prompt):
            self.routing.bytes_per_token.observe(len(prompt) / tokens)

    def _blocked(self, offer: Offer, now: float) -> bool:
        return offer.prefill is not None and self.pairs.blocks(offer.prefill.uid, offer.decode.uid, now)

    def _around(self, ask: CostAsk, steps: Steps, tier: str, usable: Usable | None, offer: Offer) -> Offer | None:
        """The cheapest offer whose pair is not put out: without either of the two, and in the end without a prefill worker."""
        left_out: frozenset[str] = frozenset()
        for _ in range(PAIRS_TRIED):
            if not self._blocked(offer, ask.now) or offer.prefill is None:
                return offer
            found = []
            for without in (left_out | {offer.prefill.uid}, left_out | {offer.decode.uid}):
                seen, ask.seen = ask.seen, []  # what the record tells is what the offer was made from, and that once
                other = self.routing.decide(ask, steps, tier=tier, usable=other_than(without, usable))
                if other is not None:
                    found.append((not ask.by_cost and other.prefill is None, other.cost_s, without, other, ask.seen))
                ask.seen = seen
            if not found:
                break
            _, _, left_out, offer, weighed = min(found, key=lambda one: (self._blocked(one[3], ask.now), one[:2]))
            ask.seen = weighed
        if not self._blocked(offer, ask.now):
            return offer
        ask.seen = []
        return self.routing.decide(ask.without_prefill(), steps, tier=tier, usable=usable)

    def transferred(self, prefill: Worker, decode: Worker, sent_at: float) -> None:
        """KV moved between these two. One of them may have left since it was asked for, or have moved: nothing is counted of it
        any more."""
        if self._has(prefill) and self._has(decode):
            self.pairs.succeeded(prefill.uid, decode.uid, sent_at)

    def transfer_failed(self, prefill: Worker, decode: Worker, now: float) -> None:
        """KV did not move between these two."""
        if not (self._has(prefill) and self._has(decode) and self.pairs.failed(prefill.uid, decode.uid, now)):
            return
        decodes = sum(other.group == prefill.group for other in self.by_role["decode"])
        if prefill.breaker.allows(now, 0) and self.pairs.condemns(prefill.uid, decodes, now):
            prefill.put_out(now)

    def _has(self, worker: Worker) -> bool:
        return self.workers.get(worker.uid) is worker

    def depart(self, choice: Choice, now: float, ask: Ask, decide: Decide, keys: list[int], told: bool) -> Trip | None:
        """The first leg is sent; see `Routing.depart`. None for policies that learn nothing. Of several answers that one worker
        writes side by side no time is learnt."""
        offer = choice.offer
        if not isinstance(offer, Offer):
            return None
        whole = decide == "cost" and not ask.stream and sequences_of(ask) == 1
        return self.routing.depart(offer, now, ask.adapter, ask.stream, whole, keys, told)

    def _allowed(self, now: float, excluded: frozenset[str], adapter: str, tier: str, *, last_resort: bool) -> _Allowed:
        """Who may be chosen, and the adapter's version."""
        if last_resort:
            can = {
                role: [w for w in workers if (not tier or w.group[0] == tier) and (not adapter or adapter in w.endpoint.adapters)]
                for role, workers in self.by_role.items()
            }
            found = self.candidates(now, excluded, can)
        else:
            found = self.candidates(now, excluded)
        return _Allowed(*under(adapter, found)) if adapter else _Allowed(found, "")

    def _sides(
        self, candidates: dict[str, list[Worker]], steps: Steps, session: int | None
    ) -> dict[str, list[Worker]]:  # fmt: skip
        """Every split has said which side it is for this request."""
        for split, share in self.shares.items():
            candidates = self._split(split, share, candidates, steps, session)
        return candidates

    def _split(
        self, split: Split, share: Share, candidates: dict[str, list[Worker]], steps: Steps, session: int | None
    ) -> dict[str, list[Worker]]:
        """Only the canary's workers of this tier, or all but these. `session`: its ring key."""
        decodes = [worker for worker in candidates["decode"] if worker.endpoint.tier == split.tier]
        canary = [worker for worker in decodes if worker.endpoint.revision == split.revision]
        if not canary or len(canary) == len(decodes):
            return candidates  # one side alone serves
        mine = bits_of(canary)
        others = bits_of(decodes) & ~mine
        if session is None:
            chosen = to_canary(split.percent, share.seen, share.taken, most_of(steps, mine), most_of(steps, others))
        else:
            chosen = share.has_session(split, session)
            if self._full([w for w in decodes if (w.endpoint.revision == split.revision) is chosen], decodes):
                chosen = not chosen
        share.count(chosen)

        def stays(worker: Worker) -> bool:
            return worker.endpoint.tier != split.tier or (worker.endpoint.revision == split.revision) == chosen

        return {role: [worker for worker in workers if stays(worker)] for role, workers in candidates.items()}

    def _full(self, side: list[Worker], of: list[Worker]) -> bool:
        """All of one side are at the bound of both sides together, and the other one is not."""
        cap = cap_of(sum(worker.inflight for worker in of), len(of), self.bound)
        return min(worker.inflight for worker in side) >= cap > min(worker.inflight for worker in of)

    def candidates(
        self, now: float, excluded: frozenset[str], among: dict[str, list[Worker]] | None = None
    ) -> dict[str, list[Worker]]:
        """Serving workers by role, `among` these; those that are put out only in a panic, excluded ones never."""
        found = {}
        for role, workers in (among or self.by_role).items():
            allowed = [worker for worker in workers if worker.uid not in excluded] if excluded else workers
            found[role] = askable(allowed, now) if self.trouble.out else allowed
        return found

    def suspects(self) -> list[Worker]:
        """Those who have to say who they are."""
        for worker in self.workers.values():
            if worker.pool.closed_by_peer != worker.closed_before:
                worker.closed_before, worker.unproven = worker.pool.closed_by_peer, True
        return [worker for worker in self.workers.values() if worker.unproven]

    def expire_idle(self, now: float, idle_s: float) -> None:
        """Close connections that nobody has used for so long."""
        for worker in self.workers.values():
            worker.expire_idle(now, idle_s)

    def lines(self, now: float) -> Iterable[str]:
        """Prometheus text: who is put out."""
        yield "# TYPE fleet_router_workers_out gauge"
        for role, workers in self.by_role.items():
            yield f'fleet_router_workers_out{{role="{role}"}} {sum(not w.breaker.allows(now, 0) for w in workers)}'
        yield "# TYPE fleet_router_ejections_total counter"
        yield f"fleet_router_ejections_total {self.trouble.ejections}"
        yield "# TYPE fleet_router_workers_strange gauge"
        yield f"fleet_router_workers_strange {len(self.strangers)}"
        yield "# TYPE fleet_router_pairs_out gauge"
        yield f"fleet_router_pairs_out {len(self.pairs.out(now))}"
        yield "# TYPE fleet_router_pair_ejections_total counter"
        yield f"fleet_router_pair_ejections_total {self.pairs.opened}"
        yield "# TYPE fleet_router_pair_failing gauge"
        for prefill, decode in self.pairs.lasting()[:PAIRS_TOLD]:
            giver, taker = self.workers[prefill].endpoint, self.workers[decode].endpoint
            yield f'fleet_router_pair_failing{{tier="{taker.tier}",prefill="{giver.name}",decode="{taker.name}"}} 1'
        yield "# TYPE fleet_router_pair_moved gauge"
        for prefill, decode in self.pairs.beside(now)[:PAIRS_TOLD]:
            giver, taker = self.workers[prefill].endpoint, self.workers[decode].endpoint
            yield f'fleet_router_pair_moved{{tier="{taker.tier}",prefill="{giver.name}",decode="{taker.name}"}} 1'

    def adapters(self) -> set[str]:
        """Those that some decode worker can answer for."""
        return {name for worker in self.by_role["decode"] for name in worker.endpoint.adapters}

    def ready(self) -> bool:
        """At least one worker can answer a whole request."""
        return bool(self.by_role["decode"])


def slots_of(table: WorkerTable, config: RouterConfig) -> dict[str, int]:
    """Requests that each tier runs at once: what its serving decode workers do. Empty when that is not known."""
    found: dict[str, int] = {}
    for worker in table.by_role["decode"]:
        if config.worker_slots:
            found[worker.endpoint.tier] = found.get(worker.endpoint.tier, 0) + config.worker_slots
    return found
