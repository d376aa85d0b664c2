"""Greetings of a hand-off between real workers, each kind of owner with each kind of reader: strict ones (the fleet's key, and
the operator's word), ones with the key alone, ones without, and ones of the code before there was a proof. KV moves or a named
error says at once why not, and the tokens are those of a worker alone."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from fleet_cli.up.bundled import tiny_model
from fleet_wire import sidechannel
from fleet_wire.peerkey import HANDOFF_PROOF_ENV, PEER_KEY_ENV
from fleet_wire.sidechannel import PROTOCOL_VERSION, PROVEN_VERSION, Challenge, Granted, Hello, Message, Refused, Renew, Welcome
from tests.conformance.suite import completion, eventually, prefill_leg, tokens
from tests.conformance.workers import PEER_KEY, Worker, spawn, stop, wait_ready, worker_config

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "ff91e1d3"
"""The last commit whose greetings prove nothing."""
KINDS: dict[str, dict[str, str]] = {
    "strict": {},
    "key": {HANDOFF_PROOF_ENV: ""},
    "no key": {PEER_KEY_ENV: ""},
    "old": {},
}
MOVES = (200, "")
PAIRS: dict[tuple[str, str], tuple[int, str]] = {
    ("strict", "strict"): MOVES,
    ("strict", "key"): MOVES,
    ("strict", "no key"): (503, "it asks for a proof of the fleet's key, and this worker has none (proof)"),
    ("strict", "old"): (503, "answered a greeting with something else (peer)"),
    ("key", "strict"): MOVES,
    ("key", "no key"): MOVES,
    ("key", "old"): MOVES,
    ("no key", "strict"): (503, "is not believed: no proof of the fleet's key in its answer (unproven)"),
    ("no key", "key"): MOVES,
    ("old", "strict"): (503, "no proof of the fleet's key in its answer: protocol version: prefill has 1, decode has 2"),
    ("old", "key"): MOVES,
    ("old", "old"): MOVES,
}
"""(owner, reader): what a decode leg is answered."""
SOON_S = 3.0
"""A side channel's deadline is 5 s: nobody waits for it."""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The worker's code of before, out of this repository's history."""
    folder = tmp_path_factory.mktemp("older")
    found = subprocess.run(["git", "-C", str(ROOT), "archive", "-o", str(folder / "w.tar"), BEFORE, "worker"], check=False)
    if found.returncode:
        pytest.skip(f"a clone without {BEFORE}")
    subprocess.run(["tar", "-xf", str(folder / "w.tar"), "-C", str(folder)], check=True)
    assert not (folder / "worker/fleet_worker/transfer/handoff.py").exists()
    return folder / "worker"


@pytest.fixture(scope="module")
def workers(older: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Worker]]:
    """By role and kind."""
    folder, tiny = tmp_path_factory.mktemp("workers"), tiny_model()
    with ExitStack() as stack:
        made = {}
        for at, (kind, env) in enumerate(KINDS.items()):
            for number, role in enumerate(("prefill", "decode")):
                path = {"PYTHONPATH": f"{older}:{os.environ.get('PYTHONPATH', '')}"} if kind == "old" else {}
                worker = spawn(worker_config(role, tiny), f"127.78.91.{10 * at + number + 1}", folder, **env, **path)
                stack.callback(stop, worker)
                made[role, kind] = worker
        for worker in made.values():
            wait_ready(worker)
        yield made
        for worker in made.values():
            worker.process.terminate()  # all at once; each is waited for


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_kv_moves_or_a_named_error_says_why_not(workers: dict[tuple[str, str], Worker], pair: tuple[str, str]):
    owner, reader = workers["prefill", pair[0]], workers["decode", pair[1]]
    prompt = f"From {pair[0]} to {pair[1]}: the router moves a block of keys and values before noon. " * 8
    alone = tokens(owner.post("/v1/completions", completion(prompt)))
    received = reader.metric("fleet:kv_blocks_received_total")
    reference, begun = prefill_leg(owner, prompt=prompt), time.monotonic()
    answer = reader.post("/v1/completions", completion(prompt, kv_transfer_params=reference))
    status, words = PAIRS[pair]
    assert answer.status_code == status, answer.text
    assert time.monotonic() - begun < SOON_S
    if status == 200:
        assert tokens(answer) == alone
        assert reader.metric("fleet:kv_blocks_received_total") > received, "it was not computed anew"
    else:
        assert words in answer.json()["error"]["message"]
        assert answer.json()["error"]["type"] == "KvTransferError", "for which a router has it computed anew"
        assert reader.metric("fleet:kv_blocks_received_total") == received
        assert tokens(reader.post("/v1/completions", completion(prompt))) == alone
    owner.post("/kv/release", {"lease_id": reference["lease_id"]})
    for worker in (owner, reader):
        eventually(lambda worker=worker: worker.metric("fleet:kv_blocks_free") == worker.metric("fleet:kv_blocks_total"), 12.0)


def test_what_was_refused_is_counted_and_who_is_guarded_says_so(workers: dict[tuple[str, str], Worker]):
    """After all pairs."""
    guarded = {kind: workers["prefill", kind].metric("fleet:kv_handoff_guarded") for kind in ("strict", "key", "no key")}
    assert guarded == {"strict": 1, "key": 0, "no key": 0}
    owner, reader = workers["prefill", "strict"], workers["decode", "strict"]
    refused = owner.metric("fleet:kv_handoff_strangers_total"), reader.metric("fleet:kv_handoff_strangers_total")
    assert refused == (2, 2)
    for worker, word in ((owner, "missing"), (reader, "answer")):
        log = worker.log.read_text(errors="replace")
        assert f"KV hand-off: refused: no proof of the fleet's key ({word}), 1 so far" in log
        assert PEER_KEY not in log


def told(owner: Worker, message: Message) -> Message:
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.RCVTIMEO, 10_000)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(f"tcp://{owner.ip}:{owner.config.ports.side_channel}")
        asking.send(sidechannel.encode(message))
        return sidechannel.decode(asking.recv())


def test_who_only_reaches_the_port_hears_nothing(workers: dict[tuple[str, str], Worker]):
    """It knows the compatibility hash and all that there is to know of the blocks."""
    owner, tells = workers["prefill", "strict"], workers["prefill", "no key"]
    hello = Hello(call=1, version=PROTOCOL_VERSION, compat="suite", block_bytes=65_536, block_tokens=16)
    told_all = told(tells, hello)
    assert isinstance(told_all, Welcome), "so the question is right"
    assert told(owner, hello) == Granted(call=1), "to whom an older reader is too old: nothing of this worker"
    assert isinstance(told(owner, Hello(**{**_fields(hello), "version": PROVEN_VERSION})), Challenge)
    lease = told(owner, Renew(call=1, lease_id="1", epoch="guessed", generation=1))
    assert isinstance(lease, Refused)
    assert "guessed" not in lease.message


def _fields(hello: Hello) -> dict[str, object]:
    return {name: getattr(hello, name) for name in hello.__struct_fields__}
