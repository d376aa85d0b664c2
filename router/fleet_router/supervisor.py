"""`--processes N`: N routers behind one port by SO_REUSEPORT. One that dies is started again; SIGTERM drains all."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence

from fleet_router.explain.journal import Journal
from fleet_router.members import OWN_KEY
from fleet_router.port import listening
from fleet_router.stops import ending
from fleet_wire.address import authority

AGAIN_S = 1.0
QUICK_S = 5.0
"""A process that ended sooner than this after its start has not begun."""
QUICK_MOST = 5
"""So many in a row: there is no use in another one."""


class Supervisor:
    """The parent; it serves nothing itself."""

    def __init__(self, argv: Sequence[str], host: str, port: int, size: int) -> None:
        self._argv, self._host, self._port, self._size = list(argv), host, port, size
        self._family = secrets.token_hex(8)
        self._children: dict[int, asyncio.subprocess.Process] = {}
        self._stop = asyncio.Event()
        self._journal = Journal()

    async def run(self, *, own_key: bool) -> int:
        """Until SIGTERM, or until they cannot run; the largest exit code. `own_key`: there is no key of gossip but ours."""
        if not await self._is_free():
            return 1
        loop = asyncio.get_running_loop()
        for number in ending():
            loop.add_signal_handler(number, self._stop.set)
        key = _key_file() if own_key else None
        return max(await asyncio.gather(*(self._keep(index, key) for index in range(self._size))))

    async def _is_free(self) -> bool:
        """Sharing a port hides that somebody else has it."""
        rows = await asyncio.get_running_loop().getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        try:
            listening(rows[0][0], rows[0][4], shared=False).close()
        except OSError as error:
            print(f"AddressInUse: {authority(self._host, self._port)} cannot be bound: {error}", file=sys.stderr, flush=True)
            return False
        return True

    async def _keep(self, index: int, key: int | None) -> int:
        """One place: a process, and the next one when it dies."""
        quick, member, counts = 0, f"{index}/{self._size}/{self._family}", os.memfd_create("counts", 0)
        while True:
            began = time.monotonic()
            argv = [sys.executable, "-m", "fleet_router", *self._argv, "--counts", str(counts), "--member", member]
            argv += ["--gossip-key", f"{OWN_KEY}{key}"] if key is not None else []
            code = await self._run(index, argv, (counts,) if key is None else (counts, key))
            if self._stop.is_set():
                return exit_code(code)
            quick = quick + 1 if time.monotonic() - began < QUICK_S else 0
            self._journal.say("process-died", index=index, code=code, quick=quick)
            if quick >= QUICK_MOST:
                self._stop.set()
                return 1
            await asyncio.sleep(AGAIN_S)

    async def _run(self, index: int, argv: Sequence[str], files: Sequence[int]) -> int:
        """A process from its start to its end; 1 when none can be started now: the others serve on."""
        try:
            child = await asyncio.create_subprocess_exec(*argv, pass_fds=files, start_new_session=True)
        except OSError as error:
            self._journal.say("process-not-started", index=index, problem=str(error))
            return 1
        return await self._wait(child)

    async def _wait(self, child: asyncio.subprocess.Process) -> int:
        """Its end; it is told of ours."""
        ended, told = asyncio.create_task(child.wait()), asyncio.create_task(self._stop.wait())
        await asyncio.wait({ended, told}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            child.send_signal(signal.SIGTERM)
        told.cancel()
        return await ended


def exit_code(code: int) -> int:
    """Of a process that was told to go, as ours: one that a signal ended has cut its answers off, but for SIGTERM, which ends one
    that has not begun to serve."""
    if code == -signal.SIGTERM:
        return 0
    return 1 if code < 0 else code


def _key_file() -> int:
    """A key that these processes alone share, in memory."""
    made = os.memfd_create("gossip-key", 0)
    os.write(made, secrets.token_hex(32).encode())
    return made


def end_with_parent() -> None:
    """SIGTERM when the parent dies, however that happens: nobody may keep the port without it."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
