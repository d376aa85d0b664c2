"""Who is believed on the side channel: pods with the fleet's key, once per question, within their clocks' difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_wire.sidechannel import AskHot, HotBlock, Hottest, decode, encode
from fleet_worker.transfer import trust as trusting
from fleet_worker.transfer.keys import LOOK_S, MOST_NONCES, place
from fleet_worker.transfer.trust import SKEW_MS, Trust

KEY, NEXT = "k" * 64, "n" * 64
NOW_MS = 1_700_000_000_000
AT = ("10.0.0.1", 5600)
ASK = AskHot(
    call=1, version=1, compat="c", block_bytes=4096, block_tokens=16, weights="w", names="v1", reader="r", start=0, most_blocks=9
)
ANSWER = Hottest(call=1, blocks=(HotBlock(b"n", b"p", b"t", True),), reference=None, next=1, more=False)


class Pod:
    """One worker's trust, its file and its clocks."""

    def __init__(self, folder: Path, name: str, *keys: str, scope: str = "ns/f") -> None:
        self.file, self.now_ms, self.now = folder / name, NOW_MS, 0.0
        if keys:
            self.write(*keys)
        self.trust = Trust(self.file, scope, lambda: self.now_ms, lambda: self.now)

    def write(self, *keys: str) -> None:
        self.file.write_text("".join(f"{key}\n" for key in keys))

    def later(self) -> None:
        """Long enough for two looks at the file."""
        for _ in range(2):
            self.now += LOOK_S
            self.trust.current()

    def ask(self, at: tuple[str, int] = AT) -> AskHot:
        found = self.trust.asking(ASK, *at)
        assert found is not None
        return found

    def refuses(self, ask: AskHot) -> str:
        return self.trust.refusal(decoded(ask), *AT)


def decoded(ask: AskHot) -> AskHot:
    """As it comes over the wire."""
    found = decode(encode(ask))
    assert isinstance(found, AskHot)
    return found


@pytest.fixture
def pods(tmp_path: Path) -> tuple[Pod, Pod]:
    return Pod(tmp_path, "owner", KEY), Pod(tmp_path, "reader", KEY)


def test_one_of_the_fleet_is_believed_and_its_answer_is(pods: tuple[Pod, Pod]):
    owner, reader = pods
    asked = reader.ask()
    assert owner.refuses(asked) == ""
    answer = owner.trust.answering(ANSWER, asked.nonce)
    assert answer is not None
    assert reader.trust.believes(answer, asked.nonce)
    assert not reader.trust.believes(answer, b"another question"), "of another question"
    assert not reader.trust.believes(msgspec.structs.replace(answer, next=2), asked.nonce), "changed on its way"
    assert not reader.trust.believes(ANSWER, asked.nonce), "without any proof"
    assert reader.trust.refused["answer"] == 3


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "no proof": ({"proof": b""}, "missing"),
    "a short proof": ({"proof": b"x" * 31}, "bounds"),
    "a long proof": ({"proof": b"x" * 33}, "bounds"),
    "a wrong proof": ({"proof": b"x" * 32}, "wrong"),
    "another part": ({"start": 4}, "wrong"),
    "another time": ({"stamp_ms": NOW_MS + 1}, "wrong"),
    "another number": ({"nonce": b"x" * 16}, "wrong"),
    "a short number": ({"nonce": b"x"}, "bounds"),
    "a megabyte": ({"weights": "w" * 1_000_000}, "bounds"),
}


@pytest.mark.parametrize(("change", "why"), CHANGES.values(), ids=CHANGES.keys())
def test_a_question_that_was_changed_is_refused_and_counted(pods: tuple[Pod, Pod], change: dict[str, Any], why: str):
    owner, reader = pods
    assert owner.refuses(msgspec.structs.replace(reader.ask(), **change)) == why
    assert owner.trust.refused == {why: 1}


