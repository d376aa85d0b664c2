"""Addresses as zmq writes them."""

from __future__ import annotations

import zmq

from fleet_wire.address import authority

KEPT_ALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 60, zmq.TCP_KEEPALIVE_INTVL: 20, zmq.TCP_KEEPALIVE_CNT: 3}
"""Of a socket that only answers: of a peer whose node lost its power nothing else ever tells, and its connection would stay."""


def tcp_address(host: str, port: int) -> str:
    """tcp://host:port; the socket needs zmq.IPV6 for an IPv6 address."""
    return f"tcp://{authority(host, port)}"
