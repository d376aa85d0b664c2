"""What a request's class says of how much it can wait."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from fleet_router.config import SloClass
from tests.fleet_router.admission.test_admission_proxy import KEY, SLOTS, with_tenants
from tests.fleet_router.rig import Rig, answer_of, ask, http, run, until


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("more", [[], ["traceparent: 00-" + "1" * 32 + "-" + "2" * 16 + "-00"]], ids=["alone", "traced"])
def test_a_class_that_can_wait_counts_the_time_of_others_more(keyed: bool, more: list[str]):
    """Also where a request says nothing else of itself."""
    config = msgspec.structs.replace(SLOTS, classes=(SloClass(name="batch", ttft_budget_s=50.0),))

    async def go(rig: Rig) -> None:
        if keyed:
            with_tenants(rig, acme={"classes": ["batch"]})
        let_go: list[asyncio.Event] = []

        async def behave(*_: object) -> bool:
            await let_go[-1].wait()
            return False

        rig.decode[0].behave = behave
        for headers, others in (([], 1.0), (["x-slo-class: batch"], 10.0)):
            let_go.append(asyncio.Event())
            reader, writer, connection = await rig.connect()
            writer.write(http(ask(prompt="short"), KEY, *headers, *more))
            await until(lambda connection=connection: connection.flow is not None)
            assert connection.flow.hints.others == others
            let_go[-1].set()
            assert (await answer_of(reader))[0] == 200

    run(go, prefill=0, config=config)
