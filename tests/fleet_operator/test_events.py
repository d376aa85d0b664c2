"""What users are told: pure rules first, then through the recorder on the in-memory store."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Literal

import pytest

from fleet_api.conditions import ConditionType
from fleet_api.v1alpha1.status import Condition, FleetStatus, FlipStatus, RoleStatus, TierStatus
from fleet_operator.cluster.interface import EVENT, FLEET, ClusterError, ForbiddenError
from fleet_operator.cluster.memory import MemoryCluster, MemoryLimits
from fleet_operator.outcome import Outcome
from fleet_operator.recorder import CONTROLLER, Recorder
from fleet_planner.events import NOTE_MOST_BYTES, Deed, Event, Pass, events_of
from fleet_planner.telling import AGAIN_S, RATE_MOST, RATE_S, Told, admit, news
from fleet_planner.types import Problem, TierTelemetry
from tests.fleet_operator.world import NAMESPACE, Api, World, manifest, play

State = tuple[Literal["True", "False", "Unknown"], str]
NOW = 1_000_000.0


def status(tiers: tuple[TierStatus, ...] = (), **conditions: State) -> FleetStatus:
    found = tuple(Condition(type=kind, status=state, reason=reason, message=kind) for kind, (state, reason) in conditions.items())
    return FleetStatus(tiers=tiers, conditions=found)


def tier(prefill: int, decode: int, revision: str = "a") -> TierStatus:
    return TierStatus(name="t", prefill=RoleStatus(desired=prefill), decode=RoleStatus(desired=decode), revision=revision)


def told(before: FleetStatus, after: FleetStatus, **done: Any) -> list[str]:
    return [f"{event.type} {event.reason}: {event.note}" for event in events_of(before, after, Pass(fleet="f", **done))]


@pytest.mark.parametrize(
    ("kind", "before", "after", "expected"),
    [
        ("Ready", ("False", "NoRouter"), ("True", "AllGood"), ["Normal AllGood: Ready"]),
        ("Ready", ("True", "AllGood"), ("False", "NoRouter"), []),  # told by Available, with the same words
        ("Ready", ("False", "NotProvisioned"), ("False", "NoRouter"), []),
        ("Ready", None, ("False", "NotProvisioned"), []),
        ("Accepted", None, ("True", "Valid"), []),
        ("Accepted", None, ("False", "Invalid"), ["Warning Invalid: Accepted"]),
        ("Available", None, ("False", "WorkersStarting"), []),
        ("Available", None, ("False", "WorkersFailing"), ["Warning WorkersFailing: Available"]),
        ("Available", ("True", "Serving"), ("False", "WorkersStarting"), ["Warning WorkersStarting: Available"]),
        ("Available", ("False", "WorkersStarting"), ("False", "WorkersFailing"), ["Warning WorkersFailing: Available"]),
        ("Available", ("True", "Serving"), ("True", "Answering"), []),
        ("Available", ("True", "Serving"), ("False", "NoRouter"), ["Warning NoRouter: Available"]),
        ("Provisioned", ("True", "AllCreated"), ("False", "Creating"), []),
        ("Provisioned", ("True", "AllCreated"), ("False", "ApplyFailed"), []),
        ("Provisioned", ("False", "ApplyFailed"), ("True", "AllCreated"), ["Normal AllCreated: Provisioned"]),
        ("Disaggregating", ("Unknown", "NoTransferYet"), ("True", "KvMoved"), ["Normal KvMoved: Disaggregating"]),
        ("Disaggregating", ("True", "KvMoved"), ("Unknown", "NoData"), []),
        ("TelemetryFresh", None, ("Unknown", "NoData"), []),
        ("TelemetryFresh", ("True", "Fresh"), ("Unknown", "NoData"), ["Warning NoData: TelemetryFresh"]),
        ("CapacityLimited", None, ("False", "Sufficient"), []),
        ("CapacityLimited", ("False", "Sufficient"), ("True", "Unschedulable"), ["Warning Unschedulable: CapacityLimited"]),
        ("CapacityLimited", ("True", "Unschedulable"), ("False", "Sufficient"), ["Normal Sufficient: CapacityLimited"]),
    ],
)
def test_a_condition_is_told_when_it_changes(kind: ConditionType, before: State | None, after: State, expected: list[str]):
    first = status(**{kind: before}) if before else status()
    second = status(**{kind: after})
    assert told(first, second) == expected
    assert told(second, second) == []


def test_a_fleet_that_comes_up_is_told_once():
    before = status(
        Ready=("False", "NotProvisioned"), Provisioned=("False", "Creating"), Available=("False", "WorkersStarting"),
        CapacityLimited=("True", "Unschedulable"),
    )  # fmt: skip
    limited, good = ("True", "Stuck"), {"Provisioned": ("True", "AllCreated"), "Available": ("True", "Serving")}
    after = status(Ready=("True", "AllGood"), **good, CapacityLimited=limited)
    assert told(before, after) == ["Normal AllGood: Ready", "Warning Stuck: CapacityLimited"]
    assert told(before, status(Ready=("False", "NotProvisioned"), **good)) == ["Normal Serving: Available"]


def test_a_spec_that_is_refused_for_another_reason_is_told_again():
    one = status(Accepted=("False", "Invalid"))
    other = FleetStatus(conditions=(one.conditions[0].model_copy(update={"message": "spec.tiers is empty"}),))
    assert told(one, other) == ["Warning Invalid: spec.tiers is empty"]


def test_a_resized_tier_says_from_where_to_where_and_why():
    why = {"t": "load needs 2 prefill and 4 decode workers"}
    assert told(status((tier(1, 2),)), status((tier(2, 4),)), sizing=why) == [
        "Normal Resized: tier t: 1 prefill and 2 decode → 2 prefill and 4 decode; load needs 2 prefill and 4 decode workers"
    ]
    assert told(status(), status((tier(2, 4),)), sizing=why) == []  # a new tier was not resized
    assert told(status((tier(2, 4),)), status((tier(2, 4),)), sizing=why) == []


def test_a_new_template_is_told():
    changed = told(status((tier(1, 2),)), status((tier(1, 2, "b"),)))
    assert changed == ["Normal RevisionChanged: tier t: workers of revision a give way to b"]


def worker(verb: Literal["created", "deleted"], name: str, role: str = "decode") -> Deed:
    return Deed(verb, "Pod", name, f"uid-{name}", "t", role, why="its phase is Failed" if verb == "deleted" else "")


def test_workers_are_counted_per_role():
    deeds = [worker("created", f"d{i}") for i in range(5)] + [worker("created", "p0", "prefill")]
    assert told(status(), status(), deeds=deeds) == [
        "Normal WorkersCreated: tier t: 5 decode workers: d0, d1, d2 and 2 more",
        "Normal WorkersCreated: tier t: 1 prefill worker: p0",
    ]


def test_a_worker_lost_and_made_in_one_pass_was_replaced():
    deeds = [worker("deleted", "d0"), worker("deleted", "d1"), worker("created", "d2"), worker("deleted", "p0", "prefill")]
    assert told(status(), status(), deeds=deeds) == [
        "Normal WorkersReplaced: tier t: 1 decode worker: d0 (its phase is Failed)",
        "Normal WorkersDeleted: tier t: 1 decode worker: d1 (its phase is Failed)",
        "Normal WorkersDeleted: tier t: 1 prefill worker: p0 (its phase is Failed)",
    ]


@pytest.mark.parametrize(
    ("provisioned", "deed", "expected"),
    [
        ("True", Deed("changed", "Service", "s", undid="spec.ports"), "Service s: undid somebody else's edit of spec.ports"),
        ("True", Deed("changed", "ConfigMap", "c"), None),
        ("True", Deed("created", "ConfigMap", "c"), "ConfigMap c was missing"),
        ("False", Deed("created", "ConfigMap", "c"), None),
        ("True", Deed("created", "WorkerPool", "w"), None),
        ("True", Deed("deleted", "WorkerPool", "w", why="its revision is no longer wanted"), None),
        ("True", Deed("deleted", "Service", "s", why="to be made anew: a port"), "Service s: deleted, to be made anew: a port"),
        ("True", Deed("created", "PodDisruptionBudget", "f-t-decode"), "PodDisruptionBudget f-t-decode was missing"),
        ("True", Deed("created", "PodDisruptionBudget", "f-t-prefill"), None),
        ("True", Deed("created", "PodDisruptionBudget", "f-router"), None),
        ("True", Deed("created", "PodDisruptionBudget", "f-a-t-decode"), None),
    ],
    ids=[
        "edited", "our-wish-changed", "deleted", "first-creation", "new-revision", "old-revision", "made-anew", "budget-gone",
        "first-ready", "second-router", "first-ready-of-a-tier-whose-name-ends-like-another",
    ],
)  # fmt: skip
def test_a_child_put_back_is_told(provisioned: Any, deed: Deed, expected: str | None):
    some = TierStatus(name="t", decode=RoleStatus(desired=2, ready=1))
    before = status((some,), Provisioned=(provisioned, "X"))
    assert told(before, before, deeds=[deed]) == ([f"Normal PutBack: {expected}"] if expected else [])


def test_a_worker_that_changed_its_role_and_one_that_could_not_are_told_once():
    deed = Deed("flipped", "Pod", "d0", "u", "t", "prefill", why="decode → prefill in 3 s; 8 tokens equal a partner's")
    assert told(status(), status(), deeds=[deed]) == [
        "Normal Flipped: tier t: d0: decode → prefill in 3 s; 8 tokens equal a partner's"
    ]
    failed = tier(1, 3).model_copy(update={"flip": FlipStatus(failed_at="2026-01-01T00:00:00Z", message="d0: other tokens")})
    assert told(status((tier(1, 3),)), status((failed,))) == ["Warning FlipFailed: tier t: d0: other tokens"]
    assert told(status((failed,)), status((failed,))) == []
    assert told(status((failed,)), status((tier(1, 3),))) == []
    memory, first = news(Told(), [deed], 1.0)
    assert (len(first), news(memory, [deed], 2.0)[1]) == (1, ())
    assert len(news(memory, [replace(deed, role="decode")], 3.0)[1]) == 1, "and back is another change"


def test_problems_are_told_one_per_reason():
    problems = [Problem("Forbidden", f"Pod p{i}: quota") for i in range(4)] + [Problem("Conflict", "Service s: again")]
    assert told(status(), status(), problems=problems) == [
        "Warning Forbidden: Pod p0: quota; Pod p1: quota; Pod p2: quota and 1 more",
        "Warning Conflict: Service s: again",
    ]


def test_a_note_is_never_longer_than_the_api_takes():
    note = events_of(status(), status(), Pass(problems=[Problem("Invalid", "→" * 5_000)]))[0].note
    assert len(note.encode()) <= NOTE_MOST_BYTES
    assert note.endswith("→…")


def event(number: int) -> Event:
    return Event("Normal", "Counted", str(number), "Count")


def test_the_same_words_are_written_once_in_five_minutes():
    memory, written, _ = admit(Told(), [event(1), event(1)], NOW)
    assert written == (event(1),)
    for later_s, expected in [(0.0, ()), (AGAIN_S - 1, ()), (AGAIN_S, (event(1),)), (-3_600.0, (event(1),))]:
        assert admit(memory, [event(1)], NOW + later_s)[1] == expected


def test_a_flood_is_dropped_and_counted_and_its_memory_is_bounded():
    memory, number = Told(), 0
    for second in range(0, 3_600, 5):
        batch = [event(number := number + 1) for _ in range(10)]
        memory, written, dropped = admit(memory, batch, NOW + second)
        assert len(written) + dropped == 10
        within = [at for at, _ in memory.events if at > NOW + second - RATE_S]
        assert len(within) <= RATE_MOST
        assert len(memory.events) <= RATE_MOST * AGAIN_S / RATE_S
    assert memory.events[-1][0] > NOW + 3_500  # still speaking after an hour of flood


def test_what_a_lagging_cache_does_again_is_no_news():
    memory, fresh = news(Told(), [worker("created", "d0")], NOW)
    assert fresh == (worker("created", "d0"),)
    memory, fresh = news(memory, [worker("created", "d0"), worker("deleted", "d0")], NOW + 1)
    assert fresh == (worker("deleted", "d0"),)


def test_each_edit_of_a_child_is_news():
    memory, first = news(Told(), [Deed("changed", "Service", "s", "u1", undid="spec.type")], NOW)
    second = Deed("changed", "Service", "s", "u1", undid="spec.ports")
    assert (len(first), news(memory, [second], NOW + 1)[1]) == (1, (second,))


def test_a_child_made_anew_is_not_missing_but_one_deleted_later_is():
    memory, fresh = news(Told(), [Deed("deleted", "Service", "s", "u1", why="made anew: x")], NOW)
    assert [deed.verb for deed in fresh] == ["deleted"]
    again = Deed("deleted", "Service", "s", "u2", why="made anew: y")
    assert news(memory, [again], NOW + 1)[1] == (again,), "somebody put it there at once"
    memory, fresh = news(memory, [Deed("created", "Service", "s", "u2")], NOW + 1)
    assert fresh == ()
    memory, fresh = news(memory, [Deed("created", "Service", "s", "u3")], NOW + 2)
    assert [deed.uid for deed in fresh] == ["u3"]


# -- through the recorder -----------------------------------------------------------------------------------------------


def recorded(refusal: ClusterError | None = None, kept: int = 1_000, passes: int = 1) -> list[dict[str, Any]]:
    """The events in the store after passes that each created one worker and moved Ready."""

    async def scenario() -> list[dict[str, Any]]:
        store = MemoryCluster(limits=MemoryLimits(events=kept))
        raw = await store.apply(manifest())
        api = Api(store)
        api.refuse = lambda verb, kind, name: refusal if kind == EVENT else None
        now = [NOW]
        recorder = Recorder(api, lambda: now[0], "operator-0")
        for number in range(passes):
            now[0] = NOW + 60 * number
            await recorder.record(raw, status(Ready=("True", "AllGood")), Outcome(done=[worker("created", f"d{number}")]), {})
        return await store.list(EVENT)

    return asyncio.run(scenario())


def test_that_events_were_not_written_in_time_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    async def scenario() -> None:
        store = MemoryCluster()
        raw = await store.apply(manifest())

        async def silent(_: Any) -> None:
            await asyncio.sleep(3_600)

        monkeypatch.setattr(store, "create", silent)
        monkeypatch.setattr("fleet_operator.recorder.WRITING_S", 0.01)
        await Recorder(store, lambda: NOW).record(
            raw, status(Ready=("True", "AllGood")), Outcome(done=[worker("created", "d")]), {}
        )

    asyncio.run(scenario())
    assert "events not written: no answer in time" in caplog.text


def test_a_pass_without_news_is_not_recorded():
    async def scenario() -> None:
        raw, well, ill = (
            {**manifest(), "metadata": {"name": "f", "namespace": "ml", "uid": "u"}},
            *(status(Ready=found) for found in (("True", "AllGood"), ("False", "NoRouter"))),
        )
        recorder = Recorder(MemoryCluster(), lambda: NOW)
        problem = Outcome(problems=[Problem("Refused", "words")])
        assert recorder.has_news(raw, well, Outcome())  # nothing was remembered yet
        await recorder.record(raw, well, Outcome(), {})
        assert not recorder.has_news(raw, status(Ready=("True", "AllGood")), Outcome())
        assert recorder.has_news(raw, ill, Outcome())
        assert recorder.has_news(raw, well, Outcome(done=[worker("created", "d")]))
        assert recorder.has_news(raw, well, problem)
        await recorder.record(raw, well, problem, {})
        assert recorder.has_news(raw, well, Outcome())  # it is over, and would be news again
        recorder.forget("u")
        assert recorder.has_news(raw, well, Outcome())

    asyncio.run(scenario())


def test_an_event_is_about_its_fleet_so_that_kubectl_describe_finds_it():
    (found,) = recorded()
    about = {key: found["regarding"][key] for key in ("apiVersion", "kind", "name", "namespace")}
    assert about == {"apiVersion": "inferencefleet.io/v1alpha1", "kind": "InferenceFleet", "name": "f", "namespace": "ml"}
    assert found["regarding"]["uid"]
    assert (found["reportingController"], found["reportingInstance"]) == (CONTROLLER, "operator-0")
    assert (found["type"], found["reason"], found["action"]) == ("Normal", "WorkersCreated", "Create")
    assert found["eventTime"] == "1970-01-12T13:46:40.000000Z"
    assert found["metadata"]["namespace"] == "ml"


def test_an_event_that_cannot_be_written_fails_nothing(caplog: pytest.LogCaptureFixture):
    assert recorded(ForbiddenError("events is forbidden")) == []
    assert "events is forbidden" in caplog.text


def test_events_of_a_long_life_stay_bounded_in_the_store():
    assert len(recorded(kept=5, passes=50)) == 5


def test_a_source_that_never_answered_is_told_and_a_healthy_start_warns_of_nothing():
    async def scenario() -> None:
        world = World()
        await world.user.apply(manifest())
        await world.settle()
        assert [line for line in await world.events() if line.startswith("Warning")] == []
        world = World()
        world.load = {"t": TierTelemetry(problem="http://prometheus:9090: ConnectionError")}
        await world.user.apply(manifest())
        for _ in range(20):
            await world.step()
        (told,) = [line for line in await world.events() if line.startswith("Warning")]
        assert told.startswith(
            "Warning SourceFailed load is unknown, sizes are held; tier t: http://prometheus:9090: ConnectionErr"
        )

    asyncio.run(scenario())


def test_what_the_spec_asks_for_anew_or_no_more_was_put_back_by_nobody():
    """Each rollout told that its ControllerRevision was missing, and each one beyond the history that another was put back."""

    async def scenario(world: World) -> None:
        changes: list[dict[str, Any]] = [{"engine": {"maxBatch": n}, "rollout": {"historyLimit": 1}} for n in (1, 2, 3)]
        changes += [{"networkPolicy": {"enabled": False}}, {"networkPolicy": {"enabled": True}}]
        changes += [{"routing": {"replicas": 2}}, {"routing": {"replicas": 1}}]
        for spec in changes:
            await world.user.patch(FLEET, NAMESPACE, "f", {"spec": spec})
            await world.settle(40)
            world.now += 120
        assert [line for line in await world.events() if "PutBack" in line] == []

    play(scenario)
