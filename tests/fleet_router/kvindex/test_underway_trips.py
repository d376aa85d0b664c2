"""Notes of what is on its way, over whole trips, while workers come and go: each is taken away, once, and from its own worker."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_router.ask import Ask, Hints
from fleet_router.config import RouterConfig
from fleet_router.kvindex.underway import Underway
from fleet_router.policy.chosen import Choice
from fleet_router.policy.trip import Trip
from fleet_router.workers import Worker, WorkerTable
from fleet_wire.endpoints import Endpoint, Endpoints, Role

CONFIG = RouterConfig(fleet="f", served_name="m", decide="cost")
PROMPTS = [b"shared " * 600 + tail * 300 for tail in (b"one ", b"two ")]
PREFILLS, WORKERS = 2, 3
STEPS = st.sampled_from(["prefilled", "first", "hedged", "won", "lost", "whole", "over"])
DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, len(PROMPTS) - 1), st.booleans()),
        st.tuples(st.just("step"), st.integers(0, 3), STEPS),
        st.tuples(st.just("joins"), st.integers(0, WORKERS - 1), st.booleans()),
    ),
    max_size=30,
)


class World:
    """Two prefill workers and one that decodes, each of which may be another one after a while."""

    def __init__(self, most: int) -> None:
        self.table = WorkerTable()
        self.table.routing.underway = Underway(most)
        self.places = [0] * WORKERS
        self.names = [0] * WORKERS
        self.now = 0.0
        self.trips: list[tuple[Trip, Worker]] = []
        self.seen: set[Worker] = set()
        self.update()

    def update(self) -> None:
        roles: list[Role] = ["prefill"] * PREFILLS + ["decode"] * (WORKERS - PREFILLS)
        found = [
            Endpoint(
                name=f"w{i}", uid=f"w{i}-{self.names[i]}", address="127.0.0.1", http_port=1, agent_port=1 + self.places[i],
                role=role, tier="t", revision="r", compat="c",
            )
            for i, role in enumerate(roles)
        ]  # fmt: skip
        self.table.update(Endpoints(fleet="f", namespace="n", workers=tuple(found)), self.now, CONFIG)
        self.seen.update(self.table.workers.values())

    def joins(self, number: int, same_name: bool) -> None:
        (self.places if same_name else self.names)[number] += 1
        self.update()

    def send(self, prompt: int, stream: bool) -> None:
        found, keys = self.table.choose(PROMPTS[prompt], CONFIG, self.now, frozenset(), hints=Hints(precise=-1))
        assert isinstance(found, Choice)
        trip = self.table.depart(found, self.now, Ask({}, b"", stream, None), "cost", keys, True)
        assert trip is not None
        self.trips.append((trip, self.table.workers[found.decode]))

    def step(self, which: int, what: str) -> None:
        if not self.trips:
            return
        trip, decode = self.trips[which % len(self.trips)]
        if what == "prefilled":
            trip.prefilled(self.now)
        elif what == "first":
            trip.first_token(self.now)
        elif what == "hedged" and trip._hedge is None:
            trip.hedged(self.table.by_role["prefill"][which % PREFILLS], 500.0, self.now)
        elif what in ("won", "lost"):
            trip.hedge_over(self.now, won=what == "won")
        elif what == "whole":
            trip.whole(self.now, 1 + which * 9, decode)
        elif what == "over":
            self.ends(trip)

    def is_noted(self, trip: Trip) -> bool:
        """Or it need not be: it is computed, there was no room for it, or its worker is gone."""
        one, masks = trip._prefilling, self.table.routing.underway.masks
        if trip._underway is None or one is None or one.worker.home is None:
            return True
        return all(masks.get(key, 0) & one.worker.bit for key in trip._keys)

    def ends(self, trip: Trip) -> None:
        trip.hedge_over(self.now, won=False)
        trip.over(self.now)
        self.trips = [one for one in self.trips if one[0] is not trip]


@settings(max_examples=300)
@given(DEEDS, st.sampled_from([40, 200_000]))
def test_nothing_is_on_its_way_once_all_trips_are_over(deeds: list[tuple[str, int, bool | str]], most: int):
    world = World(most)
    underway = world.table.routing.underway
    for what, number, more in deeds:
        world.now += 0.5
        getattr(world, what)(number, more)
        noted = sum(mask.bit_count() for mask in underway.masks.values())
        assert noted == underway.keys == sum(len(keys) for keys in underway._counts.values()) <= most
        bits = {worker.bit for worker in world.table.workers.values()}
        assert len(bits) == WORKERS
        assert not any(mask & ~sum(bits) for mask in underway.masks.values()), "of somebody who left"
        assert all(worker.pending >= 0 for worker in world.seen)
        assert all(world.is_noted(trip) for trip, _ in world.trips), "one that is on its way"
    for trip, _ in world.trips.copy():
        world.ends(trip)
    assert (underway.masks, underway.keys) == ({}, 0)
    assert all(worker.pending == 0 for worker in world.seen)
