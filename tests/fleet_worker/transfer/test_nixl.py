"""Hand-off between two real NIXL agents in one process: what is proven arrives, what is not fails closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from fleet_wire.kv import KvReference
from fleet_worker.transfer.base import FetchResult, KvPool, KvReferenceError, KvTransferError
from fleet_worker.transfer.descriptors import Run, merge_runs, split_chunks
from fleet_worker.transfer.nixl import NixlConnector
from fleet_worker.transfer.owner import TransferSettings
from fleet_worker.transfer.transport import in_use, ucx_environment
from tests.fleet_worker.transfer.reading import is_kept_alive

BLOCK_BYTES = 4_096
BLOCKS = 64


class Side:
    """A pool and its connector."""

    def __init__(
        self, host: str, compat: str = "same", lease_s: float = 30.0, read_timeout_s: float = 60.0, **more: Any
    ) -> None:  # fmt: skip
        self.memory = torch.randint(0, 255, (BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
        pool = KvPool(self.memory.data_ptr(), BLOCK_BYTES, BLOCKS, 16)
        settings = TransferSettings(host, 5600, compat, "auto", False, lease_s, 1.0, read_timeout_s, **more)
        self.connector = NixlConnector(settings, pool)

    def grant(self, request_id: str, blocks: list[int], tokens: int) -> KvReference:
        return self.connector.grant(request_id, blocks, tokens, "prompt")

    def finished(self, deadline_s: float = 10.0) -> FetchResult:
        return wait(self.connector.finished, deadline_s)[0]


def wait(poll, deadline_s: float = 10.0):
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        found = poll()
        if found:
            return found
        time.sleep(0.001)
    raise AssertionError("nothing within the deadline")


@pytest.fixture
def pair() -> Iterator[tuple[Side, Side]]:
    owner, reader = Side("127.77.0.1", lease_s=1.0), Side("127.77.0.2")
    yield owner, reader
    owner.connector.close()
    reader.connector.close()


def test_blocks_arrive_in_order_and_the_lease_ends_as_read(pair: tuple[Side, Side]):
    owner, reader = pair
    reference = owner.grant("r", [3, 4, 9], 48)
    assert owner.connector.open_leases() == 1
    reader.connector.fetch("r", reference, 0, [10, 11, 20])
    result = reader.finished()
    assert (result.error, result.transferred_bytes, result.descriptors) == (None, 3 * BLOCK_BYTES, 2)
    assert torch.equal(reader.memory[[10, 11, 20]], owner.memory[[3, 4, 9]])
    assert wait(owner.connector.released) == [("r", "read")]
    assert owner.connector.open_leases() == 0


def test_a_reader_that_has_the_first_blocks_pulls_and_proves_the_rest(pair: tuple[Side, Side]):
    owner, reader = pair
    reader.connector.fetch("r", owner.grant("r", [3, 4, 9], 48), 2, [20])
    assert reader.finished().error is None
    assert torch.equal(reader.memory[20], owner.memory[9])


def test_k5_a_flipped_byte_is_caught_by_the_digest(pair: tuple[Side, Side]):
    owner, reader = pair
    reference = owner.grant("r", [3, 4], 32)
    owner.memory[4, 100] ^= 1
    reader.connector.fetch("r", reference, 0, [1, 2])
    assert error_reason(reader.finished()) == "digest"


def test_k3_a_read_after_the_lease_is_refused(pair: tuple[Side, Side]):
    owner, reader = pair
    reference = owner.grant("r", [3], 16)
    assert wait(owner.connector.released, 3.0) == [("r", "expired")]
    reader.connector.fetch("r", reference, 0, [1])
    assert error_reason(reader.finished()) == "lease-unknown"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lease_generation": 99}, "lease-generation"),
        ({"lease_id": "somebody-elses"}, "lease-unknown"),
        ({"remote_epoch": "before-the-restart"}, "epoch"),
        ({"remote_engine_id": "another"}, "epoch"),
        ({"remote_block_ids": (BLOCKS + 5,)}, "range"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_k4_a_forged_reference_is_refused(pair: tuple[Side, Side], change: dict[str, object], reason: str):
    owner, reader = pair
    reference = msgspec.structs.replace(owner.grant("r", [3], 16), **change)
    reader.connector.fetch("r", reference, 0, [1])
    assert error_reason(reader.finished()) == reason


def test_a_reference_with_a_short_digest_is_refused_at_once(pair: tuple[Side, Side]):
    owner, reader = pair
    reference = msgspec.structs.replace(owner.grant("r", [3], 16), digest="00")
    with pytest.raises(KvReferenceError):
        reader.connector.fetch("r", reference, 0, [1])


def test_k15_workers_of_different_layout_never_pair(pair: tuple[Side, Side]):
    stranger = Side("127.77.0.3", compat="another-model")
    try:
        stranger.connector.fetch("r", pair[0].grant("r", [3], 16), 0, [1])
        result = stranger.finished()
        assert isinstance(result.error, KvReferenceError)
        assert "compatibility hash: prefill has same, decode has another-model" in str(result.error)
    finally:
        stranger.connector.close()


def test_a_dead_owner_is_a_timeout_and_a_restarted_one_is_found_again(pair: tuple[Side, Side]):
    _, reader = pair
    owner = Side("127.77.0.4")
    reader.connector.fetch("a", owner.grant("a", [3], 16), 0, [1])
    assert reader.finished().error is None
    stale = owner.grant("b", [3], 16)
    owner.connector.close()
    reader.connector.fetch("b", stale, 0, [1])
    assert reader.finished().error is not None
    reborn = Side("127.77.0.4")
    try:
        reader.connector.fetch("c", stale, 0, [1])
        assert error_reason(reader.finished()) == "epoch"
        reader.connector.fetch("d", reborn.grant("d", [5], 16), 0, [2])
        assert reader.finished().error is None
        assert torch.equal(reader.memory[2], reborn.memory[5])
    finally:
        reborn.connector.close()


def test_a_stale_reference_beside_healthy_pulls_fails_alone(pair: tuple[Side, Side]):
    owner, reader = pair
    reader.connector.fetch("warm", owner.grant("warm", [1], 16), 0, [1])
    assert reader.finished().error is None
    stale = msgspec.structs.replace(owner.grant("s", [3], 16), remote_epoch="before-the-restart")
    for number in range(10):
        reader.connector.fetch(f"g{number}", owner.grant(f"g{number}", list(range(40)), 640), 0, list(range(40)))
        reader.connector.fetch(f"s{number}", stale, 0, [50])
        found = wait(reader.connector.finished)
        if len(found) < 2:
            found += wait(reader.connector.finished)
        assert {result.request_id[0]: result.error and result.error.reason for result in found} == {"g": None, "s": "epoch"}


def test_an_owner_whose_metadata_nixl_does_not_take_is_refused_and_another_one_is_read(pair: tuple[Side, Side]):
    owner, reader = pair
    broken = Side("127.77.0.7")
    try:
        broken.connector._owner._metadata = broken.connector._owner._metadata[:40]
        reader.connector.fetch("b", broken.grant("b", [3], 16), 0, [1])
        assert error_reason(reader.finished()) == "peer"
        reader.connector.fetch("g", owner.grant("g", [3], 16), 0, [1])
        assert reader.finished().error is None
    finally:
        broken.connector.close()


def test_a_lease_of_a_waiting_request_outlives_its_duration_until_it_is_let_go(pair: tuple[Side, Side]):
    owner, _ = pair  # leases of 1 s
    reader = Side("127.77.0.8", lease_s=1.0)
    try:
        given = owner.grant("r", [3], 16)
        reader.connector.hold("d", given)
        end = time.monotonic() + 1.8
        while time.monotonic() < end:
            assert owner.connector.released() == []
            time.sleep(0.05)
        reader.connector.cancel("d")
        assert wait(owner.connector.released, 3.0) == [("r", "expired")]
    finally:
        reader.connector.close()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_blocks_are_read_from_an_owner_on_an_ipv6_address(pair: tuple[Side, Side]):
    owner = Side("::1")
    try:
        pair[1].connector.fetch("r", owner.grant("r", [3], 16), 0, [1])
        assert pair[1].finished().error is None
        assert torch.equal(pair[1].memory[1], owner.memory[3])
    finally:
        owner.connector.close()


@pytest.mark.parametrize("read_timeout_s", [0.5, 60.0], ids=["its-time-is-up", "its-owner-is-silent"])
def test_what_a_frozen_owner_says_late_is_written_into_nobodys_blocks(monkeypatch: pytest.MonkeyPatch, read_timeout_s: float):
    """Incident: NIXL let go of a read that UCX still did. Its blocks were another request's by the time that its owner went on,
    and that one was answered with other tokens. Over TCP the owner must take part in a read; here its calls have 1 s."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    owner, reader = Side("127.77.0.5"), Side("127.77.0.6", read_timeout_s=read_timeout_s)
    results: list[FetchResult] = []

    def told(name: str, *, over: bool) -> FetchResult | None:
        results.extend(reader.connector.finished())
        return next((one for one in results if one.request_id == name and not (over and one.lingers)), None)

    try:
        reader.connector.fetch("a", owner.grant("a", [3], 16), 0, [1])
        assert wait(lambda: told("a", over=True)).error is None
        reference = owner.grant("b", [4], 16)
        with owner.connector._owner._lock:  # its transfer thread waits here
            reader.connector.fetch("b", reference, 0, [2])
            assert error_reason(wait(lambda: told("b", over=False))) == "timeout"
            reader.connector.fetch("b2", reference, 0, [7])
            assert error_reason(wait(lambda: told("b2", over=False))) == "timeout"
            if told("b", over=True):  # its block is anybody's
                reader.memory[2] = 0
        assert error_reason(wait(lambda: told("b", over=True))) == "timeout"
        reader.memory[2] = 0
        reader.connector.fetch("c", owner.grant("c", [5], 16), 0, [8])
        assert wait(lambda: told("c", over=True)).error is None  # greeted anew
        assert torch.equal(reader.memory[8], owner.memory[5])
        assert not reader.memory[2].any()
        assert error_reason(wait(lambda: told("b2", over=True))) == "timeout"
        assert (reader.connector._reader.lingers, reader.connector._reader._spare) == (False, {})
    finally:
        owner.connector.close()
        reader.connector.close()


