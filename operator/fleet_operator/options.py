"""The command line of the operator, as typed options."""

from __future__ import annotations

import argparse
import math
import os
import re
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from fleet_api.v1alpha1.base import DNS_LABEL, DNS_SUBDOMAIN, LABEL_KEY
from fleet_operator.leader.lease import Terms
from fleet_operator.settings import Platform
from fleet_operator.territory import Selection, parse_labels

MOUNTED_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
DEFAULT_NAMESPACE = "inferencefleet-system"
DEFAULT_LEASE = "inferencefleet-operator"
LABEL = re.compile(LABEL_KEY)
NAMESPACE = re.compile(rf"(?=.{{1,63}}\Z){DNS_LABEL}")
OBJECT = re.compile(rf"(?=.{{1,253}}\Z){DNS_SUBDOMAIN}")
HOST = re.compile(r"(?=.{1,253}\Z)(\*\.)?[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?(\.[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?)*")


@dataclass(frozen=True, slots=True)
class WebhookOptions:
    """The admission webhook of this process."""

    port: int
    names: frozenset[str]
    """What the API server calls it: DNS names and addresses."""
    secret: str
    configuration: str


@dataclass(frozen=True, slots=True)
class Options:
    """All of it."""

    kubeconfig: Path | None = None
    platform: Platform = field(default_factory=Platform)
    selection: Selection = field(default_factory=Selection)
    installation: str | None = None
    """None: nothing is claimed (an operator outside of a cluster that was given no name)."""
    namespace: str = DEFAULT_NAMESPACE
    election: Terms | None = None
    lease: str = DEFAULT_LEASE
    health_port: int = 8081
    fleet_metrics: bool = True
    """Whether /metrics shows each fleet by its name."""
    log_format: Literal["text", "json"] = "text"
    webhook: WebhookOptions | None = None


def parse_options(argv: list[str]) -> Options:
    """Exits with 2 and a sentence when an argument is wrong."""
    parser = _parser()
    given = parser.parse_args(argv)
    if given.kubeconfig is not None and not given.kubeconfig.is_file():
        parser.error(f"--kubeconfig {given.kubeconfig}: no such file")
    if given.drain_timeout is not None and not 0 < given.drain_timeout < math.inf:
        parser.error("--drain-timeout must be positive")
    for taint in given.sick_taint:
        if not LABEL.match(taint):  # it would never be found
            parser.error(f"--sick-taint {taint}: the key of a taint is asked for, without value and effect")
    for name in ("health_port", "webhook_port"):
        if not 0 <= getattr(given, name) <= 65535:
            parser.error(f"--{name.replace('_', '-')} must be a port, or 0 for off")
    try:
        labels = parse_labels(given.namespace_selector) if given.namespace_selector is not None else {}
        selection = Selection(tuple(dict.fromkeys(given.namespace)), labels)
        terms = Terms(given.lease_duration, given.renew_deadline, given.retry_period)
        webhook = _webhook(given)
    except ValueError as error:
        parser.error(str(error))
    return Options(
        kubeconfig=given.kubeconfig,
        platform=_platform(given),
        selection=selection,
        installation=_installation(given),
        namespace=given.operator_namespace,
        election=terms if given.leader_elect else None,
        lease=given.lease_name,
        health_port=given.health_port,
        fleet_metrics=given.fleet_metrics,
        log_format=given.log_format,
        webhook=webhook,
    )


def _namespace(text: str) -> str:
    if not NAMESPACE.fullmatch(text):  # an empty one would be all namespaces
        raise argparse.ArgumentTypeError(f"{text!r}: no namespace can have this name")
    return text


def _object(text: str) -> str:
    if not OBJECT.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r}: no object can have this name")
    return text


def own_namespace() -> str | None:
    """The namespace of the pod that this process runs in; None outside of one."""
    try:
        return os.environ.get("POD_NAMESPACE") or MOUNTED_NAMESPACE.read_text().strip() or None
    except OSError:
        return None


def _installation(given: argparse.Namespace) -> str | None:
    if given.installation:
        return str(given.installation)
    return f"{given.operator_namespace}/{given.lease_name}" if own_namespace() is not None else None


def _webhook(given: argparse.Namespace) -> WebhookOptions | None:
    if given.webhook_port == 0:
        return None
    where = given.operator_namespace
    service = [f"{given.webhook_service}.{where}.svc", f"{given.webhook_service}.{where}.svc.cluster.local"]
    names = [*service, *given.webhook_name]
    return WebhookOptions(given.webhook_port, frozenset(map(_host, names)), given.webhook_secret, given.webhook_configuration)


