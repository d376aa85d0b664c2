"""`fleet-operator`: the operator as a process. Exit codes: 0 told to stop, 1 failed, 2 wrong arguments or credentials."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path


def arguments(argv: list[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="fleet-operator", description="reconciles InferenceFleets")
    parser.add_argument("--kubeconfig", type=Path, help="credentials; default: the pod's service account")
    parser.add_argument("--namespace", help="the one namespace to watch; default: all")
    parser.add_argument("--worker-image", help="image of workers whose spec names none")
    parser.add_argument("--router-image", help="image of routers")
    parser.add_argument("--drain-timeout", type=float, help="most seconds that any worker may take to drain; default: an hour")
    parser.add_argument(
        "--sick-taint",
        action="append",
        default=[],
        metavar="KEY",
        help="taint of nodes whose devices fail, besides those known; repeatable",
    )
    parser.add_argument(
        "--sick-condition", action="append", default=[], metavar="TYPE",
        help="node condition that says so when True (TYPE=False: when False); repeatable",
    )  # fmt: skip
    given = parser.parse_args(argv)
    if given.kubeconfig is not None and not given.kubeconfig.is_file():
        parser.error(f"--kubeconfig {given.kubeconfig}: no such file")
    if given.drain_timeout is not None and given.drain_timeout <= 0:
        parser.error("--drain-timeout must be positive")
    return given


def main() -> int:
    """Reconcile until told to stop."""
    given = arguments(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if given.kubeconfig is not None:
        os.environ["KUBECONFIG"] = str(given.kubeconfig.absolute())  # kopf reads it from there
    from fleet_operator.cluster.interface import ClusterError

    try:
        asyncio.run(_run(given))
    except ClusterError as error:
        print(f"{error.reason}: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


async def _run(given: argparse.Namespace) -> None:
    from fleet_operator.cluster.kube import KubeCluster
    from fleet_operator.reconciler import Reconciler
    from fleet_operator.settings import Platform
    from fleet_operator.shell_kopf import run_in_cluster
    from fleet_operator.telemetry.collect import open_telemetry

    defaults = Platform()
    platform = Platform(
        worker_image=given.worker_image or defaults.worker_image,
        router_image=given.router_image or defaults.router_image,
        operator_namespace=os.environ.get("POD_NAMESPACE") or None,
        drain_most_s=given.drain_timeout or defaults.drain_most_s,
        sick_taints=(*defaults.sick_taints, *given.sick_taint),
        sick_conditions=(*defaults.sick_conditions, *given.sick_condition),
    )
    cluster = await KubeCluster.connect(given.kubeconfig)
    try:
        async with open_telemetry() as telemetry:
            reconciler = Reconciler(cluster, platform, telemetry, namespace=given.namespace)
            await run_in_cluster(cluster, reconciler, given.kubeconfig, given.namespace)
    finally:
        await cluster.close()


if __name__ == "__main__":
    sys.exit(main())