def test_when_the_transfer_thread_ends_no_pull_waits_for_ever(pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch):
    owner, reader = pair

    def broken(now: float) -> None:
        raise ValueError("a bug")

    reference = owner.grant("r", [3], 16)
    monkeypatch.setattr(reader.connector._peers, "expire", broken)
    reader.connector.fetch("r", reference, 0, [1])
    assert error_reason(reader.finished()) == "stopped"
    with pytest.raises(RuntimeError, match="the KV transfer thread ended: a bug"):
        wait(reader.connector.finished)


def test_a_turn_that_lasts_is_told_and_one_that_waits_is_not(pair: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch):
    connector, go_on = pair[0].connector, threading.Event()
    monkeypatch.setattr(connector, "_turn", lambda now: go_on.wait(10))
    connector._wake()
    assert wait(lambda: connector.turn_s() > 0.05)
    monkeypatch.undo()
    go_on.set()
    assert wait(lambda: connector.turn_s() == 0)


def test_release_ends_a_lease_once(pair: tuple[Side, Side]):
    owner, _ = pair
    reference = owner.grant("r", [3], 16)
    assert owner.connector.release(reference.lease_id)
    assert not owner.connector.release(reference.lease_id)
    assert owner.connector.released() == [("r", "released")]


def error_reason(result: FetchResult) -> str:
    assert result.error is not None
    assert result.transferred_bytes == 0
    return result.error.reason


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch):
    """Of a NIC in netDevices that a node has not, all that was said was NIXL_ERR_BACKEND, behind a traceback."""
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_9:1")
    with pytest.raises(KvTransferError, match=r"NIXL cannot begin \(NIXL_ERR_BACKEND\).* UCX_NET_DEVICES=mlx5_9:1") as told:
        Side("127.77.0.1")
    assert told.value.reason == "transport"


