"""R10 with a real API server: a router's watch freezes without a word, or loses an event. The first is O5 of the reliability
list, the second O3, for the process that requests go through. A router hears of a change within a second otherwise.

Stage one: the proxy's ledger shows the fault. Stage two: requests go to the new worker within the bound, none fails meanwhile,
and afterwards news come within a second again. The rows run side by side, each with a router of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from e2e.emulated.fleet import until
from e2e.emulated.followed import Followed
from e2e.faultproxy.faults import EventFault
from e2e.faultproxy.proxy import FaultProxy
from e2e.kube.controlplane import ControlPlane
from e2e.test_router_faults_workers import asks, loop
from fleet_router.follow.kube import Pace

pytestmark = pytest.mark.timeout(400)
WITHIN_S = 1.0
PACE = Pace()
BOUND_S = PACE.audit_s + PACE.late_s + 4.0
"""An audit, the moment that it leaves the watch, and a list; the rest is this machine's, which has much to do."""
BOOKMARK_S = 60.0
NET = 191


def freeze(proxy: FaultProxy) -> None:
    assert proxy.freeze(["configmaps"]) == 1


def drop(proxy: FaultProxy) -> None:
    proxy.event_faults.append(EventFault("drop", "configmaps", types=frozenset({"MODIFIED"}), count=1_000))


FAULTS: dict[str, tuple[Callable[[FaultProxy], None], str]] = {"frozen": (freeze, "frozen"), "lost-event": (drop, "dropped")}


def served(fleet: Followed, number: int) -> int:
    return int(fleet.decode[number].stats()["finished"])


def turns_to(fleet: Followed, number: int, within_s: float) -> float:
    """Seconds until a request is answered by this worker; no request fails meanwhile."""
    before, first = served(fleet, number), int(time.monotonic() * 10)

    def turned() -> bool:
        assert loop(fleet, asks(2, first=first), clients=1).right == 2
        return served(fleet, number) > before

    return until(f"requests at decode worker {number}", turned, within_s)


def deaf(fleet: Followed, proxy: FaultProxy, fault: str) -> str:
    """What happened, in words."""
    fleet.publish([fleet.decode[0]])
    turns_to(fleet, 0, 5.0)
    act, word = FAULTS[fault]
    act(proxy)
    fleet.publish([fleet.decode[1]])
    took_s = turns_to(fleet, 1, BOUND_S)
    assert proxy.ledger.faults()[word] > 0, proxy.ledger.events
    proxy.heal()
    fleet.publish([fleet.decode[0]])
    again_s = turns_to(fleet, 0, WITHIN_S)
    return f"{fault}: heard after {took_s:.1f} s, of the next change after {again_s:.2f} s"


def idle(fleet: Followed, proxy: FaultProxy) -> str:
    """Nothing happens for longer than a watch may be silent: its bookmarks keep it, and audits ask for no list."""
    until("a bookmark", lambda: any(event.type == "BOOKMARK" for event in proxy.ledger.events), BOOKMARK_S + 5.0)
    until("more silence than is allowed without one", lambda: _watched_s(proxy) > PACE.silence_s + 5.0, 30.0)
    asked = [request for request in proxy.ledger.requests if request.kind == "configmaps"]
    assert sum(request.watch for request in asked) == 1, asked
    assert 1 <= len(asked) - 2 <= 3, asked  # one list, one watch, audits
    assert fleet.metric("follow_errors_total") == 0
    return f"{len(asked)} requests in {_watched_s(proxy):.0f} s, {len(proxy.ledger.events)} bookmarks"


def _watched_s(proxy: FaultProxy) -> float:
    (begun,) = [request.at_s for request in proxy.ledger.requests if request.watch]
    return time.monotonic() - begun


def play(row: str, number: int, plane: ControlPlane, folder: Path) -> str:
    name = f"deaf-{row}"
    folder.mkdir()
    plane.kubectl("create", "namespace", name)
    with FaultProxy(plane, 1) as proxy, Followed(folder, NET + number, 2, plane, proxy, name) as fleet:
        return idle(fleet, proxy) if row == "idle" else deaf(fleet, proxy, row)


ROWS = [*FAULTS, "idle"]


@pytest.fixture(scope="module")
def plays(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[str]]]:
    folder = tmp_path_factory.mktemp("discovery")
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(ROWS)))
        yield {row: pool.submit(play, row, i, control_plane, folder / row) for i, row in enumerate(ROWS)}


@pytest.mark.parametrize("row", ROWS)
def test_r10_a_watch_that_is_deaf(plays: dict[str, Future[str]], row: str):
    print(plays[row].result())
