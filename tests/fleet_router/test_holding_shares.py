"""Shares of the places while a fleet is at zero: one tenant cannot take all of them."""

from __future__ import annotations

import contextlib
import inspect
import json

import pytest

from fleet_router.config import HoldBounds
from fleet_router.errors import RequestError
from fleet_router.holding import Holding
from tests.fleet_router.admission.made import key_of, parsed
from tests.fleet_router.rig import LONG, Rig, answer_of, ask, http, run, until
from tests.fleet_router.test_holding import ZERO, One, rest, wake


class Of(One):
    """A tenant's."""

    def __init__(self, holding: Holding, tenant: str, size: int = 1, weight: float = 1.0) -> None:
        super().__init__(holding, 0, size)
        self.tenant, self.weight = tenant, weight

    def wait(self, now: float = 0.0, bounds: HoldBounds = HoldBounds()) -> float:  # noqa: B008 - frozen
        return self.holding.hold(self, self.size, ("no worker", "no_worker"), now, bounds, self.tenant, self.weight)


@pytest.mark.parametrize(
    ("bounds", "flood", "sizes", "weights", "left"),
    [
        pytest.param(HoldBounds(requests=4), 4, [1] * 4, (1.0, 1.0), [2, 2], id="places: half for each"),
        pytest.param(HoldBounds(requests=4), 4, [1] * 4, (3.0, 1.0), [3, 1], id="places: by weight"),
        pytest.param(HoldBounds(bytes=40), 4, [10] * 4, (1.0, 1.0), [2, 2], id="bytes: half for each"),
        pytest.param(HoldBounds(bytes=40), 4, [25, 25], (1.0, 1.0), [4, 0], id="bytes: more than a share is refused"),
        pytest.param(HoldBounds(bytes=40), 4, [15], (1.0, 1.0), [2, 1], id="bytes: several give way to one"),
    ],
)
def test_one_tenant_cannot_take_all_places(
    bounds: HoldBounds, flood: int, sizes: list[int], weights: tuple[float, float], left: list[int]
):
    """A tenant that flooded a resting fleet turned everybody else away until its own requests had waited for five minutes."""
    holding = Holding(ZERO)
    many = [Of(holding, "flood", 10, weights[0]) for _ in range(flood)]
    few = [Of(holding, "other", size, weights[1]) for size in sizes]
    for one in [*many, *few]:
        with contextlib.suppress(RequestError):
            one.wait(0.0, bounds)
    assert [sum(one in holding._places for one in ones) for ones in (many, few)] == left
    told = [one.ended for one in many]
    assert told == [""] * left[0] + ["hold_share"] * (flood - left[0])  # the oldest stay
    assert holding.outcomes["pushed"] == flood - left[0]
    assert holding.size_bytes == 10 * left[0] + sum(one.size for one in few if one in holding._places)


def test_requests_that_follow_each_other_on_one_connection_are_pushed_without_recursion():
    holding, bounds = Holding(ZERO), HoldBounds(requests=1000)
    cuts = [0, 0]

    class Chained(Of):
        def cut(self, error: RequestError) -> None:
            cuts[0] += 1
            cuts[1] = max(cuts[1], depth())
            with contextlib.suppress(RequestError):
                Chained(holding, "other").wait(0.0, bounds)

    for _ in range(1000):
        Chained(holding, "flood").wait(0.0, bounds)
    before = depth()
    Chained(holding, "other").wait(0.0, bounds)
    assert (cuts[0], cuts[1] - before < 10) == (500, True)


def depth() -> int:
    return len(inspect.stack(0))


def test_who_gives_way_is_told_and_charged_nothing():
    async def go(rig: Rig) -> None:
        desk = rig.context.desk
        desk.tenants_needed = True
        limits = {"tokensPerMinute": 10_000}
        desk.know(parsed(flood=limits, other={}))
        rest(rig, requests=2)
        readers = []
        for number, name in enumerate(("flood", "flood", "other")):
            reader, writer, _ = await rig.connect()
            writer.write(http(ask(), f"authorization: Bearer {key_of(name)}"))
            await until(lambda number=number: rig.context.metrics.arrivals == number + 1)
            readers.append(reader)
        status, headers, body = await answer_of(readers[1])
        assert (status, headers["retry-after"], json.loads(body)["error"]["code"]) == (503, "10", "hold_share")
        flood, now_ns = desk.accounts["flood"], int(rig.context.clock() * 1e9)
        assert (flood.inflight, flood.counts["failed"], len(rig.context.holding)) == (1, 1, 2)
        charged = len(LONG) // 3 + 1
        left = dict(line.split(": ") for line in flood.headers(now_ns).decode().strip().split("\r\n"))
        assert abs(int(left["x-ratelimit-remaining-tokens"]) - (10_000 - charged)) < 20
        wake(rig)
        assert [(await answer_of(readers[i]))[0] for i in (0, 2)] == [200, 200]

    run(go)
