"""Workers and routers are asked for numbers, not to remember us by."""

from __future__ import annotations

from http.cookiejar import CookieJar, DefaultCookiePolicy


def no_cookies() -> CookieJar:
    """Takes none. A client that lives as long as the process would keep what each target ever set, those that are long gone
    included, and send a target all of its own each time."""
    return CookieJar(DefaultCookiePolicy(allowed_domains=()))
