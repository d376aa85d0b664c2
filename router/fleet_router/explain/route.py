"""GET /debug/decisions: the latest records, or those of one request. Nobody may read them who was not given the right.

With tenants: a key whose tenant has `decisions: own` (its own requests) or `all`. Without them there is nobody to tell apart:
only the router's own host is answered, where `fleet up` and `kubectl port-forward` come from, and nothing that was forwarded.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterator, Mapping
from itertools import islice, zip_longest
from typing import Final
from urllib.parse import parse_qs

import msgspec

from fleet_router.admission.tenants import Decisions
from fleet_router.errors import RequestError
from fleet_router.explain.recorder import Recorder
from fleet_router.explain.shown import Shown, refused, shown
from fleet_router.hints import FORWARDED

ASKED: Final = b"x-fleet-explain"
USUAL: Final = 20
MOST: Final = 200
ID_MOST: Final = 32 + 1 + 128
"""Of a worker's name of a request: a number of ours, and the client's own."""
FIELDS_MOST: Final = 8
NOT_WATCHED: Final = (
    "metrics name every tenant: they are on the admin port, or for keys with the right to see all (decisions: all)"
)


def rights_of(tenants_needed: bool, given: Decisions, peer: object, kept: Mapping[bytes, bytes]) -> Decisions:
    """What this client may read. `peer`: asyncio's name of the other end; `kept`: headers."""
    if tenants_needed:
        return given
    forwarded = any(name in kept for name in FORWARDED)
    return "all" if _local(peer) and not forwarded else "none"


def _local(peer: object) -> bool:
    host = peer[0] if isinstance(peer, tuple) and peer else ""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback  # a client over IPv4 at a socket of both families


def answer(recorder: Recorder, url: bytes, rights: Decisions, tenant: str, clock_s: float) -> bytes:
    """JSON; RequestError 403 without a right, 404 for a request of which nothing is known, 400 for a bad query."""
    if rights == "none":
        message = "records of decisions need a key with that right (tenants file: decisions), or the router's own host"
        raise RequestError(403, message, code="decisions_not_allowed")
    query = _query(url)
    wanted, limit = query.get("id", [""])[-1][:ID_MOST], _limit(query)
    only = tenant if rights == "own" else None
    found = list(islice(_rows(recorder, wanted, only, time.time() - clock_s), limit))
    if wanted and not found:
        raise RequestError(
            404, "no record of this request here: old ones are forgotten, or another router had it", code="no_record"
        )
    return msgspec.json.encode({"decisions": found})


def _rows(recorder: Recorder, wanted: str, only: str | None, epoch_s: float) -> Iterator[Shown]:
    """Those that were decided for and those that were refused in turn: who asks for the latest looks for what failed."""
    decided = (
        shown(record, epoch_s)
        for record in recorder.records()
        if only in (None, record.lane.account.name) and wanted in ("", record.request_id, record.leg_id)
    )
    turned_away = (
        refused(one, epoch_s)
        for one in reversed(recorder.refusals)
        if only in (None, one.tenant) and wanted in ("", one.request_id)
    )
    for turn in zip_longest(decided, turned_away):
        yield from (row for row in turn if row is not None)


def limit_of(url: bytes) -> int:
    """How many records are asked for; RequestError 400 for a bad query."""
    return _limit(_query(url))


def _query(url: bytes) -> dict[str, list[str]]:
    try:
        return parse_qs(url.partition(b"?")[2].decode("latin-1"), max_num_fields=FIELDS_MOST)
    except ValueError as error:
        raise RequestError(400, f"the query has more than {FIELDS_MOST} fields; there are id and limit") from error


def _limit(query: Mapping[str, list[str]]) -> int:
    text = query.get("limit", [str(USUAL)])[-1]
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MOST)) and 1 <= int(text) <= MOST):
        raise RequestError(400, f"limit must be a number between 1 and {MOST}", param="limit")
    return int(text)
