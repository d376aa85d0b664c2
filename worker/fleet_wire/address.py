"""Host and port as URLs and Host headers have them."""

from __future__ import annotations


def in_url(host: str) -> str:
    """An IPv6 address in brackets (RFC 3986, 3.2.2): without them its port would pass for a part of it."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def authority(host: str, port: int) -> str:
    """host:port."""
    return f"{in_url(host)}:{port}"
