"""Makes the Secret with the key that a fleet's pods share: once, and never again while it is there.

It is only ever created: the operator has no right to read, change or delete a Secret, and knows by the API server's refusal of a
second one that it is there. So what somebody put into it, the next key for example, is safe from us; and without the right to
list Secrets nothing can be watched. So it is made once more every five minutes: one that was deleted by hand is back then.
"""

from __future__ import annotations

import base64
import secrets
from dataclasses import dataclass
from typing import Final
from zlib import crc32

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.cluster.interface import (
    Cluster,
    ClusterError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    Object,
    UnavailableError,
)
from fleet_operator.cluster.kinds import SECRET
from fleet_operator.names import labels, owner_reference
from fleet_operator.outcome import Outcome
from fleet_operator.render.peerkey import KEY, peer_key_name
from fleet_planner.events import Deed
from fleet_planner.peerkey import gossips, needs_key
from fleet_planner.types import Problem

KEY_BYTES: Final = 32
LOOK_S: Final = 300.0
"""Whether it is there is asked this often, by a request that makes it where it is not: a fleet at rest asks for little else."""
EACH_S: Final = 1.0
"""Between two such questions of one operator: each passes the admission of its API server. Of more than LOOK_S fleets each is
asked about so much later."""
AGAIN_S: Final = 600.0
"""And this often at most while we may not make it."""

REFUSED_AGAIN_S: Final = 15.0
"""After a first refusal, then twice as long each time: a quota, or an admission that does not know our kinds yet, refuses for a
moment, a right that is missing for ever."""
THERE: Final = "already exists"
"""The API server's words for a second one of a name."""
NEVER: Final = float("-inf")


@dataclass(slots=True)
class KeyMemory:
    """Of one fleet; all of it may be lost."""

    asked_at: float = NEVER
    begun_at: float = NEVER
    """First look of this operator."""
    refusals: int = 0
    """In a row: we may not make it, and the status says so."""
    is_open: bool = False
    """The last try ended without a word whether it is there."""
    fleets: int = 1
    """How many the operator knows, and may ask about."""

    def looked(self, now: float) -> KeyMemory:
        """The fleet is looked at."""
        self.begun_at = now if self.begun_at == NEVER else self.begun_at
        return self


def is_due(fleet: InferenceFleet, memory: KeyMemory, now: float, *, makes_pods: bool) -> bool:
    """Its pods need the key, whatever engine they have, and whether it is there is not known any more. An operator that has just
    begun asks at once where pods are made or routers may wait for it; of fleets at rest each has its turn."""
    if fleet.spec.peer_key is not None or not needs_key(fleet):
        return False
    if memory.is_open:
        return True
    if memory.asked_at == NEVER and not (makes_pods or gossips(fleet) or is_without(fleet, memory)):
        share = crc32(fleet.metadata.uid.encode()) / 2**32
        return now - memory.begun_at >= share * EACH_S * (memory.fleets - 1)
    refused_s = min(AGAIN_S, REFUSED_AGAIN_S * 2 ** (memory.refusals - 1)) if memory.refusals else 0.0
    return abs(now - memory.asked_at) >= max(refused_s or LOOK_S, EACH_S * memory.fleets)


def is_without(fleet: InferenceFleet, memory: KeyMemory) -> bool:
    """We may not make it; an operator that has just started knows that by what the status says, and tries."""
    said = fleet.status.condition("PeerKey")
    return memory.refusals > 0 or (memory.asked_at == NEVER and said is not None and said.reason == "NoPeerKey")


def render_key(fleet: InferenceFleet, owner: Object) -> Object:
    """A new key each time."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": peer_key_name(fleet),
            "namespace": fleet.metadata.namespace,
            "labels": labels(fleet.metadata.name),
            "ownerReferences": [owner_reference(owner)],
        },
        "data": {KEY: base64.b64encode(f"{secrets.token_hex(KEY_BYTES)}\n".encode()).decode()},
    }


async def make_key(
    cluster: Cluster, fleet: InferenceFleet, owner: Object, memory: KeyMemory, outcome: Outcome, now: float
) -> None:  # fmt: skip
    """Create it, or learn that it is there. Who may not make it goes on without: the fleet serves. So does who cannot make it
    now: Secrets alone may be out of order (their encryption, an admission). Whether all is the next write of the pass knows."""
    wish = render_key(fleet, owner)
    name = wish["metadata"]["name"]
    memory.is_open = True
    try:
        made = await cluster.create(wish)
    except (ForbiddenError, InvalidError):  # a policy answers 400 and 422, too; its words may quote what it was asked
        memory.asked_at, memory.refusals, memory.is_open = now, min(memory.refusals + 1, 10), False
        return
    except UnavailableError as error:
        outcome.vain += 1
        outcome.problems.append(Problem(error.reason, f"Secret {name}: {error}"))
        return
    except ClusterError as error:
        if isinstance(error, ConflictError) and THERE in str(error):
            memory.asked_at, memory.refusals, memory.is_open = now, 0, False
        else:  # a quota that others change at the same time is a conflict, too
            outcome.fail(f"Secret {name}", error)
        return
    memory.asked_at, memory.refusals, memory.is_open = now, 0, False
    outcome.writes += 1
    outcome.done.append(Deed("created", SECRET.kind, name, made["metadata"]["uid"]))