def _host(name: str) -> str:
    """A DNS name or an address in the one form that a certificate gives back: of any other each look would make a new
    certificate. ValueError."""
    if HOST.fullmatch(name):
        return name
    try:
        return str(ip_address(name if "%" not in name else ""))  # a certificate has no scope (fe80::1%eth0)
    except ValueError:
        raise ValueError(
            f"--webhook-name {name}: a DNS name (punycode where it is not ASCII) or an address is asked for"
        ) from None


def _platform(given: argparse.Namespace) -> Platform:
    defaults = Platform()
    return Platform(
        worker_image=given.worker_image or defaults.worker_image,
        router_image=given.router_image or defaults.router_image,
        router_pull_secrets=tuple(dict.fromkeys(given.router_pull_secret)),
        renew_routers=given.renew_routers,
        makes_keys=not given.no_peer_keys,
        operator_namespace=own_namespace(),
        drain_most_s=given.drain_timeout or defaults.drain_most_s,
        sick_taints=(*defaults.sick_taints, *given.sick_taint),
        sick_conditions=(*defaults.sick_conditions, *given.sick_condition),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fleet-operator", description="reconciles InferenceFleets")
    add = parser.add_argument
    add("--kubeconfig", type=Path, help="credentials; default: the pod's service account")
    add("--worker-image", help="image of workers whose spec names none")
    add("--router-image", help="image of routers that are made from now on")
    add("--router-pull-secret", action="append", default=[], type=_object, metavar="NAME",
        help="Secret with credentials for that image, in each namespace with fleets; repeatable")  # fmt: skip
    add("--renew-routers", action="store_true", help="make those that are there anew, too, one by one, as this version does")
    add("--no-peer-keys", action="store_true", help="make no Secrets: fleets name theirs in spec.peerKey, or go without")
    add("--drain-timeout", type=float, help="most seconds that any worker may take to drain; default: an hour")
    add("--sick-taint", action="append", default=[], metavar="KEY",
        help="taint of nodes whose devices fail, besides those known; repeatable")  # fmt: skip
    add("--sick-condition", action="append", default=[], metavar="TYPE",
        help="node condition that says so when True (TYPE=False: when False); repeatable")  # fmt: skip
    group = parser.add_argument_group("which fleets").add_argument
    group("--namespace", action="append", default=[], type=_namespace, help="a namespace to watch; repeatable; default: all")
    group("--namespace-selector", metavar="KEY=VALUE,...", help="watch namespaces with these labels, instead of --namespace")
    group("--installation", metavar="NAME", help="unique name of this installation: it claims its namespaces under that name; "
          "default: in a pod OPERATOR-NAMESPACE/LEASE-NAME, else nothing is claimed")  # fmt: skip
    group = parser.add_argument_group("several replicas").add_argument
    group("--leader-elect", action="store_true", help="reconcile only while holding a Lease")
    group("--operator-namespace", default=own_namespace() or DEFAULT_NAMESPACE, type=_namespace,
          help="namespace of the Lease and of the Secret "
          "with certificates; default: the pod's own")  # fmt: skip
    group("--lease-name", default=DEFAULT_LEASE, help=f"default: {DEFAULT_LEASE}")
    terms = Terms()
    group("--lease-duration", type=int, default=terms.lease_s, metavar="S", help=f"2 to 600; default: {terms.lease_s}")
    group("--renew-deadline", type=float, default=terms.renew_s, metavar="S", help="stop writing when the lease could not be "
          f"renewed for so long; at most 0.9 of its duration; default: {terms.renew_s:g}")  # fmt: skip
    group("--retry-period", type=float, default=terms.retry_s, metavar="S", help=f"between attempts; default: {terms.retry_s:g}")
    group = parser.add_argument_group("what it says").add_argument
    group("--health-port", type=int, default=8081, help="/healthz, /readyz and /metrics; 0: off; default: 8081")
    group("--no-fleet-metrics", dest="fleet_metrics", action="store_false",
          help="/metrics shows no fleet by its name: whoever reaches the port sees them else")  # fmt: skip
    group("--log-format", choices=["text", "json"], default="text", help="default: text")
    group = parser.add_argument_group("admission").add_argument
    group("--webhook-port", type=int, default=0, help="HTTPS for the API server; 0: off, the default")
    group("--webhook-service", default="inferencefleet-webhook", metavar="NAME", help="Service of that port, in the operator's "
          "namespace; default: inferencefleet-webhook")  # fmt: skip
    group("--webhook-name", action="append", default=[], metavar="HOST", help="another name or address of it; repeatable")
    group("--webhook-secret", default="inferencefleet-webhook", metavar="NAME", help="Secret for its certificates, in the "
          "operator's namespace; default: inferencefleet-webhook")  # fmt: skip
    group("--webhook-configuration", default="inferencefleet", metavar="NAME", help="the webhook configurations that are told "
          "whom to trust; default: inferencefleet")  # fmt: skip
    return parser