def test_neighbours_become_one_descriptor():
    assert merge_runs([3, 4, 9, 10], [0, 1, 2, 4]) == [Run(3, 0, 2), Run(9, 2, 1), Run(10, 4, 1)]
    assert [list(chunk) for chunk in split_chunks(5, 10, 20)] == [[0, 1], [2, 3], [4]]


def test_transport_is_reported_never_wished(tmp_path):
    assert in_use({"UCX_TLS": "rc,tcp"}, devices=tmp_path / "none") == "tcp"
    assert in_use({"UCX_TLS": "sm,self"}, devices=tmp_path / "none") == "shm"
    assert in_use({}, devices=tmp_path / "none") == "shm"
    (tmp_path / "mlx5_0").mkdir()
    assert in_use({"UCX_TLS": "rc,sm"}, devices=tmp_path) == "rdma"
    assert in_use({"UCX_TLS": "srd,sm"}, devices=tmp_path) == "rdma"
    assert "tcp" not in ucx_environment("rdma", True, {})["UCX_TLS"].split(",")
    assert "tcp" in ucx_environment("rdma", False, {})["UCX_TLS"].split(",")
    assert ucx_environment("tcp", False, {"UCX_TLS": "mine"}) == {}


def test_of_a_reader_whose_node_lost_its_power_the_kernel_tells(pair: tuple[Side, Side]):
    """The owner only answers: the connection, and its file, stayed for as long as the worker lived."""
    assert is_kept_alive("127.77.0.1", 5600)