def test_no_hash_is_made_of_what_is_out_of_bounds(pods: tuple[Pod, Pod], monkeypatch: pytest.MonkeyPatch):
    owner, reader = pods
    asked = reader.ask()
    monkeypatch.setattr(trusting, "is_proven", lambda *_: pytest.fail("bounded work before proof"))
    for change, why in CHANGES.values():
        if why in ("missing", "bounds"):
            assert owner.refuses(msgspec.structs.replace(asked, **change)) == why


@pytest.mark.parametrize(("key", "scope"), [(NEXT, "ns/f"), (KEY, "ns/g"), (KEY, "other/f")])
def test_another_key_or_another_fleet_is_a_stranger(tmp_path: Path, key: str, scope: str):
    assert Pod(tmp_path, "owner", KEY).refuses(Pod(tmp_path, "stranger", key, scope=scope).ask()) == "wrong"


def test_a_question_is_answered_once_and_by_whom_it_is_for(pods: tuple[Pod, Pod]):
    owner, reader = pods
    asked = reader.ask()
    assert [owner.refuses(asked), owner.refuses(asked)] == ["", "again"]
    assert owner.refuses(reader.ask(("10.0.0.2", 5600))) == "wrong"
    assert owner.refuses(reader.ask(("10.0.0.1", 5601))) == "wrong"


@pytest.mark.parametrize(
    ("late_ms", "why"), [(0, ""), (SKEW_MS, ""), (SKEW_MS + 1, "clock"), (-SKEW_MS, ""), (-SKEW_MS - 1, "clock")]
)
def test_an_old_question_is_refused(pods: tuple[Pod, Pod], late_ms: int, why: str):
    owner, reader = pods
    asked = reader.ask()
    owner.now_ms += late_ms
    assert owner.refuses(asked) == why


def test_a_clock_that_was_a_day_ahead_for_a_moment_closes_nobody_for_a_day(pods: tuple[Pod, Pod]):
    """One number that is kept for a day kept all after it, too: with 8,192 of them nobody was given anything for the rest of it.
    And it is kept: that question is not believed again when its day comes."""
    owner, reader = pods
    reader.now_ms = owner.now_ms = NOW_MS + 86_400_000
    early = reader.ask()
    assert owner.refuses(early) == ""
    reader.now_ms = owner.now_ms = NOW_MS
    for number in range(MOST_NONCES + 600):
        if number % 30 == 0:
            reader.now_ms = owner.now_ms = owner.now_ms + 1_000
            reader.now = owner.now = owner.now + 1.0
        assert owner.refuses(reader.ask()) == "", number
    owner.now_ms = NOW_MS + 86_400_000
    assert owner.refuses(early) == "again"


@pytest.mark.parametrize(("late_ms", "words"), [(45_000, "45 s behind"), (-3_600_000, "3600 s ahead")])
def test_a_clock_that_is_wrong_is_told_by_how_much(
    pods: tuple[Pod, Pod], caplog: pytest.LogCaptureFixture, late_ms: int, words: str
):
    """On both sides it was "no proof of the fleet's key": whoever was on call looked for a stranger, or at the Secret. A stranger
    hears nothing of our clock."""
    owner, reader = pods
    asked = reader.ask()
    owner.now_ms += late_ms
    assert owner.refuses(asked) == "clock"
    assert f"the clock of who asks is {words}, more than 30 s" in owner.trust.words("clock", asked)
    assert words in caplog.text
    stranger = msgspec.structs.replace(asked, proof=b"x" * 32)
    assert owner.trust.words(owner.refuses(stranger), stranger) == "no proof of the fleet's key (wrong)"


@given(st.lists(st.tuples(st.integers(-SKEW_MS, SKEW_MS), st.integers(0, SKEW_MS)), max_size=30))
def test_no_question_is_believed_twice_however_time_goes_on(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]]
):
    """(by how much the clock of the one that asks is off, what passes then)."""
    folder = tmp_path_factory.mktemp("keys")
    owner, reader, asked = Pod(folder, "owner", KEY), Pod(folder, "reader", KEY), list[AskHot]()
    for off_ms, passes_ms in steps:
        reader.now_ms = owner.now_ms + off_ms
        asked.append(reader.ask())
        assert owner.refuses(asked[-1]) == ""
        owner.now_ms += passes_ms
        assert all(owner.refuses(old) in ("again", "clock") for old in asked)


