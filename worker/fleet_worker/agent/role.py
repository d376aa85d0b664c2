"""POST /role: a worker is told to take the other role. What is asked, and what the answer is. Pure.

The worker empties itself as for a drain, so that no request and no lease of the old role is left, gives a first token again, and
is ready in its new role. The torch engine is the same process in both roles. vLLM is a producer or a consumer of KV from its
start, so its process is started anew, in the same container: node, image and model are there, and nobody is asked for anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from fleet_worker.agent.life import Life
from fleet_worker.config import Role

MAX_BODY_BYTES = 1024


class RoleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /role."""

    role: Role


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer's status; `reason` says why a 409 is one, `begin` that the change begins with it."""

    status: int
    reason: str = ""
    begin: bool = False


def parse_role(body: bytes) -> Role:
    """The asked role; msgspec.DecodeError names what is wrong."""
    return msgspec.json.decode(body, type=RoleRequest).role


def judge(life: Life, role: Role, changing_to: Role | None, asked: Role, *, keeps: bool = False) -> Verdict:
    """200: it has the role; 202: it is on its way; 409: not now (NotServing: ask again), or never (Draining, Failed;
    EngineKeepsRole: `keeps`, of a worker whose engine spans nodes). After a
    change that failed either role can be asked for: the other one is tried again, and with its own the worker serves again once a
    first token came."""
    if life.phase in ("Draining", "Failed"):
        return Verdict(409, life.phase)
    if life.phase == "FlippingRole" and life.flip_problem:
        return Verdict(202, begin=True)
    if life.phase == "FlippingRole":
        return Verdict(202) if asked == changing_to else Verdict(409, "FlippingRole")
    if asked == role:
        return Verdict(200)
    if keeps:
        return Verdict(409, "EngineKeepsRole")
    return Verdict(202, begin=True) if life.phase == "Serving" else Verdict(409, "NotServing")
