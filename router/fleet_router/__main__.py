"""`fleet-router`: the data plane as a process. Exit codes: 0 drained, 1 failed, 2 wrong arguments."""

from __future__ import annotations

import argparse
import gc
import os
import re
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from fleet_router.gossip.link import GossipSettings
from fleet_router.members import OWN_KEY, Member
from fleet_router.port import EVERY
from fleet_router.stops import ignore_reload
from fleet_router.tls import TlsFiles
from fleet_wire.peerkey import PEER_KEY_ENV, PEER_SCOPE_ENV

ADMIN_PORT = 8081
GOSSIP_PORT = 8082
MOST_PROCESSES = 64
DAY_S = 86_400
PEER = re.compile(r"^([A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})$")
FOLLOW = re.compile(r"^(kube:[a-z0-9.-]+/[a-z0-9.-]+|dir:.+)$")


def arguments(argv: list[str]) -> argparse.Namespace:
    """Command line; the environment supplies what the operator sets per pod."""
    parser = argparse.ArgumentParser(prog="fleet-router", description="OpenAI-compatible router of one InferenceFleet")
    parser.add_argument("--follow", required=True, help="kube:NAMESPACE/CONFIGMAP or dir:PATH: where endpoints.json comes from")
    parser.add_argument("--host", default=os.environ.get("FLEET_BIND_HOST") or every_address(), help="address to listen on")
    parser.add_argument("--port", type=port, default=os.environ.get("FLEET_PORT", "8080"), help="port to listen on")
    parser.add_argument(
        "--tenants", type=Path, help="file with tenants and the hashes of their API keys; without it everybody may ask"
    )
    parser.add_argument(
        "--ext-proc-port", type=port, help="also serve gateways as an Endpoint Picker (Envoy's ext_proc, gRPC) on this port"
    )
    parser.add_argument(
        "--failure-mode", choices=("FailOpen", "FailClose"), default="FailClose",
        help="what gateways are told while no endpoints are known: 503, or a failed call (they send requests anywhere)",
    )  # fmt: skip
    parser.add_argument(
        "--gossip-key",
        type=Path,
        help="file with the key that the fleet's routers share, one a line: the first signs, all are read",
    )
    parser.add_argument("--gossip-port", type=port, help="UDP port of gossip; process i of several has the i-th one behind it")
    parser.add_argument(
        "--gossip-peers", type=peers, default=(), help="NAME:PORT,...: other routers, all addresses of a name; ours does no harm"
    )  # fmt: skip
    parser.add_argument("--processes", type=int, default=1, help="routers that share the port, 1 to 64")
    parser.add_argument("--member", type=Member.parse, default=Member(), help=argparse.SUPPRESS)
    parser.add_argument("--counts", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tls-cert", type=Path, help="PEM file: TLS instead of plain HTTP; read again when it changes")
    parser.add_argument("--tls-key", type=Path, help="its key")
    parser.add_argument("--tls-client-ca", type=Path, help="clients need a certificate of this CA")
    parser.add_argument(
        "--admin-port", type=port, help=f"plain HTTP for probes and scrapes; 0: none; default: with TLS {ADMIN_PORT}, else none"
    )
    parser.add_argument(
        "--drain-timeout", type=seconds, default=os.environ.get("FLEET_DRAIN_TIMEOUT_S", "30"), metavar="SECONDS",
        help="longest wait, after SIGTERM, for answers that are under way; the pod's grace period must be longer",
    )  # fmt: skip
    given = parser.parse_args(argv)
    if not FOLLOW.match(given.follow):
        parser.error(f"--follow {given.follow}: expected kube:NAMESPACE/NAME or dir:PATH")
    if given.gossip_peers and given.gossip_key is None:
        parser.error("--gossip-peers: --gossip-key is needed as well, or anybody could speak for a router")
    if (given.tls_cert is None) != (given.tls_key is None) or (given.tls_client_ca is not None and given.tls_cert is None):
        parser.error("--tls-cert, --tls-key: both or none; --tls-client-ca needs them")
    if not 1 <= given.processes <= MOST_PROCESSES:
        parser.error(f"--processes {given.processes}: 1 to {MOST_PROCESSES}")
    return given


def port(text: str) -> int:
    """0 to 65535; ArgumentTypeError for anything else: the system takes a larger one for another port."""
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65_535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return int(text)


def every_address() -> str:
    """All that this machine has, IPv4's as well. Which of them probes and clients use nobody tells a pod:
    the API server's may be a name, and a Service may have both."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as found:
            found.bind((EVERY, 0))
    except OSError:  # a kernel without IPv6
        return "0.0.0.0"
    return EVERY


def peers(text: str) -> tuple[tuple[str, int], ...]:
    """NAME:PORT,... as pairs; ArgumentTypeError for anything else."""
    found = []
    for one in text.split(","):
        matched = PEER.match(one)
        if matched is None or int(matched[2]) > 65_535:
            raise argparse.ArgumentTypeError(f"{one!r} is not NAME:PORT")
        found.append((matched[1].strip("[]"), int(matched[2])))
    return tuple(found)


def seconds(text: str) -> float:
    """0 to a day; ArgumentTypeError for anything else."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= DAY_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 to {DAY_S}")
    return found