def test_what_is_remembered_is_bounded(pods: tuple[Pod, Pod]):
    owner, reader = pods
    for number in range(MOST_NONCES):
        assert owner.trust._once.take(number.to_bytes(16, "big"), NOW_MS, NOW_MS + 2 * SKEW_MS) == ""
    assert owner.refuses(reader.ask()) == "full"
    owner.now_ms = reader.now_ms = NOW_MS + 2 * SKEW_MS + 1
    assert owner.refuses(reader.ask()) == ""
    assert len(owner.trust._once) == 1


def test_without_a_key_nobody_is_answered_and_nobody_is_asked(tmp_path: Path, pods: tuple[Pod, Pod]):
    bare = Pod(tmp_path, "bare")
    assert bare.refuses(pods[1].ask()) == "no_key"
    assert bare.trust.asking(ASK, *AT) is None
    assert bare.trust.answering(ANSWER, b"n" * 16) is None
    assert Trust(None, "ns/f").refusal(pods[1].ask(), *AT) == "no_key"
    bare.write(KEY)
    bare.now += LOOK_S
    assert bare.refuses(pods[1].ask()) == "", "the key came later"


def test_a_key_is_changed_while_everybody_is_answered(tmp_path: Path):
    """One pod after the other sees each step: at no moment do two of them not believe each other."""
    pods = [Pod(tmp_path, name, KEY) for name in "abc"]
    for step in ((KEY, NEXT), (NEXT, KEY), (NEXT,)):
        for changing in pods:
            changing.write(*step)
            changing.later()
            for one in pods:
                for other in pods:
                    asked = one.ask()
                    assert other.refuses(asked) == ""
                    answer = other.trust.answering(ANSWER, asked.nonce)
                    assert answer is not None
                    assert one.trust.believes(answer, asked.nonce)
    old = Pod(tmp_path, "old", KEY)
    assert pods[0].refuses(old.ask()) == "wrong", "the old key is nobody's"


def test_nothing_of_a_key_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    owner = Pod(tmp_path, "owner", KEY)
    for change, _ in CHANGES.values():
        owner.refuses(msgspec.structs.replace(Pod(tmp_path, "reader", KEY).ask(), **change))
    owner.file.write_text("secret-but-short\n")
    owner.later()
    assert len(caplog.records) >= 4
    assert not any(word in caplog.text for word in ("kkk", "secret-but", *(key.hex() for key in owner.trust.current())))


@given(
    st.builds(
        AskHot, call=st.integers(-(2**63), 2**63 - 1), version=st.integers(0, 3), compat=st.text(max_size=9),
        block_bytes=st.integers(0, 9), block_tokens=st.integers(0, 9), weights=st.text(max_size=9), names=st.text(max_size=9),
        reader=st.text(max_size=300), start=st.integers(-9, 9), most_blocks=st.integers(-9, 9),
        stamp_ms=st.integers(-(2**63), 2**63 - 1), nonce=st.binary(max_size=20), proof=st.binary(max_size=40),
    )
)  # fmt: skip
def test_any_question_is_refused_or_answered(tmp_path_factory: pytest.TempPathFactory, ask: AskHot):
    try:
        frame = encode(ask)
    except UnicodeEncodeError:
        return  # no frame holds it
    found = decode(frame)
    assert isinstance(found, AskHot)
    assert Pod(tmp_path_factory.mktemp("keys"), "owner", KEY).trust.refusal(found, *AT) in ("missing", "bounds", "wrong")


@pytest.mark.parametrize(
    ("host", "alike"),
    [("10.0.0.1", "10.0.0.1"), ("[fd00::1]", "FD00:0:0::1"), ("Worker-0", "worker-0"), ("fd00::1", "[fd00::1]")],
)
def test_an_address_has_one_spelling(host: str, alike: str):
    assert place(host, 1) == place(alike, 1) != place(host, 2)
