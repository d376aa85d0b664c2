"""What `helm test` says about an installation."""

import asyncio

from fleet_operator.cluster.interface import ForbiddenError, NotFoundError
from fleet_operator.cluster.memory import MemoryCluster
from fleet_operator.installed import missing
from fleet_operator.reconciler import CHILDREN


class Partly:
    """An API server without one CRD, that lets nobody see pods of one namespace."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self._store = MemoryCluster()

    async def list(self, kind, namespace, labels):
        self.asked.append((kind.plural, namespace))
        if kind.plural == "workerpools":
            raise NotFoundError("the server could not find the requested resource")
        if (kind.plural, namespace) == ("pods", "b"):
            raise ForbiddenError("pods is forbidden")
        return await self._store.list(kind, namespace, labels)


def test_every_kind_of_every_namespace_is_asked_for_and_each_failure_has_a_line():
    cluster = Partly()
    assert asyncio.run(missing(cluster, ["a", "b"])) == [
        "workerpools in a: NotFound: the server could not find the requested resource",
        "workerpools in b: NotFound: the server could not find the requested resource",
        "pods in b: Forbidden: pods is forbidden",
    ]
    assert {namespace for _, namespace in cluster.asked} == {"a", "b"}
    assert len(cluster.asked) == 2 * (1 + len(CHILDREN))


def test_no_namespace_means_all():
    cluster = Partly()
    assert [line.split(":")[0] for line in asyncio.run(missing(cluster, []))] == ["workerpools in all namespaces"]
    assert {namespace for _, namespace in cluster.asked} == {None}
