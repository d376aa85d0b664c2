"""Which namespaces this installation owns: those that it was told, and of them those whose claim it holds.

A claim is a Lease called `inferencefleet-owner` in the namespace, with the installation as its holder and without an end: it
costs no renewal. Whoever makes it first owns the fleets there; another installation that was told the same namespace leaves
them alone, says so, and looks again now and then. A claim goes when its namespace goes, when the namespace loses the label that
selected it, or by hand when an installation is gone for good: `kubectl delete lease inferencefleet-owner -n NAMESPACE`. So its
holder looks, too: a namespace that was deleted and made again may belong to somebody else by now. And labels are listed as
often as claims are read, because a watch may lose an event.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fleet_api.v1alpha1.base import LABEL_KEY
from fleet_api.v1alpha1.fleet import DRAIN
from fleet_operator.cluster.guarded import Send, Write
from fleet_operator.cluster.interface import Cluster, ClusterError, ConflictError, ForbiddenError, NotFoundError, Object
from fleet_operator.cluster.kinds import LEASE, NAMESPACE
from fleet_operator.fleet_objects import later
from fleet_operator.health.logs import about
from fleet_operator.names import GROUP

CLAIM: Final = "inferencefleet-owner"
CLAIMED: Final = {f"{GROUP}/claim": "true"}
"""Label of claims. Not managed-by: a Lease that came with the chart carries Helm's."""
RECHECK_S: Final = 30.0
CHECKS_MOST: Final = 100
"""Claims of ours that are looked at in a round; with more namespaces each waits for its turn."""
TERMINATING: Final = "because it is being terminated"
"""The API server's words for a namespace that is deleted: nothing can be made there."""
KEY: Final = re.compile(LABEL_KEY)
VALUE: Final = re.compile(r"[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?")
LOG = logging.getLogger("fleet.operator.territory")


class NotOursError(ClusterError):
    """The namespace belongs to another installation, or is not selected (any more)."""

    reason = "NotOurs"
    retry = False


@dataclass(frozen=True, slots=True)
class Selection:
    """What this installation was told: some names, or labels of namespaces, or neither: all."""

    names: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.names and self.labels:
            raise ValueError("either names or labels select namespaces, not both")


def parse_labels(text: str) -> dict[str, str]:
    """{"a": "1", "b": "2"} of "a=1,b=2"; ValueError."""
    pairs = [part.partition("=") for part in text.split(",")]
    found = {key.strip(): value.strip() for key, _, value in pairs}
    if not all(KEY.fullmatch(key) and VALUE.fullmatch(value) for key, value in found.items()):
        raise ValueError(f"{text!r} is not of the form key=value,key=value")
    return found


def claim_of(namespace: str, installation: str, seen: Object) -> Object:
    """The namespace's claim as ours, valid only on top of the unclaimed Lease that was seen."""
    version = seen["metadata"]["resourceVersion"]
    return {
        "apiVersion": LEASE.api_version,
        "kind": LEASE.kind,
        "metadata": {
            "name": CLAIM, "namespace": namespace, "resourceVersion": version, "labels": dict(CLAIMED),
        },
        "spec": {"holderIdentity": installation},
    }  # fmt: skip


def holder_of(lease: Object) -> str:
    """Who holds a claim; empty: nobody."""
    return str((lease.get("spec") or {}).get("holderIdentity") or "")


