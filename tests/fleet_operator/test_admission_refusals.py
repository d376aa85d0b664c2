"""An admission webhook or a policy refuses what the operator writes, or does not answer: who is told what, and what goes on."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from fleet_operator.cluster.interface import (
    DEPLOYMENT,
    EVENT,
    FLEET,
    PDB,
    POD,
    SERVICE,
    ClusterError,
    CredentialsRefusedError,
    ForbiddenError,
    InvalidError,
    Kind,
    UnavailableError,
)
from tests.fleet_operator.test_admission_changes import play
from tests.fleet_operator.world import NAMESPACE, World, manifest

WHO = 'User "system:serviceaccount:sys:operator" cannot create resource "pods" in API group "" in the namespace "ml"'
POD_SECURITY = 'violates PodSecurity "restricted:latest": hostPath volumes (volume "model")'
ESCALATES = 'user "system:serviceaccount:sys:operator" (groups=[]) is attempting to grant RBAC permissions not currently held'


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ForbiddenError(f'pods "x" is forbidden: {POD_SECURITY}'), "Refused"),
        (ForbiddenError('pods "x" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi'), "Refused"),
        (ForbiddenError('pods "x" is forbidden: failed quota: q: must specify limits.memory for: worker'), "Refused"),
        (ForbiddenError('admission webhook "validation.gatekeeper.sh" denied the request: no team'), "Refused"),
        (InvalidError("pods \"x\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no"), "Refused"),
        (InvalidError('Pod "x" is invalid: spec.containers[0].image: Required value'), "Invalid"),
        (ForbiddenError(f"pods is forbidden: {WHO}"), "Forbidden"),
        (ForbiddenError(f'roles "f-router" is forbidden: {ESCALATES}'), "Forbidden"),
        (ForbiddenError('pods "x" is forbidden: cannot set blockOwnerDeletion if an ownerReference refers to'), "Forbidden"),
        (ForbiddenError('pods "x" is forbidden: exceeded quota: gpus'), "QuotaExceeded"),
        (CredentialsRefusedError("Unauthorized"), "Unauthorized"),
    ],
)
def test_a_write_that_a_policy_refuses_is_told_from_one_without_the_right_to_it(error: ClusterError, reason: str):
    """Both were Forbidden: who looked that up checked the operator's rights, which were all there, and applied its chart."""

    async def go() -> None:
        world = World()
        world.api.refuse = lambda verb, kind, name: error if kind == POD else None
        await world.user.apply(manifest())
        for _ in range(3):
            await world.step()
        assert any(line.startswith(f"Warning {reason} Pod f-t-") for line in await world.events()), await world.events()

    play(go)


NO_ANSWER = 'Internal error occurred: failed calling webhook "mservice.elbv2.k8s.aws": failed to call webhook: no endpoints'


@pytest.mark.parametrize("kind", [SERVICE, DEPLOYMENT, PDB], ids=lambda kind: kind.kind)
def test_a_webhook_that_does_not_answer_for_one_kind_keeps_nobody_from_serving(kind: Kind):
    """It is answered 500, as by an API server that is down: no worker was made, and none in the place of one that failed, for as
    long as a load balancer's webhook for Services was away."""

    async def go() -> None:
        world = World()
        world.api.refuse = lambda verb, of, name: UnavailableError(NO_ANSWER) if (of, verb) == (kind, "create") else None
        await world.user.apply(manifest())
        for _ in range(6):
            world.now += 15
            await world.step()
        assert await world.workers() == {"prefill": 1, "decode": 2}
        assert NO_ANSWER in (await world.condition("Provisioned"))["message"]
        for pod in await world.store.list(POD, NAMESPACE):
            await world.user.delete(POD, NAMESPACE, pod["metadata"]["name"], grace_s=0)
        for _ in range(4):
            world.now += 15
            await world.step()
        assert await world.workers() == {"prefill": 1, "decode": 2}
        world.api.refuse = lambda verb, of, name: None
        for _ in range(4):
            world.now += 15
            await world.step()
        assert (await world.condition("Ready"))["status"] == "True"

    play(go)


def test_webhooks_that_answer_for_nothing_cost_two_requests_a_pass():
    """Each may take half a minute until it is given up, and routers have to hear of what happens meanwhile."""

    async def go() -> None:
        world, asked = World(), list[str]()

        def refuse(verb: str, kind: Kind, name: str) -> ClusterError | None:
            if kind in (FLEET, EVENT):
                return None
            asked.append(kind.kind)
            return UnavailableError(NO_ANSWER)

        world.api.refuse = refuse
        await world.user.apply(manifest())
        for _ in range(4):
            asked.clear()
            world.now += 60
            await world.touch()
            assert len(asked) == 2

    play(go)


@pytest.mark.parametrize("kind", [DEPLOYMENT, POD], ids=lambda kind: kind.kind)
def test_a_refusal_whose_words_come_in_any_order_is_told_once(kind: Kind):
    """An API server lists what a MutatingAdmissionPolicy may not change, and webhooks what they are against, in the order of a
    map, another one each time. Each was news: a status, an event and a pass at once, about two of each in a second, for ever."""
    order = random.Random(1)

    def words() -> str:
        fields = [f".spec.template.spec.{name}" for name in order.sample(["tolerations", "imagePullSecrets[0]", "os"], 3)]
        return f"policy 'p' with binding 'b' denied request: may not mutate atomic structs: {', '.join(fields)}"

    async def go() -> None:
        world, asked = World(), list[str]()

        def refuse(verb: str, of: Kind, name: str) -> ClusterError | None:
            return ForbiddenError(asked.append(name) or words()) if of == kind else None

        world.api.refuse = refuse
        await world.user.apply(manifest())
        for _ in range(40):
            await world.step()
        asked.clear()
        written = [write for _ in range(60) for write in await world.step()]
        assert (written, Counter(asked).most_common(1)[0][1] <= 20) == ([], True)
        assert "may not mutate" in (await world.condition("Provisioned"))["message"]
        world.api.refuse = lambda verb, of, name: ForbiddenError("denied request: another") if of == kind else None
        for _ in range(20):
            await world.step()
        assert "denied request: another" in (await world.condition("Provisioned"))["message"]

    play(go)
