"""What becomes of a leg that failed: who is blamed, whether somebody else may be asked, and KV that nobody will read."""

from __future__ import annotations

from typing import Final

from fleet_router.errors import RequestError
from fleet_router.health.patience import had_its_time
from fleet_router.waiting import Awaiting
from fleet_router.workers import Worker


def head_of(path: bytes, authority: bytes, leg_id: str, size: int, onward: bytes) -> bytes:
    """The head of what a worker is sent. The format stands here, where the compiler sees it: a quarter of what Python takes."""
    named = b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\nx-request-id: %b\r\n" % (
        path, authority, leg_id.encode(),
    )  # fmt: skip
    return b"%bcontent-length: %d\r\n%b\r\n" % (named, size, onward)


RELEASE_PATH: Final = b"/kv/release"
UNREACHED_MOST: Final = 4


class Retrying(Awaiting):
    """Failures of one request, and leases that are given back."""

    __slots__ = ()

    def _failed_often(self) -> bool:
        """No third worker is asked; of those that cannot be reached some more are, for nothing ran there."""
        return self._decode_failures > 1 or self._unreached > UNREACHED_MOST

    def _others(self, worker: Worker, *, even_out: bool = False) -> bool:
        """Somebody else of this role could be asked, with nothing against him; `even_out`: or with."""
        now, table, tier = self._context.clock(), self._context.table, self.hints.tier
        return any(
            other is not worker and other.uid not in self._excluded and (even_out or other.breaker.until <= now)
            for other in table.by_role[worker.role]
            if not tier or other.group[0] == tier
        )

    def _uid_of(self, worker: Worker) -> frozenset[str]:
        """Of one that failed, so that it is not asked again: but who has its uid at another place has not."""
        here = self._context.table.workers.get(worker.uid)
        return frozenset((worker.uid,)) if here is None or here is worker else frozenset()

    def _failure(self, worker: Worker, why: str, *, gone: bool) -> RequestError:
        """What a client is told when decoding failed for good."""
        if gone:
            return RequestError(503, f"no worker can be reached; the last one was {worker.endpoint.name}: {why}")
        if self._decode_failures > 1:
            return RequestError(502, f"two workers failed; the last one was {worker.endpoint.name}: {why}")
        return RequestError(503, f"{worker.endpoint.name} failed and there is no other: {why}")

    def _may_retry(self, *, free: bool) -> bool:
        """One more attempt; `free`: nothing ran in the one before."""
        if not (free or self._context.budget.take(self._context.clock(), len(self._ask.prompt))):
            return False
        self._context.metrics.retries += 1
        return True

    def _blame(self, worker: Worker, why: str, *, gone: bool = False, blamed: bool = True) -> None:
        """Its leg failed, and with it this attempt. `blamed`: that counts against it."""
        self.record.went_wrong(self._context.clock(), why)
        if blamed:
            self.counts_against(worker, gone=gone)

    def _had_its_time(self, sent_at: float, now: float) -> bool:
        """The time of the request is over: that counts against the worker of a leg that was sent then."""
        return had_its_time(sent_at, now, self.config.first_token_deadline_s)

    def counts_against(self, worker: Worker, *, gone: bool = False) -> None:
        """A leg there failed, whatever becomes of the request: others are preferred for a while, and its revision's errors
        count. Once per leg."""
        worker.failed(self._context.clock(), gone=gone)
        self._context.metrics.of(worker.endpoint.tier, worker.endpoint.revision).errors += 1

    def _abandon_leg(self) -> None:
        """Close the leg's connection. A prefill leg may have ended already, with a lease that we shall never read of; one that
        waits for its connection was not sent."""
        worker = self._leg_worker
        if self._connection is None:
            return
        self._connection.abort()
        if worker is not None and worker.role == "prefill":
            self.give_back(worker)

    def _release_lease(self) -> None:
        """Nobody will read the KV: tell the prefill worker instead of letting the lease run out."""
        if self._lease is None:
            return
        (worker, lease), self._lease = self._lease, None
        self._give_back(worker, b'{"lease_id":"' + lease.encode() + b'"}')

    def give_back(self, worker: Worker) -> None:
        """A prefill leg ended without telling of a lease, which may be there all the same. Nobody is asked for what he was told
        to give back (see `_others_than`)."""
        self._barred = self._barred | {worker.uid}
        self._give_back(worker, self._by_name())

    def _give_back(self, worker: Worker, body: bytes) -> None:
        """By itself from here on: whatever becomes of the request, this is sent."""
        self._context.releases.send(worker.pool, self._release_of(worker, body), self._context.clock())

    def _by_name(self) -> bytes:
        """What gives back whatever this request has at a worker."""
        return b'{"request_id":"' + self._client.leg_id.encode() + b'"}'

    def _release_of(self, worker: Worker, body: bytes) -> bytes:
        head = head_of(RELEASE_PATH, worker.pool.authority, self.record.leg_id, len(body), self.record.onward)
        return head + body
