"""The agent of a pod that follows: one of a worker over several nodes that is not its leader.

With vLLM it runs this node's ranks (`--headless`): ready while they run. With the torch engine it computes nothing: that
engine is one process, and runs on the leader. Then a follower holds its node's place, joins, and shows that it lives; the rest of
the group's life is the same. It never answers requests and never changes its role.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fleet_worker.agent import life as rules
from fleet_worker.agent.agent import Agent
from fleet_worker.agent.errors import GroupLostError
from fleet_worker.agent.group import Membership
from fleet_worker.agent.identity import Identity
from fleet_worker.agent.prepare import version_of
from fleet_worker.config import Role, WorkerConfig


class Follower(Agent):
    """PID 1 of such a pod."""

    def __init__(self, config: WorkerConfig, identity: Identity) -> None:
        super().__init__(config, identity)
        self._membership = Membership(identity.group_uid, identity.member, identity.leader, config.ports.group)

    async def metrics(self) -> str:
        """The agent's own; its engine's ranks are counted by the leader."""
        alive = rules.is_ready(self._life)
        return (
            f"# TYPE fleet_agent_ready gauge\nfleet_agent_ready {int(alive)}\n"
            f"# TYPE fleet_agent_member gauge\nfleet_agent_member {self._identity.member}\n"
        )

    def take_role(self, asked: Role) -> tuple[int, dict[str, object]]:
        """Never: a worker over several nodes keeps its role."""
        return 409, {**self.state(), "reason": "Follower"}

    async def _drain(self) -> dict[str, object]:
        """Not before the leader has nothing left: its engine needs these ranks until then."""
        config = self._config
        self._life = rules.drain_asked(self._life, 0.0)
        self._membership.leave()
        try:
            await asyncio.wait_for(self._membership.released.wait(), config.drain_timeout_s)
        except TimeoutError:
            return {"drained": False, "waited_s": config.drain_timeout_s}
        return {"drained": True}

    async def _prepare_and_watch(self) -> None:
        await self._prove_fabric()
        folder: Path | None = Path()
        if self._config.engine == "vllm" and not self._stop.is_set():
            folder = await self._prepared()
        if folder is None or self._stop.is_set():
            return
        try:
            await self._follow(folder)
        finally:
            await self._membership.close()

    async def _follow(self, folder: Path) -> None:
        self._membership.version = version_of(self._config.model, folder)
        address = await self._unless_stopped(self._membership.whole(self._note))
        if address is None:
            return
        ends: set[asyncio.Future[Any]] = {asyncio.create_task(self._stop.wait()), self._membership.lost}
        if self._config.engine == "vllm":
            await self._start_engine(self._place(folder, address))
            ends.add(asyncio.create_task(self._engine_lost()))
        self._life = rules.engine_checked(rules.engine_started(self._life, self._life.engine_pid), True, 0.0)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._stop.is_set():
            return
        engine, drains = self._running.process, self._life.phase == "Draining"
        if engine is not None and engine.exited.done() and not (drains and self._membership.released.is_set()):
            raise self._death(engine, engine.exited.result())
        if drains:  # the leader went first, as it should, and its engine's ranks with it; the kubelet's SIGTERM follows
            await asyncio.wait({asyncio.create_task(self._stop.wait())}, timeout=self._config.drain_timeout_s)
            return
        why = self._membership.lost.result()
        self._life = rules.failed(self._life, why)
        raise GroupLostError(why)
