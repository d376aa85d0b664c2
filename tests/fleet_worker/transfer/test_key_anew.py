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
    ("now", "expected"),
    [(0.0, (*OLD, *NEW)), (179.9, (*OLD, *NEW)), (180.0, (*NEW, *OLD)), (359.9, (*NEW, *OLD)), (360.0, NEW), (1e9, NEW)],
)
def test_the_steps_of_a_rotation_by_the_clock(now: float, expected: tuple[bytes, ...]):
    assert overlapping({b"old": 360.0}, NEW, 0.0, now, 180.0) == expected
    assert overlapping({}, NEW, 0.0, now, 180.0) == NEW


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


LIVES: dict[str, tuple[str, ...]] = {
    "late": (KEY,),
    "missed the second": (KEY, THIRD),
    "late with the third": (KEY, NEXT),
    "saw all": (KEY, NEXT, THIRD),
    "began with the second": (NEXT,),
    "began with the second, saw the third": (NEXT, THIRD),
    "began with the third": (THIRD,),
}
"""What a pod has seen of a key that was replaced twice within minutes."""
APART = {
    ("late", "began with the second"), ("late", "began with the second, saw the third"), ("late", "began with the third"),
    ("missed the second", "began with the second"), ("late with the third", "began with the third"),
    ("began with the second", "began with the third"),
}  # fmt: skip
"""Who has no key in common with whom, until a kubelet brings the file of now to the one that has not seen it."""


def life(folder: Path, name: str, host: str) -> Pod:
    keys = LIVES[name]
    pod = Pod(folder, f"{name}-{host}", keys[0], host=host)
    for key in keys[1:]:
        pod.write(key)
        pod.later()
    return pod


@pytest.mark.parametrize("later_s", [0.0, 0.9 * SPREAD_S, 1.5 * SPREAD_S])
@pytest.mark.parametrize(("owner", "reader"), list(itertools.product(LIVES, LIVES)))
def test_whoever_have_a_key_in_common_find_it(tmp_path: Path, owner: str, reader: str, later_s: float):
    """A reader tried two of its keys: who had seen three, and an owner that knew the middle one alone, moved no KV."""
    theirs, ours = life(tmp_path, owner, "10.0.1.1"), life(tmp_path, reader, "10.0.1.2")
    for pod in (theirs, ours):
        pod.later(later_s)
    apart = (owner, reader) in APART or (reader, owner) in APART
    assert apart is set(LIVES[owner]).isdisjoint(LIVES[reader])
    assert ours.greets(theirs.reply, "10.0.1.1")[0] == ("proof" if apart else "welcome")


@pytest.mark.parametrize("every_s", [60.0, 200.0, 350.0])
def test_a_key_is_over_six_minutes_after_it_was_replaced_however_often_others_are(tmp_path: Path, every_s: float):
    """Each replacement gave all of before its own time once more: one that leaked was accepted for as long as they went on."""
    (pod,) = pods_at(tmp_path, "a")
    leaked = Pod(tmp_path, "leaked", KEY)
    begun = pod.now
    for number in range(8):
        pod.write(f"{number:064}")
        while (since_s := pod.now - begun) < (number + 1) * every_s:
            if since_s < 2 * SPREAD_S:
                assert leaked.greets(pod.reply, "10.0.1.0")[0] == "welcome", since_s
            elif since_s > 2 * SPREAD_S + 10.0:
                assert leaked.greets(pod.reply, "10.0.1.0")[0] == "proof", since_s
            pod.later(10.0)


def test_one_that_is_put_back_stays(tmp_path: Path):
    one, other = pods_at(tmp_path, "a", "b")
    for key in (NEXT, KEY):
        one.write(key)
        one.later(20.0)
    for _ in range(9):
        all_later([one, other], SPREAD_S / 3)
        everybody_greets([one, other])
    assert one.handoff._keys._used == (KEY.encode(),)


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
