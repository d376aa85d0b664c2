"""Who is greeted, and whose welcome is believed: pods with the fleet's key, once per challenge, by no clock but the owner's."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_wire.sidechannel import (
    PROTOCOL_VERSION,
    PROVEN_VERSION,
    Challenge,
    Granted,
    Hello,
    Message,
    Prove,
    Refused,
    Welcome,
    decode,
    encode,
)
from fleet_worker.transfer import handoff as handing
from fleet_worker.transfer.base import KvReferenceError, KvTransferError
from fleet_worker.transfer.greeting import Greeter, refusal_error
from fleet_worker.transfer.handoff import CHALLENGE_BYTES, CHALLENGE_S, GRACE_S, Handoff
from fleet_worker.transfer.keys import LOOK_S, MOST_NONCES
from fleet_worker.transfer.owner import Owner, TransferSettings
from fleet_worker.transfer.peers import Answer, Peer
from tests.fleet_worker.transfer.older import DECODER, OldHello, OldWelcome, Reply, old_owner, old_reader
from tests.fleet_worker.transfer.reading import POOL

KEY, NEXT = "k" * 64, "n" * 64
HOST, PORT, COMPAT = "10.0.0.1", 5600, "same"
HELLO = Hello(call=1, version=PROVEN_VERSION, compat=COMPAT, block_bytes=POOL.block_bytes, block_tokens=POOL.block_tokens)


class Pod:
    """One worker: its file, its clock, both halves of a hand-off."""

    def __init__(
        self, folder: Path, name: str, *keys: str, required: bool = True, host: str = HOST, port: int = PORT, scope: str = "ns/f",
        compat: str = COMPAT,
    ) -> None:  # fmt: skip
        self.file, self.now = folder / name, 1_000.0
        if keys:
            self.write(*keys)
        self.settings = TransferSettings(host, port, compat)
        self.handoff = Handoff(self.file, scope, is_required=required, clock=lambda: self.now)
        self.handoff.follow(self.now)
        self.owner = Owner(self.settings, POOL, name, b"metadata", self.handoff)

    def write(self, *keys: str) -> None:
        self.file.write_text("".join(f"{key}\n" for key in keys))

    def later(self, seconds: float = 2 * LOOK_S) -> None:
        """Long enough for two looks at the file."""
        for _ in range(2):
            self.now += seconds / 2
            self.handoff.follow(self.now)

    def reply(self, frame: bytes) -> bytes | None:
        """As it answers on the side channel."""
        return encode(self.owner.reply(decode(frame), self.now))

    def told(self, message: Message) -> Message:
        frame = self.reply(encode(message))
        assert frame is not None
        return decode(frame)

    def challenge(self) -> bytes:
        found = self.told(HELLO)
        assert isinstance(found, Challenge)
        return found.challenge

    def proves(self, challenge: bytes, host: str = HOST, port: int = PORT) -> Prove:
        bare = Prove(
            call=1, version=PROVEN_VERSION, compat=COMPAT, block_bytes=POOL.block_bytes, block_tokens=POOL.block_tokens,
            challenge=challenge, nonce=b"",
        )  # fmt: skip
        return self.handoff.proving(bare, host, port)

    def greets(self, reply: Reply, host: str = HOST, port: int = PORT) -> tuple[str, list[Message]]:
        """(welcome, or why not; what was said to the owner)."""
        line = Line(reply)
        answer = self._heard(line, host, port)
        return ("welcome" if isinstance(answer, Welcome) else getattr(answer, "reason", "other")), line.said

    def hears(self, reply: Reply) -> Answer | KvTransferError:
        """What its greeting ended with."""
        return self._heard(Line(reply), HOST, PORT)

    def _heard(self, line: Line, host: str, port: int) -> Answer | KvTransferError:
        ended = list[Answer | KvTransferError]()
        peer = Peer(host, port, None)  # type: ignore[arg-type]
        Greeter(self.settings, POOL, line, self.handoff).greet(peer, ended.append, math.inf)  # type: ignore[arg-type]
        (answer,) = ended
        return answer


class Line:
    """A side channel on which every question is answered at once; what an owner drops is one that it did not answer in time."""

    def __init__(self, reply: Reply) -> None:
        self._reply, self.said = reply, list[Message]()

    def call(self, peer: Peer, make: Any, now: float, on_answer: Any, until: float) -> None:
        self.said.append(make(len(self.said) + 1))
        frame = self._reply(encode(self.said[-1]))
        on_answer(decode(frame) if frame is not None else KvTransferError("timeout", "nothing came"))


@pytest.fixture
def pods(tmp_path: Path) -> tuple[Pod, Pod]:
    return Pod(tmp_path, "owner", KEY), Pod(tmp_path, "reader", KEY)


# -- who moves KV with whom --------------------------------------------------------------------------------------------------
KINDS: dict[str, dict[str, Any]] = {
    "no key": {"keys": ()},
    "key": {"keys": (KEY,), "required": False},
    "another key": {"keys": (NEXT,), "required": False},
    "strict": {"keys": (KEY,)},
    "strict, another": {"keys": (NEXT,)},
    "strict, another fleet": {"keys": (KEY,), "scope": "ns/g"},
}
READERS = ("old", "no key", "key", "another key", "strict", "strict, another", "strict, another fleet")
PAIRS = {  # what each of READERS has of an owner
    "old": ("welcome", "welcome", "welcome", "welcome", "unproven", "unproven", "unproven"),
    "no key": ("welcome", "welcome", "welcome", "welcome", "unproven", "unproven", "unproven"),
    "key": ("welcome", "welcome", "welcome", "welcome", "welcome", "proof", "proof"),
    "another key": ("welcome", "welcome", "welcome", "welcome", "proof", "welcome", "proof"),
    "strict": ("peer", "proof", "welcome", "proof", "welcome", "proof", "proof"),
    "strict, another": ("peer", "proof", "proof", "welcome", "proof", "welcome", "proof"),
}


def pod_of(folder: Path, name: str, kind: str) -> Pod:
    given = dict(KINDS[kind])
    return Pod(folder, name, *given.pop("keys"), **given)


@pytest.mark.parametrize(("owner", "reader"), list(itertools.product(PAIRS, READERS)))
def test_who_moves_kv_with_whom(tmp_path: Path, owner: str, reader: str):
    """Nobody waits to a deadline, and no router is told that its client is to blame (400), whoever is older.
    Who is strict, as owner or as reader, has none that did not prove the key."""
    welcome = OldWelcome(
        call=0, engine_id="e", epoch="x", agent=b"m", base_address=0, block_bytes=POOL.block_bytes, num_blocks=64
    )
    reply = old_owner(welcome, COMPAT, POOL.block_tokens) if owner == "old" else pod_of(tmp_path, "owner", owner).reply
    if reader == "old":
        found = old_reader(reply, COMPAT, POOL.block_bytes, POOL.block_tokens)
    else:
        found, said = pod_of(tmp_path, "reader", reader).greets(reply)
        assert len(said) <= 3
    assert found == PAIRS[owner][READERS.index(reader)]


def test_a_pair_of_one_fleet_is_proven_both_ways_and_costs_two_questions(pods: tuple[Pod, Pod]):
    owner, reader = pods
    found, said = reader.greets(owner.reply)
    assert (found, [type(one) for one in said]) == ("welcome", [Hello, Prove])
    assert (owner.handoff.refused, reader.handoff.refused) == ({}, {})
    assert owner.handoff.is_guarded


def test_without_a_key_the_bytes_are_those_of_before(tmp_path: Path):
    """Both ways: an owner that is older reads the greeting, and a reader that is older the welcome."""
    bare = Pod(tmp_path, "bare")
    _, (said,) = bare.greets(bare.reply)
    assert isinstance(DECODER.decode(encode(said)), OldHello)
    frame = bare.reply(encode(said))
    assert isinstance(DECODER.decode(frame or b""), OldWelcome)
    assert b"proof" not in (frame or b"")
    assert not bare.handoff.is_guarded


def test_an_owner_says_nothing_of_itself_before_the_proof(pods: tuple[Pod, Pod], tmp_path: Path):
    """A wrong guess of the compatibility hash was told the right one."""
    owner, _ = pods
    for version in (0, PROTOCOL_VERSION, PROVEN_VERSION, 3):
        answer = owner.told(msgspec.structs.replace(HELLO, version=version, compat="guess"))
        assert COMPAT not in str(answer)
        assert "metadata" not in str(answer)
    found, _ = Pod(tmp_path, "misfit", KEY, compat="other", required=False).greets(owner.reply)
    assert found == "incompatible", "who proves it is told"


@pytest.mark.parametrize(
    ("reason", "kind", "words"),
    [
        ("proof", KvTransferError, "refused the pairing: m"),
        ("stale", KvTransferError, "refused the pairing: m"),
        ("unproven", KvTransferError, "at 10.0.0.1 is not believed: m"),
        ("incompatible", KvReferenceError, "refused the pairing: m"),
    ],
)
def test_a_pull_says_what_failed(reason: str, kind: type[Exception], words: str):
    """503 where another prefill may do: the router computes it anew."""
    peer = Peer(HOST, PORT, None)  # type: ignore[arg-type]
    error = refusal_error(peer, Refused(call=1, reason=reason, message="m"))
    assert (type(error), error.reason) == (kind, reason)
    assert words in str(error)


# -- what is refused ---------------------------------------------------------------------------------------------------------
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "no proof": ({"proof": b""}, "bounds"),
    "a long proof": ({"proof": b"x" * 33}, "bounds"),
    "a wrong proof": ({"proof": b"x" * 32}, "wrong"),
    "another hash": ({"compat": "other"}, "wrong"),
    "a megabyte": ({"compat": "c" * 1_000_000}, "bounds"),
    "other blocks": ({"block_bytes": 1}, "wrong"),
    "another call": ({"call": 2}, "wrong"),
    "another number": ({"nonce": b"x" * 16}, "wrong"),
    "a short number": ({"nonce": b"x"}, "bounds"),
    "no challenge": ({"challenge": b""}, "bounds"),
    "a made-up challenge": ({"challenge": b"x" * CHALLENGE_BYTES}, "stale"),
    "a megabyte of challenge": ({"challenge": b"x" * 1_000_000}, "bounds"),
}


@pytest.mark.parametrize(("change", "why"), CHANGES.values(), ids=CHANGES.keys())
def test_a_greeting_that_was_changed_is_refused_and_counted(pods: tuple[Pod, Pod], change: dict[str, Any], why: str):
    owner, reader = pods
    answer = owner.told(msgspec.structs.replace(reader.proves(owner.challenge()), **change))
    assert isinstance(answer, Refused)
    assert answer.message == f"no proof of the fleet's key ({why})"
    assert answer.reason == ("stale" if why == "stale" else "proof")
    assert owner.handoff.refused == {why: 1}


def test_no_hash_is_made_of_what_is_out_of_bounds(pods: tuple[Pod, Pod], monkeypatch: pytest.MonkeyPatch):
    owner, reader = pods
    greeting = reader.proves(owner.challenge())
    monkeypatch.setattr(handing, "is_proven", lambda *_: pytest.fail("work before bounds"))
    for change, why in CHANGES.values():
        if why == "bounds":
            assert owner.handoff.refusal(msgspec.structs.replace(greeting, **change), HOST, PORT) == why


@pytest.mark.parametrize("at", [("10.0.0.2", PORT), (HOST, 5601)])
def test_a_challenge_is_good_once_and_at_whom_it_is_from(tmp_path: Path, pods: tuple[Pod, Pod], at: tuple[str, int]):
    owner, reader = pods
    other = Pod(tmp_path, "other", KEY, host=at[0], port=at[1])
    greeting = reader.proves(owner.challenge())
    assert isinstance(owner.told(greeting), Welcome)
    assert owner.told(greeting) == Refused(call=1, reason="proof", message="no proof of the fleet's key (again)")
    anew = reader.proves(greeting.challenge)
    assert owner.told(anew) == Refused(call=1, reason="proof", message="no proof of the fleet's key (again)"), "another number"
    assert isinstance(other.told(reader.proves(owner.challenge(), *at)), Refused), "another's challenge"
    assert isinstance(owner.told(reader.proves(owner.challenge(), *at)), Refused), "said to another"
    passed_on = reader.proves(other.challenge(), HOST, PORT)
    assert isinstance(other.told(passed_on), Refused), "who asks for a proof in another's name has none for itself"


@pytest.mark.parametrize(("late_s", "why"), [(0.0, ""), (CHALLENGE_S, ""), (CHALLENGE_S + 0.01, "stale")])
def test_an_old_challenge_is_good_no_more(pods: tuple[Pod, Pod], late_s: float, why: str):
    owner, reader = pods
    greeting = reader.proves(owner.challenge())
    owner.now += late_s
    assert owner.handoff.refusal(greeting, HOST, PORT) == why


def test_clocks_that_are_years_apart_keep_nobody_from_kv(pods: tuple[Pod, Pod]):
    """A node without NTP would have stopped every hand-off: no time of another machine is looked at, nor that of a wall."""
    owner, reader = pods
    for apart_s in (-1e9, 1e9, 5.0):
        reader.now = owner.now + apart_s
        assert reader.greets(owner.reply)[0] == "welcome"
    names = {node.attr for node in ast.walk(ast.parse(inspect.getsource(handing))) if isinstance(node, ast.Attribute)}
    assert names.isdisjoint({"time_ns", "now", "utcnow"})


@pytest.mark.parametrize(("lives", "found"), [((0, 1, 1, 1), "welcome"), ((0, 1, 1, 2), "stale")])
def test_an_owner_that_began_anew_between_challenge_and_proof_is_greeted_once_more(
    tmp_path: Path, pods: tuple[Pod, Pod], lives: tuple[int, ...], found: str
):
    """`lives`: which one of it each question comes to."""
    owners, at = [pods[0], Pod(tmp_path, "owner", KEY), Pod(tmp_path, "owner", KEY)], iter(lives)

    def reply(frame: bytes) -> bytes | None:
        return owners[next(at)].reply(frame)

    assert pods[1].greets(reply)[0] == found


def test_a_welcome_without_a_proof_is_not_believed(pods: tuple[Pod, Pod], tmp_path: Path):
    """Who took the address of a worker that has gone, and whatever it says: it gave digests of its own with its KV."""
    owner, reader = pods
    bare = msgspec.convert(msgspec.to_builtins(Pod(tmp_path, "bare", required=False).told(HELLO)), Welcome)
    greeting = reader.proves(owner.challenge())
    right = owner.told(greeting)
    assert isinstance(right, Welcome)
    assert reader.handoff.believes(right, greeting)
    other = reader.proves(owner.challenge())
    for wrong, to in ((right, other), (bare, greeting), (msgspec.structs.replace(right, base_address=1), greeting)):
        assert not reader.handoff.believes(wrong, to)
    assert reader.handoff.refused == {"answer": 3}
    for answers in (
        [bare],
        [Challenge(call=1, challenge=b"c" * CHALLENGE_BYTES), bare],
        [Refused(call=1, reason="incompatible")],
    ):
        said = iter(answers)
        assert reader.greets(lambda _, said=said: encode(next(said)))[0] == "unproven"  # type: ignore[misc]


# -- keys that come, change and go -------------------------------------------------------------------------------------------
def test_a_key_is_changed_while_everybody_is_welcome(tmp_path: Path):
    """One pod after the other sees each step: at no moment do two of them not greet each other."""
    pods = [Pod(tmp_path, name, KEY, host=f"10.0.0.{at}") for at, name in enumerate("abc")]
    for step in ((KEY, NEXT), (NEXT, KEY), (NEXT,)):
        for changing in pods:
            changing.write(*step)
            changing.later()
            for one, other in itertools.product(pods, pods):
                found, said = one.greets(other.reply, other.settings.host)
                assert (found, len(said)) == ("welcome", 2)
    old = Pod(tmp_path, "old", KEY)
    assert old.greets(pods[0].reply, "10.0.0.0")[0] == "proof", "the old key is nobody's"


def test_a_key_that_comes_later_makes_strict_once_every_pod_can_have_it(tmp_path: Path):
    """Kubelets bring it one after the other: until then pods with and without it go on, both ways; then nobody is without."""
    late, later = Pod(tmp_path, "a"), Pod(tmp_path, "b")
    late.write(KEY)
    late.later()
    assert not late.handoff.is_guarded
    assert (late.greets(later.reply)[0], later.greets(late.reply)[0]) == ("welcome", "welcome")
    stranger = Pod(tmp_path, "c")
    late.later(GRACE_S)
    assert late.handoff.is_guarded
    assert (stranger.greets(late.reply)[0], late.greets(stranger.reply)[0]) == ("proof", "unproven")
    later.write(KEY)
    later.later()
    assert (late.greets(later.reply)[0], later.greets(late.reply)[0]) == ("welcome", "welcome")


def test_a_key_that_is_taken_away_opens_nothing(pods: tuple[Pod, Pod], tmp_path: Path):
    """The last good one counts, for as long as the worker lives."""
    owner, reader = pods
    owner.file.unlink()
    owner.later()
    assert owner.handoff.is_guarded
    assert reader.greets(owner.reply)[0] == "welcome"
    assert Pod(tmp_path, "stranger").greets(owner.reply)[0] == "proof"
    owner.write(KEY)
    owner.later()
    assert owner.handoff.is_guarded, "no grace for one that comes back"


def test_without_the_operators_word_a_key_asks_nobody(tmp_path: Path):
    owner = Pod(tmp_path, "owner", KEY, required=False)
    assert not owner.handoff.is_guarded
    assert Handoff(None, "ns/f", is_required=True).is_strict() is False, "a fleet without a key serves"


def test_nothing_of_a_key_is_said(tmp_path: Path, pods: tuple[Pod, Pod], caplog: pytest.LogCaptureFixture):
    owner, reader = pods
    said = []
    for change, _ in CHANGES.values():
        said.append(owner.told(msgspec.structs.replace(reader.proves(owner.challenge()), **change)))
    owner.file.write_text("secret-but-short\n")
    owner.later()
    text = f"{caplog.text}{said}"
    assert len(caplog.records) >= 3
    assert not any(word in text for word in ("kkk", "secret-but", *(key.hex() for key in owner.handoff._keys.current())))


# -- whatever comes ----------------------------------------------------------------------------------------------------------
def test_of_greetings_that_prove_nothing_nothing_is_kept(pods: tuple[Pod, Pod]):
    """Without end, and without a key: no table of open challenges is there to be filled, and others are greeted all the while."""
    owner, reader = pods
    held = owner.challenge()
    for _ in range(20_000):
        owner.challenge()
        assert owner.told(msgspec.structs.replace(HELLO, version=PROTOCOL_VERSION)) == Granted(call=1)
    assert len(owner.handoff._once) == 0
    assert set(owner.handoff.refused) == {"missing"}
    assert isinstance(owner.told(reader.proves(held)), Welcome)
    assert len(owner.handoff._once) == 1


def test_what_is_remembered_is_bounded(pods: tuple[Pod, Pod]):
    owner, reader = pods
    for number in range(MOST_NONCES):
        assert (
            owner.handoff._once.take(number.to_bytes(24, "big"), round(owner.now * 1_000), round(owner.now * 1_000) + 30_000)
            == ""
        )
    assert owner.handoff.refusal(reader.proves(owner.challenge()), HOST, PORT) == "full"
    owner.now += CHALLENGE_S + 1
    assert owner.handoff.refusal(reader.proves(owner.challenge()), HOST, PORT) == ""
    assert len(owner.handoff._once) == 1


TRIES = st.lists(
    st.one_of(
        st.tuples(st.just("hello"), st.integers(-2, 4)),
        st.tuples(st.just("greet"), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 40)),
        st.tuples(
            st.just("forge"),
            st.tuples(*(st.integers(0, 50) for _ in range(3)), st.sampled_from(["", "challenge", "nonce", "proof", "compat"])),
        ),
    ),
    max_size=30,
)


@given(TRIES)
def test_who_has_no_key_is_never_welcome_whatever_was_overheard(tmp_path_factory: pytest.TempPathFactory, tries: list[Any]):
    """It hears every greeting of others, at this owner and at another one, and makes its own of the parts."""
    folder = tmp_path_factory.mktemp("keys")
    owner, other = Pod(folder, "owner", KEY), Pod(folder, "other", KEY, host="10.0.0.2")
    reader, heard = Pod(folder, "reader", KEY), [Pod(folder, "other-fleet", KEY, scope="x/y").proves(b"c" * CHALLENGE_BYTES)]
    challenges = [other.challenge()]
    for what, about in tries:
        answer: Message | None = None
        if what == "hello":
            answer = owner.told(msgspec.structs.replace(HELLO, version=about))
            challenges += [answer.challenge] if isinstance(answer, Challenge) else []
        elif what == "wait":
            owner.now += about
        elif what == "greet":
            for at in (owner, other):
                found, said = reader.greets(at.reply, at.settings.host)
                assert found == "welcome"
                heard += [one for one in said if isinstance(one, Prove)]
        else:
            first, second, third, part = about
            forged, donor = heard[first % len(heard)], heard[second % len(heard)]
            change = {part: getattr(donor, part)} if part else {}
            if part == "challenge":
                change = {part: challenges[third % len(challenges)]}
            answer = owner.told(msgspec.structs.replace(forged, **change))
        assert not isinstance(answer, Welcome)


@given(
    st.lists(
        st.one_of(
            st.builds(Challenge, call=st.integers(0, 9), challenge=st.binary(max_size=80)),
            st.builds(Challenge, call=st.integers(0, 9), challenge=st.binary(min_size=CHALLENGE_BYTES, max_size=CHALLENGE_BYTES)),
            st.builds(Refused, call=st.integers(0, 9), reason=st.sampled_from(["incompatible", "proof", "stale", "x"])),
            st.builds(Granted, call=st.integers(0, 9)),
            st.builds(
                Welcome, call=st.integers(0, 9), engine_id=st.just("e"), epoch=st.just("x"), agent=st.just(b""),
                base_address=st.just(0), block_bytes=st.just(4096), num_blocks=st.just(64), proof=st.binary(max_size=40),
            ),
            st.none(),
        ),
        min_size=1, max_size=8,
    )
)  # fmt: skip
def test_a_strict_reader_believes_nobody_without_the_key_and_ends_once(
    tmp_path_factory: pytest.TempPathFactory, answers: list[Message | None]
):
    reader, said = Pod(tmp_path_factory.mktemp("keys"), "reader", KEY), itertools.cycle(answers)

    def reply(_: bytes) -> bytes | None:
        answer = next(said)
        return None if answer is None else encode(answer)

    found, asked = reader.greets(reply)
    assert found != "welcome"
    assert len(asked) <= 4


@given(
    st.builds(
        Prove, call=st.integers(-(2**63), 2**63 - 1), version=st.integers(0, 3), compat=st.text(max_size=300),
        block_bytes=st.integers(0, 9), block_tokens=st.integers(0, 9), challenge=st.binary(max_size=80),
        nonce=st.binary(max_size=20), proof=st.binary(max_size=40),
    )
)  # fmt: skip
def test_any_greeting_is_refused(tmp_path_factory: pytest.TempPathFactory, greeting: Prove):
    owner = Pod(tmp_path_factory.mktemp("keys"), "owner", KEY)
    assert owner.handoff.refusal(greeting, HOST, PORT) in ("bounds", "stale")
