"""Greetings with the fleet's key over two real NIXL agents and real sockets: what a pull costs, keys that change meanwhile."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from fleet_wire.sidechannel import PROVEN_VERSION, Challenge, Confirm, Hello, Message, Prove, Refused, Renew, decode, encode
from fleet_worker.transfer import handoff as handing
from fleet_worker.transfer import keys as keeping
from fleet_worker.transfer.handoff import CHALLENGE_BYTES
from tests.fleet_worker.transfer.test_nixl import BLOCK_BYTES, Side, error_reason, wait

KEY, NEXT = "k" * 64, "n" * 64


def written(folder: Path, name: str, *keys: str) -> Path:
    found = folder / name
    found.write_text("".join(f"{key}\n" for key in keys))
    return found


@contextmanager
def sides(host: int, *files: Path | None) -> Iterator[list[Side]]:
    with ExitStack() as stack:
        made = []
        for at, file in enumerate(files):
            one = Side(f"127.77.{host}.{at + 1}", peer_key=file, scope="n/f", proof_required=True)
            stack.callback(one.connector.close)
            made.append(one)
        yield made


def pulled(owner: Side, reader: Side, name: str) -> str:
    """What the pull failed with; empty: its bytes are here."""
    at = hash(name) % 60
    reader.connector.fetch(name, owner.grant(name, [at, at + 1], 32), 0, [at + 2, at + 1])
    result = reader.finished()
    if result.error is not None:
        return error_reason(result)
    assert torch.equal(reader.memory[[at + 2, at + 1]], owner.memory[[at, at + 1]])
    return ""


def questions(owner: Side) -> Counter[type[Message]]:
    """What it is asked from now on, by kind."""
    found, reply = Counter[type[Message]](), owner.connector._owner.reply

    def counted(asked: Message, now: float) -> Any:
        found[type(asked)] += 1
        return reply(asked, now)

    owner.connector._owner.reply = counted  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("keyed", [True, False], ids=["key", "none"])
def test_a_pair_greets_once_and_a_pull_costs_what_it_costs_without_a_key(tmp_path: Path, keyed: bool):
    file = written(tmp_path, "key", KEY) if keyed else None
    with sides(30, file, file) as (owner, reader):
        assert wait(lambda: owner.connector.is_guarded() is keyed)
        found = questions(owner)
        for number in range(20):
            assert pulled(owner, reader, f"r{number}") == ""
        greetings = {Hello: 1, Prove: 1} if keyed else {Hello: 1}
        assert found == {**greetings, Renew: 20, Confirm: 20}
        assert sum(owner.connector.strangers().values()) == sum(reader.connector.strangers().values()) == 0


def test_who_has_no_key_or_another_one_is_told_at_once(tmp_path: Path):
    mine, other = written(tmp_path, "mine", KEY), written(tmp_path, "other", NEXT)
    with sides(31, mine, None, other, mine) as (owner, bare, stranger, mate):
        begun = time.monotonic()
        assert pulled(owner, bare, "a") == pulled(owner, stranger, "b") == "proof"
        assert (pulled(bare, mate, "c"), pulled(stranger, mate, "d")) == ("unproven", "proof")
        assert time.monotonic() - begun < 4.0, "no deadline of 5 s ran out"
        assert pulled(owner, mate, "e") == ""
        counts = owner.connector.strangers()
        assert (counts["missing"], counts["wrong"]) == (1, 1)
        assert mate.connector.strangers()["answer"] == 1


def test_a_proof_that_cannot_be_made_is_a_deadline_and_no_pull_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mine = written(tmp_path, "mine", KEY)
    with sides(34, mine, mine) as (owner, reader):
        with monkeypatch.context() as broken:
            broken.setattr(reader.connector._handoff, "proving", lambda *_: 1 / 0)
            assert pulled(owner, reader, "a") == "timeout"
        assert pulled(owner, reader, "b") == ""


def test_whatever_a_stranger_says_it_gets_no_welcome_and_others_do(tmp_path: Path):
    mine = written(tmp_path, "mine", KEY)
    with sides(32, mine, mine) as (owner, reader), zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.setsockopt(zmq.RCVTIMEO, 5_000)
        asking.connect("tcp://127.77.32.1:5600")
        hello = Hello(call=1, version=PROVEN_VERSION, compat="same", block_bytes=BLOCK_BYTES, block_tokens=16)
        for number in range(300):
            asking.send(encode(hello))
            answer = decode(asking.recv())
            assert isinstance(answer, Challenge)
            guess = Prove(
                call=2, version=PROVEN_VERSION, compat="same", block_bytes=BLOCK_BYTES, block_tokens=16, nonce=b"n" * 16,
                challenge=answer.challenge if number % 2 else b"c" * CHALLENGE_BYTES, proof=bytes([number % 256]) * 32,
            )  # fmt: skip
            asking.send(encode(guess))
            assert isinstance(decode(asking.recv()), Refused)
        assert pulled(owner, reader, "r") == ""
        assert owner.connector.strangers() | {"wrong": 0, "stale": 0} == dict.fromkeys(owner.connector.strangers(), 0)


def test_a_key_that_comes_is_changed_and_is_taken_away_loses_no_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Four pods, which see each step one after the other. At every moment each reads from each, greeted before or anew."""
    monkeypatch.setattr(keeping, "LOOK_S", 0.02)
    monkeypatch.setattr(handing, "LOOK_S", 0.02)
    files = [tmp_path / name for name in "abc"]
    with sides(33, *files) as pods:
        number = 0
        # of a worker that finds a key at its first look nobody waits for others to have it
        assert wait(lambda: all(pod.connector._handoff._keys._looked_at > float("-inf") for pod in pods))

        def everybody(anew: bool) -> None:
            nonlocal number
            for reader in pods:
                for owner in pods:
                    if owner is reader:
                        continue
                    number += 1
                    if anew:  # as of a pod that was never met
                        greeted(reader, owner)
                    assert pulled(owner, reader, f"r{number}") == "", number

        for step in ((KEY,), (KEY, NEXT), (NEXT, KEY), (NEXT,)):
            for file in files:
                written(tmp_path, file.name, *step)
                everybody(anew=True)
            if step == (KEY,):  # everybody has it: time may pass
                assert not any(pod.connector.is_guarded() for pod in pods)
                monkeypatch.setattr(handing, "GRACE_S", 0.0)
                wait(lambda: all(pod.connector.is_guarded() for pod in pods))
            wait(lambda step=step: all(len(pod.connector._handoff._keys._lines) == len(step) for pod in pods))
            time.sleep(0.1)
            everybody(anew=True)
        for file in files:
            file.unlink()
        time.sleep(0.1)
        everybody(anew=False)
        everybody(anew=True)
        assert all(sum(pod.connector.strangers().values()) == 0 for pod in pods)