def gossip_of(given: argparse.Namespace) -> GossipSettings | None:
    """None without a key: no gossip. Process i of several has the i-th port; siblings need none. The file of the environment is
    for pods that were given no key for gossip alone; a supervisor's own one is for its processes."""
    own = given.gossip_key is None or str(given.gossip_key).startswith(OWN_KEY)
    shared = os.environ.get(PEER_KEY_ENV) if own else None
    if given.gossip_key is None and not shared:
        return None
    member: Member = given.member
    peers = tuple((name, port + i) for name, port in given.gossip_peers for i in range(member.size))
    first = given.gossip_port or (GOSSIP_PORT if given.gossip_peers or shared else 0)
    unix = member.name("gossip") if member.size > 1 else b""
    return GossipSettings(
        given.gossip_key, given.host, first + member.index if first else 0, peers, first, member.size, unix,
        member.siblings("gossip"), Path(shared) if shared else None, os.environ.get(PEER_SCOPE_ENV, ""),
    )  # fmt: skip


def tls_of(given: argparse.Namespace) -> TlsFiles | None:
    """None: plain HTTP."""
    return None if given.tls_cert is None else TlsFiles(given.tls_cert, given.tls_key, given.tls_client_ca)


def admin_port_of(given: argparse.Namespace) -> int:
    """0: none."""
    asked: int | None = given.admin_port
    return asked if asked is not None else ADMIN_PORT if given.tls_cert is not None else 0


FILES_MOST = 16_384
"""Each client that waits takes two, and idle connections to workers some more."""


def files() -> None:
    """As many open files as we may have: what a process begins with (1,024 under systemd) is less than our clients need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES_MOST if hard == resource.RLIM_INFINITY else min(hard, FILES_MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


GC_OBJECTS = (20_000, 20, 50)
"""Requests leave no cycles behind, only connections do: to look for them as often as Python does costs 4 % of the CPU."""
SWITCH_S = 0.0005
"""Threads beside the loop (KV events, spans) give the interpreter back after so long at the most, not after Python's 5 ms."""


TUNABLES = "GLIBC_TUNABLES"
HUGE_PAGES = "glibc.malloc.hugetlb=1"
HUGE_PAGES_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def tunables_needed(given: str | None, mode: str) -> str:
    """What GLIBC_TUNABLES must be for what is allocated at a stretch to be asked for in huge pages; empty: nothing to do, as
    somebody has set it, or the kernel gives them to all, or to nobody."""
    if "[madvise]" not in mode or HUGE_PAGES.partition("=")[0] in (given or ""):
        return ""
    return f"{given}:{HUGE_PAGES}" if given else HUGE_PAGES


def huge_pages() -> None:
    """Where huge pages are for those who ask, ask: in pages of 4 KiB a look into the prefix index mostly waits for the page's own
    address. The C library takes this from the environment as a process begins, so that this one begins again."""
    with suppress(OSError):  # no Linux, or one without them
        if needed := tunables_needed(os.environ.get(TUNABLES), HUGE_PAGES_MODE.read_text()):
            os.environ[TUNABLES] = needed
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - itself


def main() -> int:
    """Serve until told to stop."""
    # what follows takes a second, in which the first process of a container would not even hear it
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    ignore_reload()
    given = arguments(sys.argv[1:])
    huge_pages()
    import uvloop

    from fleet_router.process import Router, Settings
    from fleet_router.supervisor import Supervisor, end_with_parent

    files()
    if given.processes > 1 and given.member.size == 1:
        supervisor = Supervisor(sys.argv[1:], given.host, given.port, given.processes)
        return uvloop.run(supervisor.run(own_key=given.gossip_key is None))
    if given.member.size > 1:
        end_with_parent()
    settings = Settings(
        given.follow,
        given.host,
        given.port,
        given.tenants,
        gossip_of(given),
        given.ext_proc_port,
        given.failure_mode,
        given.member,
        tls_of(given),
        admin_port_of(given),
        given.drain_timeout,
        given.counts,
    )
    gc.freeze()
    gc.set_threshold(*GC_OBJECTS)
    sys.setswitchinterval(SWITCH_S)
    return uvloop.run(Router(settings).run())


if __name__ == "__main__":
    sys.exit(main())
