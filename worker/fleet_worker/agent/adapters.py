"""Brings the engine's adapters to what is wished: one task per adapter at a time, failures tried again, nothing restarted."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from fleet_wire.unreadable import UNREADABLE
from fleet_worker.agent.adapterplan import Failure, Held, failed_again, plan, report, settled
from fleet_worker.agent.alone import alone
from fleet_worker.agent.errors import AdapterError
from fleet_worker.agent.stage import Staged, prune, stage
from fleet_worker.config import ADAPTERS_ENV, AdapterWish, WorkerConfig, decode_adapters

AT_ONCE = 4
"""Adapters that are fetched and loaded at the same time."""
FIRST_ROUND_S = 600.0
"""A new worker is ready when each wished adapter was tried, or after this long."""
MESSAGE_MOST = 500
UNLOAD_AGAIN_S = 1.0
LEFT_S = 1800.0
"""A stream may go on for so long under a copy that has been replaced."""


class AdapterEngine(Protocol):
    """The engine's side; AdapterError."""

    async def load_adapter(self, name: str, path: str, *, inplace: bool) -> str | None:
        """The digest that the engine computed, None when it says none."""
        ...

    async def unload_adapter(self, name: str) -> None: ...


class AdapterKeeper:
    """Of one worker. `wish` may be called at any time; nothing happens before `run`."""

    def __init__(self, config: WorkerConfig, engine: AdapterEngine, folder: Path, wished: Sequence[AdapterWish]) -> None:
        self._settings = config.adapters
        self._alone = config.nodes == 1
        self._replaces = config.engine == "torch"
        """The engine keeps running requests on the version that they began with when a name gets another content."""
        self._engine = engine
        self._folder = folder
        self._wished = tuple(wished)
        self._held: dict[str, Held] = {}
        self._failed: dict[str, Failure] = {}
        self._unsure: set[str] = set()
        """Told to load or unload, and no good answer: nobody knows which version the engine has, if any. None of them is held."""
        self._stays: dict[str, str] = {}
        """What was said of each that the engine does not give up."""
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._left: dict[str, float] = {}
        """Copies that the engine may have had and is to have no more, and since when, the last one last: vLLM goes on with
        requests under them, reads again what it had put aside, and ends where that is gone."""
        self._untidy = False
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._there = asyncio.Event()
        """There is an engine that answers."""
        self._there.set()
        self._lives = 0
        """Engines that have gone: what one of them said of an adapter is nothing to the next one."""

    def wish(self, wished: Sequence[AdapterWish]) -> None:
        """The whole set that should be there."""
        self._wished = tuple(wished)
        names = {wish.name for wish in wished}
        self._failed = {name: failure for name, failure in self._failed.items() if name in names}
        self._wake.set()

    def engine_gone(self) -> None:
        """Its engine is ended, for another one to be started: nothing is loaded any more, and nothing can be. What is wished
        meanwhile waits, and fails nobody."""
        self._held, self._failed, self._unsure, self._stays, self._left = {}, {}, set(), {}, {}
        self._lives += 1
        self._there.clear()
        self._settled.clear()

    async def engine_there(self) -> None:
        """It answers. The next one, if one has gone, is given everything that is wished by now: returns when each was tried."""
        self._there.set()
        self._wake.set()
        if self._lives:
            await self.first_round()

    def report(self) -> list[dict[str, str]]:
        """For /state."""
        return report(self._wished, self._held, self._failed, self._busy)

    async def first_round(self) -> None:
        """Until each adapter was tried once, or the time is up."""
        try:
            async with asyncio.timeout(FIRST_ROUND_S):  # Python 3.11's wait_for forgets a cancellation that meets its result
                await self._settled.wait()
        except TimeoutError:
            self._settled.set()  # nobody waits so long again; the report says which are missing

    async def run(self) -> None:
        """For ever, from the moment when the engine answers."""
        try:
            while True:
                self._wake.clear()
                await self._there.wait()
                steps = plan(self._wished, self._held, self._failed, self._busy, time.monotonic(), self._unsure)
                for wish in steps.load:
                    self._begin(wish.name, self._load(wish))
                for name in steps.unload:
                    self._begin(name, self._unload(name))
                if settled(self._wished, self._held, self._failed):
                    self._settled.set()
                await self._tidy()
                wait_s = None if steps.wake_at is None else max(0.0, steps.wake_at - time.monotonic())
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._wake.wait()
        finally:
            tasks = list(self._busy.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._busy[name] = task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._ended(name))

    def _ended(self, name: str) -> None:
        self._busy.pop(name, None)
        self._wake.set()

    async def _load(self, wish: AdapterWish) -> None:
        try:
            async with self._slots:
                if self._settings.most < 1:
                    raise AdapterError("AdaptersDisabled", "this worker was started without adapters (maxSimultaneousAdapters)")
                if not self._alone:
                    raise AdapterError(
                        "NotSupported", "a worker over several nodes serves no adapters: only its first pod has them"
                    )
                staged = await alone(stage, wish.source, self._settings.root, self._folder)
                await self._given(wish, staged)
        except AdapterError as error:
            self._fail(wish, error.reason, str(error))
        except Exception as error:  # one adapter's surprise must end neither the others nor the worker
            self._fail(wish, "InternalError", f"{type(error).__name__}: {error}")

    async def _given(self, wish: AdapterWish, staged: Staged) -> None:
        """To the engine of now. One that went meanwhile, whatever it said or did not say, is as if it had not been asked."""
        await self._there.wait()
        life = self._lives
        try:
            await self._give(wish, staged)
        except Exception:
            if life == self._lives:
                raise
        if life != self._lives:
            return
        self._held[wish.name] = Held(wish.source, staged.digest, str(staged.folder))
        self._failed.pop(wish.name, None)
        self._stays.pop(wish.name, None)
        self._untidy = True

    async def _give(self, wish: AdapterWish, staged: Staged) -> None:
        before = self._held.get(wish.name)
        if before is not None and before.digest == staged.digest:
            return  # the same content from elsewhere
        is_there = before is not None or wish.name in self._unsure
        if is_there and not self._replaces:
            await self._taken(wish.name)
            is_there = False
        with self._doubted(wish.name, str(staged.folder)):
            digest = await self._engine.load_adapter(wish.name, str(staged.folder), inplace=is_there)
            if digest is not None and digest != staged.digest:
                raise AdapterError("DigestMismatch", f"{wish.source}: the engine loaded other bytes than were copied")
        self._unsure.discard(wish.name)

    async def _unload(self, name: str) -> None:
        try:
            await self._taken(name)
        except AdapterError as error:
            said = f"{error.reason}: adapter {name} is not unloaded yet: {' '.join(str(error).split())[:MESSAGE_MOST]}"
            if said != self._stays.get(name):  # once per fault, not per try
                self._stays[name] = said
                print(said, flush=True)
            await asyncio.sleep(UNLOAD_AGAIN_S)
            return
        self._stays.pop(name, None)
        self._untidy = True

    async def _taken(self, name: str) -> None:
        """The engine has it no more."""
        with self._doubted(name):
            await self._engine.unload_adapter(name)
        self._let_go(name)
        self._unsure.discard(name)

    def _let_go(self, name: str, *folders: str) -> None:
        """It is held no more; nor are these copies, if the engine has them."""
        before = self._held.pop(name, None)
        for folder in (*folders, *([before.folder] if before is not None else [])):
            self._left.pop(folder, None)
            self._left[folder] = time.monotonic()

    @contextmanager
    def _doubted(self, name: str, *folders: str) -> Iterator[None]:
        """What ends without a good answer may be done all the same: what the engine has then is what nobody may tell, also when
        the version of before is wished again. One that says that an adapter is bad keeps the one before."""
        try:
            yield
        except BaseException as error:
            if not (isinstance(error, AdapterError) and error.reason == "BadAdapter"):
                self._let_go(name, *folders)
                self._unsure.add(name)
            raise

    async def _tidy(self) -> None:
        """Copies that nobody uses go, when nobody is at work: one that is being made belongs to nobody yet."""
        if self._untidy and not self._busy:
            self._untidy = False
            held = {held.folder for held in self._held.values()}
            self._left = {} if self._replaces else self._still_read(held)
            await asyncio.to_thread(prune, self._folder, {Path(folder) for folder in (*held, *self._left)})

    def _still_read(self, held: set[str]) -> dict[str, float]:
        """Of the copies that were left: as many of the last as vLLM has places for, and whatever a stream may go on under."""
        left = {folder: since for folder, since in self._left.items() if folder not in held}
        last, now = [*left][-self._settings.most :], time.monotonic()
        return {folder: since for folder, since in left.items() if folder in last or now - since < LEFT_S}

    def _fail(self, wish: AdapterWish, reason: str, message: str) -> None:
        message = " ".join(message.split())[:MESSAGE_MOST]
        print(f"{reason}: adapter {wish.name}: {message}", flush=True)
        self._untidy = True  # a copy that the engine refused has nobody else who would remove it, and others need the disk
        self._failed[wish.name] = failed_again(self._failed.get(wish.name), wish.source, reason, message, time.monotonic())


def wished_at_start(env: Mapping[str, str]) -> tuple[AdapterWish, ...]:
    """The adapters that the pod's annotation names; none when somebody made it unreadable: the operator tells again."""
    try:
        return decode_adapters(env.get(ADAPTERS_ENV) or "[]")
    except UNREADABLE as error:
        print(f"BadAdapters: {ADAPTERS_ENV}: {error}", file=sys.stderr, flush=True)
        return ()
