"""`python -m fleet_operator.installed`: checks an installation from inside a pod, as `helm test` does.

With the operator's own account it asks for what the operator asks for at start. A CRD or a right that was just made takes a
moment until the whole API server knows it, so it asks again for a while. Exit codes: 0 complete, 1 something is missing (and
what), 2 no account.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Final

from fleet_operator.cluster.interface import FLEET, Cluster, ClusterError
from fleet_operator.cluster.kube import KubeCluster
from fleet_operator.reconciler import CHILDREN

AGAIN_S: Final = 1.0
NOBODY: Final = {"inferencefleet.io/fleet": "asked-by-helm-test"}
"""No object has this label: the answer is empty, and asking costs next to nothing in a large cluster."""


async def missing(cluster: Cluster, namespaces: Sequence[str]) -> list[str]:
    """One line for each kind that the operator could not list, in the API server's own words; no namespaces means all."""
    found = []
    for namespace in namespaces or (None,):
        for kind in (FLEET, *CHILDREN):
            try:
                await cluster.list(kind, namespace, NOBODY)
            except ClusterError as error:
                found.append(f"{kind.plural} in {namespace or 'all namespaces'}: {error.reason}: {error}")
    return found


def main() -> int:
    """Say what is missing."""
    parser = argparse.ArgumentParser(prog="fleet_operator.installed", description=__doc__)
    parser.add_argument("--namespace", action="append", default=[], help="a namespace that the operator watches; default: all")
    parser.add_argument("--within", type=float, default=20.0, help="seconds to ask again while something is missing; default: 20")
    given = parser.parse_args()
    namespaces = given.namespace
    try:
        lines = asyncio.run(_check(namespaces, given.within))
    except ClusterError as error:
        print(f"{error.reason}: {error}", file=sys.stderr)
        return 2
    for line in lines:
        print(line, file=sys.stderr)
    if not lines:
        print(f"the CRDs are served and the operator may work in {', '.join(namespaces) or 'all namespaces'}")
    return 1 if lines else 0


async def _check(namespaces: Sequence[str], within_s: float) -> list[str]:
    cluster = await KubeCluster.connect(None)
    deadline = time.monotonic() + within_s
    try:
        while True:
            lines = await missing(cluster, namespaces)
            if not lines or time.monotonic() >= deadline:
                return lines
            await asyncio.sleep(AGAIN_S)
    finally:
        await cluster.close()


if __name__ == "__main__":
    sys.exit(main())
