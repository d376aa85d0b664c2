"""A key that is replaced all at once, as that of a Secret which somebody deleted and the operator made anew: no pair of workers
that had a key is refused meanwhile, and the key of before is nobody's in the end."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_wire.peerkey import MOST_KEYS, SEED
from fleet_worker.transfer.keys import LOOK_S, SPREAD_S, Keys, overlapping
from tests.fleet_worker.transfer.test_handoff import KEY, NEXT, Pod

OLD, NEW = (b"old",), (b"new",)
THIRD = "t" * 64


@pytest.mark.parametrize(
    ("since_s", "expected"),
    [(0.0, (*OLD, *NEW)), (179.9, (*OLD, *NEW)), (180.0, (*NEW, *OLD)), (359.9, (*NEW, *OLD)), (360.0, NEW), (1e9, NEW)],
)
def test_the_steps_of_a_rotation_by_the_clock(since_s: float, expected: tuple[bytes, ...]):
    assert overlapping(OLD, NEW, since_s, 180.0) == expected
    assert overlapping(OLD, NEW, since_s, 0.0) == NEW, "where nobody waits for others"
    assert overlapping((), NEW, since_s, 180.0) == NEW


def pods_at(folder: Path, *names: str) -> list[Pod]:
    return [Pod(folder, name, KEY, host=f"10.0.1.{at}") for at, name in enumerate(names)]


def everybody_greets(pods: list[Pod]) -> None:
    for one, other in itertools.permutations(pods, 2):
        found, _ = one.greets(other.reply, other.settings.host)
        assert found == "welcome", (one.file.name, other.file.name)


def all_later(pods: list[Pod], seconds: float) -> None:
    for pod in pods:
        pod.later(seconds)


def test_each_pod_has_it_at_another_time_and_nobody_is_refused(tmp_path: Path):
    """Those with the old key and those with the new one did not believe each other, until kubelets had brought it to all."""
    pods = pods_at(tmp_path, "a", "b", "c")
    for pod in pods:
        pod.write(NEXT)
        all_later(pods, SPREAD_S / 3)
        everybody_greets(pods)
    for _ in range(14):
        all_later(pods, SPREAD_S / 6)
        everybody_greets(pods)
    assert all(len(pod.handoff._keys.current()) == 1 for pod in pods)
    assert sum(sum(pod.handoff.refused.values()) for pod in pods) == 0, "no key is told as a stranger's"
    old = Pod(tmp_path, "old", KEY)
    assert old.greets(pods[0].reply, "10.0.1.0")[0] == "proof", "the old key is nobody's"
    assert pods[0].greets(old.reply)[0] == "proof"


def test_a_pod_that_is_made_meanwhile_has_kv_from_and_gives_it_to_those_that_know_its_key(tmp_path: Path):
    """It knows the new one alone, and those sign with the old one still."""
    pods = pods_at(tmp_path, "a", "b")
    for pod in pods:
        pod.write(NEXT)
    all_later(pods, 2 * LOOK_S)
    new = Pod(tmp_path, "new", NEXT, host="10.0.1.9")
    for _ in range(5):
        everybody_greets([*pods, new])
        all_later(pods, SPREAD_S / 2)
    slow = Pod(tmp_path, "slow", KEY, host="10.0.1.8")
    with pytest.raises(AssertionError):
        everybody_greets([new, slow])


def test_a_pod_that_has_it_very_late_is_believed_until_the_old_one_is_over(tmp_path: Path):
    early, late = pods_at(tmp_path, "early", "late")
    early.write(NEXT)
    early.later()
    early.later(1.5 * SPREAD_S)
    everybody_greets([early, late])


def test_another_replacement_in_the_middle_of_one_loses_nobody(tmp_path: Path):
    pods = pods_at(tmp_path, "a", "b")
    for key in (NEXT, THIRD, KEY):
        for pod in pods:
            pod.write(key)
            all_later(pods, SPREAD_S / 4)
            everybody_greets(pods)
    all_later(pods, 3 * SPREAD_S)
    assert all(len(pod.handoff._keys.current()) == 1 for pod in pods)


def test_a_rotation_in_steps_waits_for_no_clock(tmp_path: Path):
    """Who takes the old one out means it."""
    (pod,) = pods_at(tmp_path, "a")
    for step in ((KEY, NEXT), (NEXT, KEY), (NEXT,)):
        pod.write(*step)
        pod.later()
        assert len(pod.handoff._keys.current()) == len(step)
    assert Pod(tmp_path, "old", KEY).greets(pod.reply, "10.0.1.0")[0] == "proof"


def test_who_replaces_it_without_end_makes_no_list_without_end(tmp_path: Path):
    (pod,) = pods_at(tmp_path, "a")
    for number in range(3 * MOST_KEYS):
        pod.write(f"{number:064}")
        pod.later()
        assert len(pod.handoff._keys.current()) <= MOST_KEYS


def test_it_is_said_once_and_without_a_key(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (pod,) = pods_at(tmp_path, "a")
    pod.write(NEXT)
    for _ in range(5):
        pod.later()
    (said,) = [record.message for record in caplog.records if "replaced all at once" in record.message]
    assert "(for handoff)" in said
    assert KEY not in said
    assert NEXT not in said


def test_other_purposes_take_the_file_as_it_is(tmp_path: Path):
    file, now = tmp_path / "key", [0.0]
    file.write_text(f"{KEY}\n")
    keys = Keys(file, "n/f", SEED, lambda: now[0])
    keys.current()
    file.write_text(f"{NEXT}\n")
    for _ in range(2):
        now[0] += LOOK_S
        found = keys.current()
    assert len(found) == 1
    assert keys._lines == (NEXT.encode(),)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 400)), max_size=20))
def test_whatever_is_written_keys_are_few_and_end_as_the_file_says(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, float]]
):
    pod = Pod(tmp_path_factory.mktemp("keys"), "a", KEY)
    last = KEY
    for letter, wait_s in steps:
        last = letter * 64
        pod.write(last)
        pod.later()
        pod.later(wait_s)
        assert 1 <= len(pod.handoff._keys.current()) <= MOST_KEYS
        assert last.encode() in pod.handoff._keys._used
    pod.later(3 * SPREAD_S)
    pod.later()
    assert pod.handoff._keys._used == (last.encode(),)
