"""A reader over a NIXL agent and owners that say what a test wants."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq

from fleet_wire.kv import KvReference
from fleet_wire.sidechannel import Message, Welcome
from fleet_worker.transfer.base import FetchResult, KvPool
from fleet_worker.transfer.faults import Faults
from fleet_worker.transfer.handoff import Handoff
from fleet_worker.transfer.owner import TransferSettings
from fleet_worker.transfer.peers import Peer, Peers
from fleet_worker.transfer.reader import Pull, Reader

LEASE_S = 30.0
MEMORY = torch.zeros((64, 4096), dtype=torch.uint8)
POOL = KvPool(MEMORY.data_ptr(), 4096, 64, 16)
SETTINGS = TransferSettings("127.0.0.1", 5600, "same", lease_s=LEASE_S, read_timeout_s=1000.0)
KEYLESS = Handoff(None, "", is_required=False)


def reference(host: str = "10.0.0.1", epoch: str = "now", **change: Any) -> KvReference:
    made = KvReference(
        do_remote_prefill=True, remote_block_ids=(3,), remote_engine_id="engine", remote_request_id="r", remote_host=host,
        remote_port=5600, remote_num_tokens=16, lease_id=f"lease-{host}", lease_generation=7, remote_epoch=epoch, digest="0" * 16,
    )  # fmt: skip
    return msgspec.structs.replace(made, **change)


def welcome(call: int, epoch: str = "now", agent: bytes = b"engine") -> Welcome:
    return Welcome(call=call, engine_id="engine", epoch=epoch, agent=agent, base_address=0, block_bytes=4096, num_blocks=64)


class Agent:
    """NIXL, whose reads end when the test says so."""

    def __init__(self) -> None:
        self.known: list[str] = []
        self.told: dict[str, bytes] = {}
        """By name, which is what stands before `|` in it."""
        self.made_known = 0
        self.state = self.posted = "PROC"
        self.handles, self.reads = 0, 0

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if metadata == b"broken":
            raise RuntimeError("NIXL_ERR_MISMATCH")
        name = metadata.decode().partition("|")[0]
        self.made_known += 1
        self.known += [] if name in self.known else [name]
        self.told[name] = metadata
        return name.encode()

    def remove_remote_agent(self, name: str) -> None:
        self.known.remove(name)

    def get_xfer_descs(self, descriptors: list[Any], _: str) -> list[Any]:
        return descriptors

    def initialize_xfer(self, *_: Any) -> object:
        self.handles += 1
        return object()

    def transfer(self, _: object) -> str:
        self.reads += 1
        return self.posted

    def check_xfer_state(self, _: object) -> str:
        return self.state

    def release_xfer_handle(self, _: object) -> None:
        self.handles -= 1


class NoProver:
    def proofs(self) -> list[Any]:
        return []

    def ask(self, *_: Any) -> None:
        return None


class SaidPeers(Peers):
    """Peers whose questions the test answers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], most: int = 8) -> None:
        super().__init__(context, 5.0, Faults(), most)
        self.asked: list[tuple[float, Peer, Message]] = []

    def call(self, peer: Peer, make: Callable[[int], Any], now: float, on_answer: Any, until: float = float("inf")) -> None:
        super().call(peer, make, now, on_answer, until)
        self.asked.append((now, peer, make(self._next_call)))

    def told(self, kind: type[Message]) -> list[tuple[float, Any]]:
        return [(now, message) for now, _, message in self.asked if isinstance(message, kind)]

    def answer(self, make: Callable[[int], Message]) -> None:
        """Answer the last question."""
        _, peer, message = self.asked[-1]
        self._tell(peer.calls.pop(message.call), make(message.call))  # type: ignore[arg-type]


class Rig:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], most: int = 8, handoff: Handoff = KEYLESS) -> None:
        self.peers, self.agent, self.done = SaidPeers(context, most), Agent(), list[FetchResult]()
        self.faults = Faults()
        self.reader = Reader(
            SETTINGS, POOL, self.agent, self.peers, NoProver(), self.done.append, self.faults, handoff,  # type: ignore[arg-type]
        )  # fmt: skip

    def pull(self, name: str, ref: KvReference) -> None:
        self.reader.begin(Pull(name, ref, [3], [1], ref.digest, time.monotonic()))

    def ended(self, *, lingering: bool = False) -> dict[str, str]:
        """Whose blocks came back; `lingering`: who was told, and whose did not."""
        over = {result.request_id: result for result in self.done}  # of two reports the last one
        return {name: one.error.reason if one.error else "" for name, one in over.items() if one.lingers is lingering}


class Kept(zmq.Context):  # type: ignore[type-arg]
    """Holds its sockets until the test is over."""

    def socket(self, *args: Any, **more: Any) -> Any:
        made = super().socket(*args, **more)
        self.__dict__.setdefault("kept", []).append(made)
        return made


def is_kept_alive(host: str, port: int) -> bool:
    """The kernel asks after a peer that says nothing on a connection to this address (/proc/net/tcp: timer 02)."""
    place = f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{port:04X}"
    end = time.monotonic() + 3.0
    with socket.create_connection((host, port)):
        while time.monotonic() < end:
            lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
            rows = [line.split() for line in lines]
            if any(row[1].endswith(place) and row[3] == "01" and row[5].startswith("02") for row in rows):
                return True
            time.sleep(0.01)
    return False
