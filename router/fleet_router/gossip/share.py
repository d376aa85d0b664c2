"""Between gossip and what this router decides from: its table of workers, its tenants' quotas, its prefix index.

Nothing here waits or fails: what others say changes a few numbers, and without it every router goes by its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fleet_router.admission.quota import Account
from fleet_router.gossip.merge import Peers, TenantUse, WorkerLoad
from fleet_router.gossip.message import Hint, Load, Message, Use, name_of
from fleet_router.gossip.report import Report, hint_of
from fleet_router.policy.candidate import Candidate
from fleet_router.policy.routing import Routing


class Share:
    """One process's part. `sender`: its number, unlike any other's; `began`: now."""

    def __init__(self, sender: int, began: float) -> None:
        self.peers = Peers(sender)
        self._report = Report(sender, began)
        self._workers: dict[int, Candidate] = {}
        self._names: dict[str, int] = {}
        self._tenants: dict[str, int] = {}
        self._accounts: dict[int, Account] = {}
        self._index = Routing().index

    def follow(self, workers: Mapping[str, Candidate], accounts: Mapping[str, Account], routing: Routing, now: float) -> None:
        """Who is there now; who is new hears at once what others have there."""
        before = self._workers
        self._names = {uid: self._names.get(uid) or name_of(uid) for uid in workers}
        self._workers = {self._names[uid]: worker for uid, worker in workers.items()}
        self._tenants = {name: self._tenants.get(name) or name_of(name) for name in accounts}
        known, self._accounts = self._accounts, {self._tenants[name]: account for name, account in accounts.items()}
        for name, account in self._accounts.items():
            if known.get(name) is not account:
                account.elsewhere = self.peers.use(name)
                account.changed = True
        self._index = routing.index
        for name, worker in self._workers.items():
            if before.get(name) is not worker:
                worker.elsewhere(*self.peers.load(name), now)
        for name, worker in before.items():
            if self._workers.get(name) is not worker:
                worker.elsewhere(0, 0, now)
        self._report.forget(set(self._workers), set(self._accounts))

    def hear(self, message: Message, now: float) -> None:
        """Another router has spoken. Refused when there are too many."""
        hints = self.peers.take(message, now)
        self._learn(hints)
        self._apply(now)

    def tick(self, now: float) -> None:
        """Some times a second: what nobody repeats is over."""
        self.peers.expire(now)
        self._apply(now)

    def speak(self, now: float, stamp_ms: int) -> list[Message]:
        """What to tell the others in this round."""
        news, alone = self._index.news, not len(self.peers)
        self._index.news = None if alone else {}
        hints = self._hints(news) if news else ()
        return self._report.next(self._loads(), self._uses(), hints, now, stamp_ms)

    def _loads(self) -> Iterator[Load]:
        """Of a worker that has nothing any more, too: where others were told that it has, they count it until they hear that."""
        told = self._report.told
        for name, worker in self._workers.items():
            if worker.sent_prefills or worker.inflight or name in told:
                yield Load(name, worker.own, worker.pending, worker.sent_prefills, int(worker.sent_tokens))

    def _uses(self) -> Iterator[Use]:
        """Of those that have changed since: there may be ten thousand, and a round is every 20 ms."""
        for name, account in [row for row in self._accounts.items() if row[1].changed]:
            account.changed = False
            requests, tokens = account.requests, account.tokens
            yield Use(name, account.inflight, 0 if requests is None else requests.taken, 0 if tokens is None else tokens.taken)

    def _hints(self, news: Mapping[tuple[str, int], list[int]]) -> Iterator[Hint]:
        for (uid, _), keys in news.items():
            if (name := self._names.get(uid)) is not None:
                yield hint_of(name, keys)

    def _learn(self, hints: Sequence[Hint]) -> None:
        for hint in hints:
            worker = self._workers.get(hint.worker)
            if worker is not None:
                self._index.learn(list(hint.keys), worker.uid)

    def _apply(self, now: float) -> None:
        workers, tenants = self.peers.changes()
        for name, load in workers.items():
            self._apply_load(name, load, now)
        for name, use in tenants.items():
            self._apply_use(name, use, now)

    def _apply_load(self, name: int, load: WorkerLoad, now: float) -> None:
        worker = self._workers.get(name)
        if worker is None:
            return
        if load.tokens:
            worker.sent_elsewhere(load.prefills, load.tokens, now)
        worker.elsewhere(load.inflight, load.pending, now)

    def _apply_use(self, name: int, use: TenantUse, now: float) -> None:
        account = self._accounts.get(name)
        if account is not None:
            account.used_elsewhere(use.inflight, use.requests, use.tokens, len(self.peers), int(now * 1e9))
