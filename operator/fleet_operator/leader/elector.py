"""The thin shell of the election: reads the Lease, does what `lease.decide` says, opens and closes the fence."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from fleet_operator.cluster.interface import Cluster, ClusterError, ConflictError, ForbiddenError, InvalidError, NotFoundError
from fleet_operator.cluster.kinds import LEASE
from fleet_operator.leader.fence import Fence
from fleet_operator.leader.lease import (
    Lease,
    Sight,
    Step,
    Terms,
    decide,
    parse_lease,
    render_lease,
    render_release,
    render_unborn,
    see,
)

LOG = logging.getLogger("fleet.operator.leader")
UNBORN = Lease("", 0, 0, "", "")
RELEASE_S = 5.0
"""Longest that giving the lease back may take: who ends must not wait for an API server that does not answer."""


class LeadershipLostError(Exception):
    """The lease was lost, or could not be renewed in time: the process must end and begin anew."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Who runs for which lease."""

    namespace: str
    name: str
    identity: str
    """Unique to this process: a restarted one is somebody else."""
    terms: Terms = field(default_factory=Terms)


class Elector:
    """`win` the lease, `keep` it while working, `release` it at the end."""

    def __init__(
        self,
        cluster: Cluster,
        births: Cluster,
        candidate: Candidate,
        fence: Fence,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`births` writes as another field manager: it makes the empty Lease and owns nothing of its content."""
        self._cluster = cluster
        self._births = births
        self._candidate = candidate
        self._fence = fence
        self._sleep = sleep
        self._sight: Sight | None = None
        self._outdated = False
        """Whether a write may have changed the lease since it was seen."""
        self.leading = False
        self.holder = ""

    async def win(self) -> None:
        """Return when this process holds the lease. ForbiddenError and InvalidError are raised: waiting does not help."""
        told = ""
        while True:
            try:
                step = await self.attempt()
            except (ForbiddenError, InvalidError):
                raise
            except ClusterError as error:
                step = Step("wait", f"{error.reason}: {error}")
            if self.leading:
                LOG.info("leading as %s: %s", self._candidate.identity, step.reason)
                return
            if step.reason != told:
                told = step.reason
                LOG.info("standing by: %s", told)
            await self._pause()

    async def keep(self) -> None:
        """Renew until it is lost: LeadershipLostError, with the fence closed."""
        try:
            while True:
                await self._pause()
                await self._renew()
        finally:
            self.leading = False
            self._fence.close()

    async def release(self) -> None:
        """Give it back while it is surely ours; call when nothing of ours writes any more. A failure only makes the next one
        wait."""
        self._fence.close()
        sight, self._sight = self._sight, None
        if sight is None or (not self._outdated and sight.lease.holder != self._candidate.identity):
            return
        if not self._outdated and self._fence.clock() >= sight.since + self._candidate.terms.renew_s:
            return  # it may be somebody else's by now
        try:
            async with asyncio.timeout(RELEASE_S):
                await self._give_back(sight.lease)
        except (ClusterError, TimeoutError) as error:
            LOG.warning("could not give the lease back: %s", str(error) or "no answer in time")

    async def _give_back(self, lease: Lease) -> None:
        who = self._candidate
        if self._outdated:  # the end came while a write was under way, or its answer was lost
            lease = parse_lease(await self._cluster.get(LEASE, who.namespace, who.name))
        if lease.holder == who.identity:
            await self._cluster.apply(render_release(who.name, who.namespace, lease))
            LOG.info("gave the lease back")

    async def _renew(self) -> None:
        """A connection may be silent for ever (its API server's machine died): there is time for another one."""
        try:
            try:
                step = await self._attempt_within(self._candidate.terms.renew_s / 2)
            except TimeoutError:
                step = await self._attempt_within(self._fence.open_s)
        except (ClusterError, TimeoutError) as error:
            LOG.warning("the lease was not renewed: %s; %.1f s left", str(error) or "no answer in time", self._fence.open_s)
        else:
            if not self.leading:
                raise LeadershipLostError(step.reason)
        if self._fence.open_s <= 0:
            raise LeadershipLostError("it could not be renewed in time")

    async def _attempt_within(self, most_s: float) -> Step:
        async with asyncio.timeout(max(0.0, min(most_s, self._fence.open_s))):
            return await self.attempt()

    async def attempt(self) -> Step:
        """One look and what follows from it. The fence is extended from before the request, and what is read is as old as its
        answer: whoever waits for the lease to end began to count later than its holder, however long a read takes."""
        who, begun = self._candidate, self._fence.clock()
        if self._sight is None or not self.leading or self._outdated:
            found = await self._read()
            self._sight, self._outdated = see(self._sight, found, self._fence.clock()), False
        self.holder = self._sight.lease.holder
        step = decide(self._sight, who.identity, who.terms, begun)
        self.leading = self.leading and step.deed == "renew"
        if step.deed == "wait":
            return step
        wish = render_lease(who.name, who.namespace, self._sight, who.identity, who.terms, time.time())
        self._outdated = True  # until its answer is here
        try:
            lease = parse_lease(await self._cluster.apply(wish))
        except ConflictError:
            return Step("wait", "somebody was faster")
        self._sight, self._outdated, self.leading, self.holder = Sight(lease, begun), False, True, who.identity
        self._fence.extend(begun + who.terms.renew_s, begun + who.terms.lease_s)
        return step

    async def _read(self) -> Lease:
        who = self._candidate
        try:
            return parse_lease(await self._cluster.get(LEASE, who.namespace, who.name))
        except NotFoundError:
            return parse_lease(await self._births.apply(render_unborn(who.name, who.namespace)))

    async def _pause(self) -> None:
        # a little later each time, so that several candidates do not ask in step
        await self._sleep(self._candidate.terms.retry_s * (1 + 0.2 * random.random()))  # noqa: S311 - no secret