def greeted(reader: Side, owner: Side) -> None:
    """The reader's next pull from it greets it anew."""
    peer = reader.connector._peers._peers.get((owner.connector._owner._settings.host, 5600))
    if peer is not None:
        reader.connector._reader._spare[peer.agent_name] = False
        peer.welcome = None


def test_a_pair_that_greeted_before_proofs_were_asked_for_proves_itself_once_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What answered at an address while the key was on its way was believed for as long as the worker lived."""
    for module in (keeping, handing):
        monkeypatch.setattr(module, "LOOK_S", 0.02)
    files = [tmp_path / name for name in "abc"]
    with sides(35, *files) as (owner, reader, bare):
        assert wait(lambda: all(one.connector._handoff._keys._looked_at > float("-inf") for one in (owner, reader, bare)))
        assert (pulled(owner, reader, "a"), pulled(bare, reader, "b")) == ("", "")
        for file in files[:2]:
            written(tmp_path, file.name, KEY)
        assert wait(lambda: all(one.connector._handoff.has_key() for one in (owner, reader)))
        found = questions(owner)
        assert (pulled(owner, reader, "c"), pulled(bare, reader, "d")) == ("", ""), "the grace: others are without"
        assert (found[Hello], found[Prove]) == (0, 0)
        monkeypatch.setattr(handing, "GRACE_S", 0.0)
        assert wait(lambda: owner.connector.is_guarded() and reader.connector.is_guarded())
        for number in range(5):
            assert pulled(owner, reader, f"e{number}") == ""
        assert (found[Hello], found[Prove]) == (1, 1), "once"
        assert pulled(bare, reader, "f") == "unproven"
        written(tmp_path, files[2].name, KEY)
        assert wait(bare.connector._handoff.has_key)
        assert pulled(bare, reader, "g") == "", "it has the key by now"
