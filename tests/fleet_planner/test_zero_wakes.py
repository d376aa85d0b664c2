"""A wake from zero for which nobody waits any more."""

from __future__ import annotations

from tests.fleet_planner.zero_world import IDLE_S, World, condition, counts


def test_a_wake_goes_on_though_who_woke_it_has_left():
    """Its model takes longer to load than clients wait and than `idle`: each wake was given up half-way, and began anew with the
    next request, so that nobody was ever answered."""
    world = World()
    world.rest()
    world.held = 1
    world.step()
    world.held = 0
    for _ in range(5 * int(IDLE_S)):
        assert world.step().delete == ()
    assert condition(world.step(), "Available") == ("False", "Waking")
    world.ready()
    assert counts(world.step(), "t") == (1, 2)
    for _ in range(5 * int(IDLE_S)):  # as long as it took
        assert world.step().delete == ()
    for _ in range(int(IDLE_S)):
        world.step()
    assert world.workers() == 0


def test_a_wake_that_waits_for_new_nodes_goes_on_for_as_long_as_these_may_take():
    world = World()
    world.rest()
    world.held, world.fits = 1, False
    world.step()
    world.held = 0
    for _ in range(290):  # capacityWait is 5 min
        assert world.step().delete == ()
    for _ in range(20 + int(IDLE_S)):
        world.step()
    assert world.workers() == 0


def test_a_wake_that_comes_to_nothing_ends():
    world = World()
    world.rest()
    world.held = 1
    world.step()
    world.held = 0
    for _ in range(1_790):
        assert world.step().delete == ()
    for _ in range(20 + int(IDLE_S)):
        world.step()
    assert world.workers() == 0
