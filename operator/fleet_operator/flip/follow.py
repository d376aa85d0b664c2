"""Follows the workers that change their role: tells them, hears what they say, has their new role proven. Asks those of whom it
is doubtful which one they have.

Every look starts from what is observed; nothing that is kept between looks is needed, but a proof that was given is not asked
again while the worker says that it serves in that role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from fleet_api.v1alpha1 import InferenceFleet
from fleet_operator.cluster.interface import CONTROLLER_REVISION, Object
from fleet_operator.flip.asking import AGENT_S, WORD_MOST, AgentState, Answer, Ask, open_ask, state_of
from fleet_operator.flip.proof import OUTPUT_TOKENS, PROMPT_TOKENS, Canary, Verdict, prove
from fleet_operator.older import served_name
from fleet_operator.render.network import port_of
from fleet_planner.flip import other
from fleet_planner.roles import Role
from fleet_planner.types import FlipReport, ObservedPod
from fleet_worker.config import Ports

DEFAULT_PORTS = {"agent": Ports().agent, "http": Ports().http}
Live = Mapping[tuple[str, str], Object]
"""(kind, name) → object."""
Reports = Mapping[str, FlipReport]
"""By pod uid."""
NEVER = frozenset({400, 404, 405, 409})
"""Answers to POST /role that another try does not change; 409 only with one of the reasons below."""
FOR_GOOD = frozenset({"Draining", "Failed", "EngineKeepsRole"})
AT_ONCE = 32
"""Doubtful workers that are asked at the same time; of those that change their role there is one in a tier."""


class FlipFollower:
    """Talks to workers of all fleets."""

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[Ask]] = open_ask) -> None:
        self._connect = connect

    async def follow(
        self, fleet: InferenceFleet, pods: Sequence[ObservedPod], live: Live, known: Reports, uids: Collection[str]
    ) -> dict[str, FlipReport]:
        """What is known now of those `uids` that are told a role. `pods`: all workers of a fleet; `live`: their objects."""
        moving = [pod for pod in pods if pod.flipping is not None and pod.uid in uids and _has_agent(pod)]
        async with self._connect() as ask:
            looks = [self._look(ask, fleet, pod, pods, live, known.get(pod.uid, FlipReport())) for pod in moving]
            found = await asyncio.gather(*looks)
        return {pod.uid: report for pod, report in zip(moving, found, strict=True)}

    async def hear(
        self, pods: Sequence[ObservedPod], live: Live, known: Reports, doubtful: Collection[str]
    ) -> dict[str, FlipReport]:
        """What those of the `doubtful` uids say that are not told a role."""
        asked = [pod for pod in pods if pod.flipping is None and pod.uid in doubtful and _has_agent(pod)]
        slots = asyncio.Semaphore(AT_ONCE)
        async with self._connect() as ask:
            found = await asyncio.gather(*(self._hear(ask, pod, live, known, slots) for pod in asked))
        return {pod.uid: report for pod, report in zip(asked, found, strict=True) if report is not None}

    async def _hear(self, ask: Ask, pod: ObservedPod, live: Live, known: Reports, slots: asyncio.Semaphore) -> FlipReport | None:
        """Which role it says that it has; one that does not answer says what it said before, if anything."""
        async with slots:
            state = state_of(await ask(f"{base(pod, live, 'agent')}/state", within_s=AGENT_S), pod.uid)
        return FlipReport(state.role, state.phase) if state is not None else known.get(pod.uid)

    async def _look(
        self, ask: Ask, fleet: InferenceFleet, pod: ObservedPod, pods: Sequence[ObservedPod], live: Live, before: FlipReport
    ) -> FlipReport:
        """A proof is of the engine that gave it: a container that began anew meanwhile has the role of its label again."""
        if before.refused or before.problem:
            return before
        state = state_of(await ask(f"{base(pod, live, 'agent')}/state", within_s=AGENT_S), pod.uid)
        if state is None or pod.flipping is None:
            return replace(before, proof="")
        report = FlipReport(state.role, state.phase, problem=state.flip_problem)
        if state.role == pod.flipping and state.phase == "Serving":
            if before.proof:
                return before
            verdict = await self._prove(ask, fleet, pod, pod.flipping, pods, live)
            return replace(report, proof=verdict.proof, problem=verdict.problem[:WORD_MOST])
        if state.role != pod.flipping and state.phase != "FlippingRole" and not pod.serving:
            answer = await ask(f"{base(pod, live, 'agent')}/role", {"role": pod.flipping}, within_s=AGENT_S)
            return replace(report, refused=_refusal(answer, state))
        return report

    async def _prove(
        self, ask: Ask, fleet: InferenceFleet, pod: ObservedPod, role: Role, pods: Sequence[ObservedPod], live: Live
    ) -> Verdict:
        partners = [one for one in pods if _is_partner(one, pod, role)]
        partner = min(partners, key=lambda one: (one.busy or 0.0, one.name), default=None)
        spec = fleet.spec
        stored = (obj for (kind, _), obj in live.items() if kind == CONTROLLER_REVISION.kind)
        canary = Canary(
            served_name(fleet, (pod.tier, pod.revision), stored),
            f"{pod.uid}/{pod.flip_since}",
            prompt_tokens=max(1, min(PROMPT_TOKENS, spec.engine.block_tokens - 1)),
            output_tokens=min(OUTPUT_TOKENS, spec.limits.max_output_tokens),
        )
        where = base(partner, live, "http") if partner is not None else None
        return await prove(ask, base(pod, live, "http"), role, where, canary)


def _has_agent(pod: ObservedPod) -> bool:
    """It can be asked, and it is worth it."""
    return not pod.terminating and pod.ip is not None


def _is_partner(one: ObservedPod, pod: ObservedPod, role: Role) -> bool:
    """It serves in the role that the flipped worker has to work with."""
    fits = one.tier == pod.tier and one.compat == pod.compat and one.role == other(role) and one.uid != pod.uid
    return fits and one.flipping is None and one.serving and one.ready and one.ip is not None


def _refusal(answer: Answer | None, state: AgentState) -> str:
    """Why the worker will never take the role, in words; empty when it does, or when it may be asked again."""
    if answer is None or answer.status not in NEVER:
        return ""
    reason = str(answer.json().get("reason", ""))[:100]
    if answer.status == 409 and reason not in FOR_GOOD:
        return ""
    return f"its agent ({state.phase}) answers {answer.status} {reason}".rstrip()


def base(pod: ObservedPod, live: Live, name: str) -> str:
    """Where a worker's agent or engine answers, as its pod declares it."""
    port = port_of(live.get(("Pod", pod.name), {}), name, DEFAULT_PORTS[name])
    address = pod.ip or ""
    return f"http://{f'[{address}]' if ':' in address else address}:{port}"
