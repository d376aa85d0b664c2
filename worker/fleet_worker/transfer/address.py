"""Addresses as zmq writes them."""

from __future__ import annotations


def tcp_address(host: str, port: int) -> str:
    """tcp://host:port, an IPv6 address in brackets; the socket needs zmq.IPV6 for one."""
    return f"tcp://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"tcp://{host}:{port}"
