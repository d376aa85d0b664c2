"""The user's way to the API server, as the kubeconfig has it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fleet_cli.errors import InputError

DEFAULT = "~/.kube/config"
SOCKS = "a SOCKS proxy (proxy-url, HTTPS_PROXY) needs the Python package PySocks: install it, or name an HTTP proxy"
PATIENCE_S = 2.0
"""The most of what an answer asks for (`Retry-After`), which may be an hour. The API server's own is a second."""


def opened(kubeconfig: str | None, context: str | None) -> tuple[Any, str]:
    """The Kubernetes client, and the namespace of the context. InputError: there is none that can be used."""
    from kubernetes import client, config
    from urllib3 import disable_warnings

    disable_warnings()  # who wrote insecure-skip-tls-verify need not hear of it with every request; the rest is said below
    asked = kubeconfig or os.environ.get("KUBECONFIG") or DEFAULT  # an empty variable is none, as for kubectl
    try:
        found = client.Configuration()
        with _told() as plugin:
            config.load_kube_config(config_file=asked, context=context, client_configuration=found)
        if plugin.says:
            raise InputError(f"the credential plugin: {plugin.says}")
        every, active = config.list_kube_config_contexts(config_file=asked)
        chosen = next(one for one in every if one["name"] == context) if context else active
        found.retries = _retry()
        _trim_tokens(found)
        return client.ApiClient(found), chosen["context"].get("namespace") or "default"
    except Exception as error:  # the library raises whatever a file that is none makes it stumble over
        file = f" {kubeconfig}" if kubeconfig else ""
        words = SOCKS if isinstance(error, ModuleNotFoundError) else " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"no usable kubeconfig{file}: {words}") from error


def _trim_tokens(found: Any) -> None:
    """A tokenFile ends its line, as whatever writes one does, and no header takes that."""
    refresh = found.refresh_api_key_hook

    def trimmed(configuration: Any) -> None:
        if refresh is not None:
            refresh(configuration)
        configuration.api_key = {name: key.strip() for name, key in configuration.api_key.items()}
        configuration.refresh_api_key_hook = trimmed  # a refresh puts its own there again

    found.refresh_api_key_hook = trimmed


def _retry() -> Any:
    from urllib3 import Retry
    from urllib3.response import BaseHTTPResponse

    class Impatient(Retry):
        def get_retry_after(self, response: BaseHTTPResponse) -> float | None:
            asked = super().get_retry_after(response)
            return None if asked is None else min(asked, PATIENCE_S)

    return Impatient(3, read=1, allowed_methods=["GET"])  # a write that is sent twice conflicts with itself


class _Told(logging.Handler):
    """What the library says of a plugin that failed: it logs it, and goes on to ask as nobody."""

    says = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Of one that wrote to the terminal the library has no words, and stumbles over that."""
        mute = isinstance(sys.exc_info()[1], AttributeError)
        self.says = "it failed, its words are above" if mute else record.getMessage()


@contextmanager
def _told() -> Iterator[_Told]:
    root, handler = logging.getLogger(), _Told(logging.ERROR)
    root.addHandler(handler)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
