"""Envoy, the real one, in front of workers, asking an Endpoint Picker by ext_proc where each request goes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from e2e.bench.proxies import process, wait_for

TYPES = "type.googleapis.com/envoy.extensions"
DESTINATION = "x-gateway-destination-endpoint"


def _at(address: str) -> dict[str, Any]:
    host, port = address.rsplit(":", 1)
    return {"address": {"socket_address": {"address": host, "port_value": int(port)}}}


def _cluster(name: str, addresses: Sequence[str], **more: Any) -> dict[str, Any]:
    endpoints = [{"endpoint": _at(address)} for address in addresses]
    loads = {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "1s", "load_assignment": loads, **more}


def config(
    address: str,
    admin: str,
    picker: str,
    workers: Sequence[str],
    *,
    fail_open: bool,
    body: str,
    subset: Sequence[str] | None = None,
    ca: Path | None = None,
    picker_name: str = "",
) -> dict[str, Any]:
    """As a gateway renders an InferencePool: ext_proc, and a pool whose endpoint the picker's header overrides. `ca`: the picker
    speaks TLS, with a certificate of this CA for `picker_name`."""
    filters = [
        {"name": "envoy.filters.http.ext_proc", "typed_config": _external(body, fail_open=fail_open)},
        {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{TYPES}.filters.http.router.v3.Router"}},
    ]
    if subset is not None:
        filters.insert(0, {"name": "envoy.filters.http.set_metadata", "typed_config": _hint(subset)})
    route = {"cluster": "workers", "timeout": "0s", "retry_policy": {"retry_on": "connect-failure", "num_retries": 2}}
    manager = {
        "@type": f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "route_config": {
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}]
        },
        "http_filters": filters,
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{TYPES}.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    clusters = [
        _cluster("workers", workers, load_balancing_policy=_overridden()),
        _cluster("picker", [picker], typed_extension_protocol_options=http2, **_tls(ca, picker_name)),
    ]
    return {
        "admin": _at(admin),
        "static_resources": {"listeners": [{**_at(address), "name": "gateway", "filter_chains": [chain]}], "clusters": clusters},
    }


def _tls(ca: Path | None, name: str) -> dict[str, Any]:
    if ca is None:
        return {}
    names = [{"san_type": "DNS", "matcher": {"exact": name}}]
    context = {"trusted_ca": {"filename": str(ca)}, "match_typed_subject_alt_names": names}
    config = {
        "@type": f"{TYPES}.transport_sockets.tls.v3.UpstreamTlsContext", "sni": name,
        "common_tls_context": {"validation_context": context, "alpn_protocols": ["h2"]},
    }  # fmt: skip
    return {"transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": config}}


def _external(body: str, *, fail_open: bool) -> dict[str, Any]:
    return {
        "@type": f"{TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "60s"},
        "failure_mode_allow": fail_open,
        "message_timeout": "60s",
        "processing_mode": {
            "request_header_mode": "SEND", "request_body_mode": body, "request_trailer_mode": "SEND",
            "response_header_mode": "SEND", "response_body_mode": "FULL_DUPLEX_STREAMED", "response_trailer_mode": "SEND",
        },
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }  # fmt: skip


def _hint(subset: Sequence[str]) -> dict[str, Any]:
    value = {"x-gateway-destination-endpoint-subset": list(subset)}
    return {
        "@type": f"{TYPES}.filters.http.set_metadata.v3.Config",
        "metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": value, "allow_overwrite": True}],
    }


def _overridden() -> dict[str, Any]:
    """The endpoint that the picker names; without one, the next in turn."""
    override = {
        "@type": f"{TYPES}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"header": DESTINATION}],
        "selected_host_key": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint-served"}]},
        "fallback_policy": {"policies": [_policy("round_robin", "RoundRobin")]},
    }
    extension = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    return {"policies": [{"typed_extension_config": extension}]}


def _policy(name: str, kind: str) -> dict[str, Any]:
    made = {"@type": f"{TYPES}.load_balancing_policies.{name}.v3.{kind}"}
    return {"typed_extension_config": {"name": f"envoy.load_balancing_policies.{name}", "typed_config": made}}


@contextmanager
def envoy(address: str, admin: str, folder: Path, bootstrap: dict[str, Any]) -> Iterator[str]:
    """URL of the gateway."""
    import envoy as package

    file, log = folder / "envoy.yaml", folder / "envoy.log"
    file.write_text(yaml.safe_dump(bootstrap))
    binary = Path(package.__file__).parent / "_bin/envoy"
    argv = [str(binary), "-c", str(file), "--concurrency", "1", "--log-level", "warn", "--disable-hot-restart"]
    with process(argv, log) as running:
        wait_for(f"http://{admin}/ready", running, log)
        yield f"http://{address}"


async def posted_at_once(url: str, path: str, body: bytes) -> tuple[int, bytes]:
    """(status, the whole answer). Head and body go in one piece, so that Envoy has the body before its filter can have failed."""
    host, _, port = url.removeprefix("http://").partition(":")
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1]), answer