class Territory:
    """Claims namespaces as fleets turn up in them; a guard for writes and a filter for the reconciler."""

    def __init__(self, cluster: Cluster, births: Cluster, installation: str, selection: Selection) -> None:
        """`births` writes as another field manager: it makes an empty Lease and owns nothing of its content."""
        self._cluster = cluster
        self._births = births
        self._installation = installation
        self._selection = selection
        self._selected = set(selection.names)
        self._told = "0"
        """Version of the newest namespace that the watch has told of."""
        self._wanted: set[str] = set()
        self._owned: dict[str, None] = {}
        """Those whose claim was looked at longest ago first."""
        self.foreign: dict[str, str] = {}
        """Namespaces that we were told and that somebody else holds, with the holder."""
        self._held: set[str] = set()
        """Those whose claim could not be released."""
        self._strays_known = False
        self._writing: Counter[str] = Counter()
        self._wake = asyncio.Event()
        self.changed: Callable[[str], None] = lambda namespace: None
        """Called when a namespace became ours."""

    def owns(self, namespace: str) -> bool:
        """Whether fleets there are ours now; asking is what makes us want it."""
        if namespace not in self._wanted:
            self._wanted.add(namespace)
            self._wake.set()
        return namespace in self._owned

    @property
    def owned(self) -> int:
        """How many namespaces are ours."""
        return len(self._owned)

    async def guard(self, write: Write, send: Send) -> Any:
        """Refuses writes to namespaces that are not ours: NotOursError."""
        if write.namespace not in self._owned:
            raise NotOursError(f"namespace {write.namespace} does not belong to installation {self._installation}")
        self._writing[write.namespace] += 1
        try:
            return await send()
        finally:
            self._writing[write.namespace] -= 1
            if not self._writing[write.namespace]:
                del self._writing[write.namespace]

    async def _quiet(self, namespace: str) -> None:
        """Return when nothing of ours is being written there."""
        while self._writing[namespace]:  # noqa: ASYNC110 - seldom and short: an event per namespace would be more to get wrong
            await asyncio.sleep(0.05)

    async def run(self) -> None:
        """Claim for ever; follows the labels of namespaces when those decide."""
        async with asyncio.TaskGroup() as group:
            if self._selection.labels:
                group.create_task(self._follow(), name="namespaces")
            group.create_task(self._recheck(), name="claims")
            while True:
                self._wake.clear()
                await self.claim_all()
                try:
                    async with asyncio.timeout(RECHECK_S):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    async def claim_all(self) -> None:
        """One attempt for every namespace that is wanted, selected and not ours yet."""
        for namespace in sorted(self._wanted - self._owned.keys()):
            if not (self._selection.names or self._selection.labels) or namespace in self._selected:
                try:
                    await self._claim(namespace)
                except ClusterError as error:
                    LOG.warning("namespace %s is not claimed: %s: %s", namespace, error.reason, error, extra=about(namespace))

    async def _recheck(self) -> None:
        while True:
            await asyncio.sleep(RECHECK_S)
            await self.check_owned()
            if self._selection.labels:
                await self.audit_labels()

    async def audit_labels(self) -> None:
        """What the watch has not told: it may lose an event. A list that is older than what it told changes nothing. Claims that
        are left where nothing is selected are released: the API may not have answered, or it happened while we claimed."""
        try:
            listed = await self._cluster.versions(NAMESPACE, None, self._selection.labels)
        except ClusterError as error:
            LOG.warning("audit of namespaces: %s", error)
            return
        if later(self._told, listed.version):
            return
        there = {name for _, name in listed.versions}
        gained, lost = there - self._selected, self._selected - there
        if gained or lost:
            LOG.info("audit of namespaces: the watch had not told of %d", len(gained) + len(lost))
        for name in sorted(lost):
            await self._unselect(name)
        self._selected |= gained
        if gained:
            self._wake.set()
        if not self._strays_known:
            await self._release_strays()
        for name in sorted(self._held | self._owned.keys()):
            if name not in self._selected:  # the watch tells of more meanwhile
                await self._release(name)

    async def check_owned(self) -> None:
        """Give up what is no longer ours, and claim anew what is nobody's. While nobody answers what we have stays ours."""
        for namespace in list(self._owned)[:CHECKS_MOST]:
            holder = ""
            try:
                holder = holder_of(await self._cluster.get(LEASE, namespace, CLAIM))
            except NotFoundError:
                pass
            except ForbiddenError as error:  # it says nothing of other namespaces
                LOG.warning(
                    "the claim on namespace %s cannot be read: %s: %s", namespace, error.reason, error, extra=about(namespace)
                )
                holder = self._installation
            except ClusterError as error:
                LOG.warning(
                    "the claim on namespace %s cannot be read: %s: %s", namespace, error.reason, error, extra=about(namespace)
                )
                return
            if namespace not in self._owned:
                continue  # let go of meanwhile
            del self._owned[namespace]
            if holder == self._installation:
                self._owned[namespace] = None
                continue
            LOG.warning(
                "the claim on namespace %s was lost; its holder is now: %s", namespace, holder or "nobody", extra=about(namespace)
            )
            self._wake.set()

    async def _claim(self, namespace: str) -> None:
        try:
            lease = await self._cluster.get(LEASE, namespace, CLAIM)
        except NotFoundError:
            unborn = {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": {"name": CLAIM, "namespace": namespace}}
            try:
                lease = await self._births.apply(unborn)
            except NotFoundError:  # there is no such namespace (any more): a fleet in it will ask again
                self._wanted.discard(namespace)
                self.foreign.pop(namespace, None)
                return
            except ForbiddenError as error:
                if TERMINATING not in str(error):
                    raise
                self._owned[namespace] = None  # nobody can claim it any more; what is in it has to come to its end
                self.changed(namespace)
                return
        if not holder_of(lease):
            try:
                lease = await self._cluster.apply(claim_of(namespace, self._installation, lease))
            except ConflictError:
                self._wake.set()  # somebody was faster: look who
                return
        if holder_of(lease) != self._installation:
            self._say_foreign(namespace, holder_of(lease))
            return
        self.foreign.pop(namespace, None)
        self._owned[namespace] = None
        self.changed(namespace)

    def _say_foreign(self, namespace: str, holder: str) -> None:
        if self.foreign.get(namespace) != holder:
            self.foreign[namespace] = holder
            LOG.warning(
                "namespace %s belongs to installation %s: its fleets are left alone; when that is gone for good, delete Lease %s",
                namespace, holder, CLAIM, extra=about(namespace),
            )  # fmt: skip

    async def _follow(self) -> None:
        synced = False
        async for event in self._cluster.watch(NAMESPACE, None, self._selection.labels):
            if event.type == "SYNCED":
                synced = True
                await self._release_strays()
                self._wake.set()
                continue
            meta = event.object["metadata"]
            if later(version := str(meta.get("resourceVersion")), self._told):
                self._told = version
            if event.type == "DELETED":
                await self._unselect(meta["name"])
            else:
                self._selected.add(meta["name"])
            if synced:
                self._wake.set()

    async def _unselect(self, namespace: str) -> None:
        """It has not our labels any more, or is gone."""
        self._selected.discard(namespace)
        await self._release(namespace)

    async def _release_strays(self) -> None:
        """Claims of ours, from before we started, in namespaces that are no longer selected."""
        try:
            for lease in await self._cluster.list(LEASE, None, CLAIMED):
                namespace, name = lease["metadata"]["namespace"], lease["metadata"]["name"]
                if name == CLAIM and holder_of(lease) == self._installation and namespace not in self._selected:
                    await self._release(namespace)
            self._strays_known = True
        except ClusterError as error:
            LOG.warning("old claims are not released: %s", error)

    async def _release(self, namespace: str) -> None:
        """Stop writing there, then let go of it."""
        self._owned.pop(namespace, None)
        self.foreign.pop(namespace, None)
        self._held.discard(namespace)
        await self._quiet(namespace)
        try:
            lease = await self._cluster.get(LEASE, namespace, CLAIM)
            if holder_of(lease) == self._installation:
                await self._cluster.delete(LEASE, namespace, CLAIM, uid=lease["metadata"]["uid"])
                LOG.info(
                    "namespace %s is no longer selected: its claim is released, its fleets stay as they are, those with "
                    "spec.deletion (finalizer %s) also when they are deleted",
                    namespace, DRAIN, extra=about(namespace),
                )  # fmt: skip
        except NotFoundError:
            return
        except ClusterError as error:
            self._held.add(namespace)
            LOG.warning("the claim on namespace %s is not released: %s", namespace, error, extra=about(namespace))
