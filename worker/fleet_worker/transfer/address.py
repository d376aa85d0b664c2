"""Addresses as zmq writes them."""

from __future__ import annotations

import zmq

KEPT_ALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 60, zmq.TCP_KEEPALIVE_INTVL: 20, zmq.TCP_KEEPALIVE_CNT: 3}
"""Of a socket that only answers: of a peer whose node lost its power nothing else ever tells, and its connection would stay."""


def tcp_address(host: str, port: int) -> str:
    """tcp://host:port, an IPv6 address in brackets; the socket needs zmq.IPV6 for one."""
    return f"tcp://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"tcp://{host}:{port}"
