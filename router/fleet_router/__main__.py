"""`fleet-router`: the data plane as a process. Exit codes: 0 drained, 1 failed, 2 wrong arguments."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

FOLLOW = re.compile(r"^(kube:[a-z0-9.-]+/[a-z0-9.-]+|dir:.+)$")


def arguments(argv: list[str]) -> argparse.Namespace:
    """Command line; the environment supplies what the operator sets per pod."""
    parser = argparse.ArgumentParser(prog="fleet-router", description="OpenAI-compatible router of one InferenceFleet")
    parser.add_argument("--follow", required=True, help="kube:NAMESPACE/CONFIGMAP or dir:PATH: where endpoints.json comes from")
    parser.add_argument("--host", default=os.environ.get("FLEET_BIND_HOST", "0.0.0.0"), help="address to listen on")
    parser.add_argument("--port", type=int, default=int(os.environ.get("FLEET_PORT", "8080")), help="port to listen on")
    parser.add_argument(
        "--tenants", type=Path, help="file with tenants and the hashes of their API keys; without it everybody may ask"
    )
    parser.add_argument(
        "--ext-proc-port", type=int, help="also serve gateways as an Endpoint Picker (Envoy's ext_proc, gRPC) on this port"
    )
    parser.add_argument(
        "--failure-mode", choices=("FailOpen", "FailClose"), default="FailClose",
        help="what gateways are told while no endpoints are known: 503, or a failed call (they send requests anywhere)",
    )  # fmt: skip
    given = parser.parse_args(argv)
    if not FOLLOW.match(given.follow):
        parser.error(f"--follow {given.follow}: expected kube:NAMESPACE/NAME or dir:PATH")
    return given


def main() -> int:
    """Serve until told to stop."""
    import uvloop

    from fleet_router.process import Router, Settings

    given = arguments(sys.argv[1:])
    settings = Settings(given.follow, given.host, given.port, given.tenants, given.ext_proc_port, given.failure_mode)
    return uvloop.run(Router(settings).run())


if __name__ == "__main__":
    sys.exit(main())
