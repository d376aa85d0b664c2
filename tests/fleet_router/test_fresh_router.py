"""A router that has just started, while the decode workers are not ready: it knows of them from the document alone."""

from __future__ import annotations

import msgspec

from fleet_router.follow.documents import Documents
from fleet_wire.endpoints import AbsentWorker, AtZero, Endpoint, decode, encode
from tests.fleet_router.rig import Rig, answer_of, run
from tests.fleet_router.test_returning import WAITS, asking, document, endpoint


def test_a_router_that_has_just_started_waits_for_a_worker_that_it_never_saw():
    """It refused at once what its neighbour, which had seen the worker serve, held: half of the clients got 503."""

    async def go(rig: Rig) -> None:
        rig.context.table.absent = {}
        prefill = (endpoint("p", role="prefill"),)
        absent = (AbsentWorker(uid=f"u{rig.decode[0].port}", tier="t"),)
        rig.router.apply(Documents(WAITS, msgspec.structs.replace(document(*prefill), absent=absent)))
        assert rig.router.plain(b"/ready")[0] == 200
        reader, _ = await asking(rig)
        rig.apply(rig.prefill, rig.decode, WAITS)
        assert (await answer_of(reader))[0] == 200

    async def starts(rig: Rig) -> None:
        rig.apply(rig.prefill, [], WAITS)
        await go(rig)

    run(starts, config=WAITS)


def test_documents_of_before_and_after_are_read_by_routers_of_before_and_after():
    class Before(msgspec.Struct, kw_only=True):
        """As routers knew it that know of no absent ones."""

        fleet: str
        namespace: str
        workers: tuple[Endpoint, ...] = ()
        at_zero: tuple[AtZero, ...] = ()

    new = msgspec.structs.replace(document(endpoint("a")), absent=(AbsentWorker(uid="b", tier="t"),))
    assert decode(encode(new)) == new
    assert msgspec.json.decode(encode(new), type=Before).workers == new.workers
    old = msgspec.json.decode(encode(new), type=dict[str, msgspec.Raw])
    del old["absent"]
    assert decode(msgspec.json.encode(old)) == document(endpoint("a"))
