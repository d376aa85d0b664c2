"""What one pass says of its fleet: the status, written at most once.

Either at the end, or, when the pass is about to do what cannot be taken back, before it, on top of the version that the plan was
made from. The API server refuses that write when anybody has changed the fleet since, so its success is worth a look. A status
that says that all is well is written at the end in any case: whoever reads it finds every object there.
"""

from __future__ import annotations

import logging

from fleet_api.parse import known_status
from fleet_api.v1alpha1.status import FleetStatus
from fleet_operator.cluster.interface import FLEET, Cluster, ClusterError, ConflictError, NotFoundError, Object
from fleet_operator.compare import difference, merge_patch
from fleet_operator.health.logs import about
from fleet_operator.outcome import Outcome
from fleet_operator.status_pace import StatusPace

LOG = logging.getLogger("fleet.operator")


class Words:
    """A fleet's status as it stands in its manifest: dumped, and compared with what stands there, only where one of them changed.
    All of it may be lost."""

    def __init__(self) -> None:
        self._status: FleetStatus | None = None
        self._wish: Object = {}
        self._present: Object | None = None
        """What was found to say the same."""
        self._ours: Object | None = None
        """What was found to say what was asked for then."""
        self._kept: tuple[Object, Object] | None = None
        """What was written last, and what of it stands there, where that is less."""

    def of(self, status: FleetStatus) -> Object:
        """Nobody may change it."""
        if self._status is not status and self._status != status:
            self._status, self._wish, self._present = status, status.to_dict(), None
            if status.resolved is not None and self._wish["resolved"] == status.resolved:  # ten kilobytes, which are kept once
                self._wish["resolved"] = status.resolved
        return self._wish

    @property
    def last(self) -> FleetStatus | None:
        """The status `of` which was asked last; of equal ones in a row the first, so that who keeps it has nothing to compare."""
        return self._status

    def stand_in(self, present: Object | None) -> bool:
        """Whether this status says just what the last one `of` which was asked says."""
        if present is not None and present is not self._present and present == self._wish:
            self._present = self._ours = present
        return present is not None and present is self._present

    def written(self, answer: Object) -> str:
        """The first field of what was just written that the API server dropped: its CRD is older. Empty: all of it is there."""
        lost = "" if answer == self._wish else difference(answer, self._wish)
        self._kept = (self._wish, answer) if lost else None
        return lost

    def is_kept(self, present: Object | None) -> bool:
        """Whether no more of this status can stand there: to write it again would change nothing."""
        return self._kept is not None and self._kept[0] is self._wish and self._kept[1] == present

    def spoken(self, present: Object | None) -> FleetStatus | None:
        """What `present` says, but for what it resolves, where that is the status that was asked for last: to read it out of the
        manifest again costs a fifth of a millisecond. None: it must be read."""
        if self._status is None or not self.stand_in(present):
            return None
        return self._status.model_copy(update={"resolved": None})

    def is_ours(self, present: Object) -> bool:
        """Whether it was found to be a status of this operator's, word for word, so that nothing in it is unknown."""
        return present is self._ours


class FleetTelling:
    """One pass's."""

    def __init__(self, cluster: Cluster, pace: StatusPace, raw: Object, status: FleetStatus, words: Words) -> None:
        self._cluster = cluster
        self._pace = pace
        self._raw = raw
        self._words = words
        self._wish = words.of(status)
        ready = status.condition("Ready")
        self._is_good = ready is not None and ready.status == "True"
        self._written = False
        self._refused: ClusterError | None = None

    async def at_once(self) -> bool:
        """Write it on top of the version that the pass saw, when it is due. True: written, so the fleet was as the pass saw it.
        False says nothing about the fleet."""
        if self._written or self._refused is not None or self._is_good:
            return False
        try:
            return await self._write(str(self._raw["metadata"]["resourceVersion"]))
        except (ConflictError, NotFoundError):
            return False
        except ClusterError as error:
            self._refused = error
            return False

    async def at_last(self, outcome: Outcome) -> None:
        """Write it when it is due and was not written; StopError when the API cannot answer."""
        try:
            if self._refused is not None:
                raise self._refused
            if not self._written:
                await self._write(None)
        except NotFoundError:
            outcome.gone = True
        except ClusterError as error:
            outcome.fail(f"status of {FLEET.kind} {self._raw['metadata']['name']}", error)
        outcome.writes += self._written

    async def _write(self, version: str | None) -> bool:
        meta, present = self._raw["metadata"], self._raw.get("status")
        if self._words.stand_in(present) or self._words.is_kept(present):
            return False
        known = present if present is None or self._words.is_ours(present) else known_status(self._raw)
        if not self._pace.is_due(meta["uid"], known, self._wish):
            return False
        patch = merge_patch(known or {}, self._wish)
        made = await self._cluster.patch_status(FLEET, meta["namespace"], meta["name"], patch, version=version)
        self._pace.written(meta["uid"])
        self._written = True
        if (lost := self._words.written(made.get("status") or {})) and self._pace.is_news(lost):
            words = "the API server drops it, so its CRDs are older than this operator, which forgets what it cannot write down"
            where = meta["namespace"], meta["name"]
            LOG.warning("fleet=%s/%s status.%s: %s: apply the CRDs of its version", *where, lost, words, extra=about(*where))
        return True
