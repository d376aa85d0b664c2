"""Routers stay as they were made: another version of the operator, or another default image, restarts none of them.

What a fleet's router pods are made from is kept on their Deployment, with a digest of what the user had written about routers by
then. While that is the same the kept template is wished for, whatever this version would make; somebody's edit of the Deployment
is still undone. What a user changes about routers makes them anew, because a field may be newer than the image that runs.

Around them everything is this version's: documents, Service, rights. Routers of before have to get on with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

import msgspec

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.cluster.interface import Object
from fleet_operator.names import GROUP
from fleet_operator.observe import timestamp
from fleet_operator.render.revision import RESTARTED_AT

ROUTER_MADE: Final = f"{GROUP}/router-made"
"""On the Deployment: the template of its pods as somebody's version made it. Without it they are made anew."""
ROUTER_ACCOUNT: Final = f"{GROUP}/router-account"
"""On the pods' template: uid of the ServiceAccount that was made again, so that they were made anew."""
CLOCKS_S: Final = 60.0
"""Clocks of two API servers are not that far apart."""
ROUTERS_RENEWED_AT: Final = f"{GROUP}/routers-renewed-at"
"""Annotation of a fleet: with another value its routers are made anew, and its workers stay."""
ROUTER_PARTS: Final = ("routing", "limits", "tenants", "classes", "slo", "telemetry", "peer_key")
"""Parts of a fleet's spec that its routers act on, as arguments or documents. Adapters are no part of it: they come and go."""
NOT_OF_ROUTERS: Final = {"routing": {"replicas"}, "slo": {"itl"}, "telemetry": {"interval", "prometheus"}}
"""Their number, and what the operator alone does."""
_DUMPED: Final[Any] = {
    **dict.fromkeys(ROUTER_PARTS, True),
    "rollout": {"drain_timeout"},
    "tiers": {"__all__": {"kv_transfer": {"lease_duration"}}},
}
"""With what decides how long a router may take to end."""


class _Made(msgspec.Struct, frozen=True):
    asked: str
    """Digest of what the user wrote."""
    seal: str
    """Digest of the template: a note that somebody edited is none."""
    template: Object


def asked_of(fleet: InferenceFleet) -> str:
    """Digest of what the user wrote about routers; what equals its default is left out, so fields of a newer version are, too."""
    spec = fleet.spec.model_dump(mode="json", by_alias=True, include=_DUMPED, exclude_defaults=True)
    for part, names in NOT_OF_ROUTERS.items():
        spec[part] = {key: value for key, value in spec.get(part, {}).items() if key not in names}
    leases = {tier["kvTransfer"]["leaseDuration"] for tier in spec.pop("tiers") if tier.get("kvTransfer")}
    notes = [fleet.metadata.annotations.get(key, "") for key in (RESTARTED_AT, ROUTERS_RENEWED_AT)]
    return _digest([{part: value for part, value in spec.items() if value}, sorted(leases), notes])


def template_and_note(found: Object | None, asked: str, make: Callable[[], Object]) -> tuple[Object, str]:
    """The template that the routers of this Deployment were made from, else a new one, and what the Deployment is to remember."""
    notes = found["metadata"].get("annotations") or {} if found is not None else {}
    note = notes.get(ROUTER_MADE, "")
    with suppress(msgspec.DecodeError):
        made = msgspec.json.decode(note, type=_Made)
        if made.asked == asked and made.seal == _digest(made.template):
            return made.template, note
    template = make()
    return template, _note(asked, template)


def with_account(template: Object, note: str, account: Object | None, pods: Iterable[Object]) -> tuple[Object, str]:
    """The same, but where router pods are older than their ServiceAccount: the API server does not know their tokens any more,
    and their kubelets bring others only when these would be over (an hour)."""
    made_at = None if account is None else _made_at(account)
    old = made_at is not None and any(made_at - (_made_at(pod) or made_at) > CLOCKS_S for pod in pods)
    if account is None or not old:
        return template, note
    meta = template["metadata"]
    marks = {**meta.get("annotations", {}), ROUTER_ACCOUNT: account["metadata"]["uid"]}
    template = {**template, "metadata": {**meta, "annotations": marks}}
    asked = msgspec.json.decode(note, type=_Made).asked
    return template, _note(asked, template)


def _made_at(obj: Object) -> float | None:
    """By the API server's clock."""
    return timestamp(obj["metadata"].get("creationTimestamp"))


def _note(asked: str, template: Object) -> str:
    return msgspec.json.encode(_Made(asked, _digest(template), template)).decode()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
