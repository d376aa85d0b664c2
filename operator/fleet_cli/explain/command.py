"""The shell of `fleet explain`: asks every router that it is told of, prints the record of whoever has one."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fleet_cli.errors import EXIT_FAILED, EXIT_OK, InputError, RunError
from fleet_cli.explain.told import told
from fleet_cli.streams import complain, emit
from fleet_cli.words import named

DEFAULT_URL = "http://127.0.0.1:8080"
KEY_VARIABLE = "FLEET_API_KEY"
TIMEOUT_S = 10.0
LAST = 10
WORDS_MOST = 200
"""Characters of what a library says of an error."""


def add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`fleet explain [REQUEST_ID]`."""
    explain = commands.add_parser(
        "explain",
        help="say why a request went where it went",
        description="Show what routers remember of a request: candidates, costs, choice and reason, attempts and times. "
        "A fleet with tenants needs a key with the right to read decisions; one without answers its own host alone.",
    )
    explain.add_argument(
        "request",
        nargs="?",
        type=named("a request id"),
        metavar="REQUEST_ID",
        help="x-request-id of the answer; without it the latest ones",
    )
    explain.add_argument(
        "--url", action="append", type=_url, metavar="URL", help=f"a router, may be repeated (default {DEFAULT_URL})"
    )
    explain.add_argument("--fleet", metavar="NAME", help="all routers of this fleet in a cluster, by kubectl port-forward")
    explain.add_argument("-n", "--namespace", help="of the fleet; default: the kubeconfig's")
    explain.add_argument("--kubeconfig", metavar="FILE", help="default: $KUBECONFIG or ~/.kube/config")
    explain.add_argument("--context", help="default: the current one")
    explain.add_argument(
        "--key-file", metavar="FILE", help=f"file with an API key, - for standard input (default ${KEY_VARIABLE})"
    )
    explain.add_argument("--json", action="store_true", help="print the records as they are")
    explain.set_defaults(run=_run)


def _url(text: str) -> str:
    from httpx import URL, InvalidURL

    try:
        url = URL(text)
        if url.scheme in ("http", "https") and url.host:
            return text
    except (InvalidURL, UnicodeError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not http://HOST:PORT")


def _run(options: argparse.Namespace) -> int:
    key, problems = _key(options.key_file), list[str]()
    records: list[dict[str, Any]] = []
    with _urls(options, problems) as urls:
        for url in urls:
            try:
                records += ask(url, options.request, key)
            except RunError as error:  # another router may have the record
                problems.append(str(error))
    if problems and not records:
        raise RunError("\n".join(problems))
    for problem in problems:
        complain(f"fleet: {problem}; its records are missing here")
    if not records:
        what = f"request {options.request}" if options.request else "any request"
        raise RunError(f"no router has a record of {what}: old ones are forgotten, see the router's limits in its README")
    records.sort(key=lambda record: record["at"], reverse=True)
    if options.json:
        emit(json.dumps(records, indent=2) + "\n")
        return EXIT_OK
    return _tell(records)


def _tell(records: Sequence[dict[str, Any]]) -> int:
    """In words. What else a record holds is its router's business: of another version it may be anything."""
    words, untold = list[str](), list[str]()
    for record in records:
        try:
            words.append(told(record))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
            name = ascii(record["request_id"])[1:80].rstrip("'")
            untold.append(f"the record of request {name} cannot be told in words (is the router of another version?): {error!r}")
    emit("\n".join(words))
    for what in untold:
        complain(f"fleet: {what}")
    return EXIT_FAILED if untold else EXIT_OK


@contextmanager
def _urls(options: argparse.Namespace, problems: list[str]) -> Iterator[Sequence[str]]:
    given = {"--namespace": options.namespace, "--kubeconfig": options.kubeconfig, "--context": options.context}
    where = [part for name, value in given.items() if value for part in (name, value)]
    if options.fleet is None:
        if where:
            raise InputError("-n, --kubeconfig and --context say where a fleet is: --fleet NAME is missing")
        yield options.url or [DEFAULT_URL]
        return
    if options.url:
        raise InputError("--url and --fleet exclude each other")
    from fleet_cli.explain.forward import router_urls

    with router_urls(options.fleet, where, problems) as urls:
        yield urls


def _key(file: str | None) -> str:
    """An argument would be seen by everybody on the machine."""
    where = f"${KEY_VARIABLE}" if file is None else f"--key-file {file}"
    if file == "-" and sys.stdin is None:
        raise InputError(f"{where}: standard input is closed")
    try:
        given = os.environ.get(KEY_VARIABLE, "") if file is None else sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: {getattr(error, 'strerror', None) or 'not text'}") from error
    key = given.strip()
    if not (key.isascii() and key.isprintable()):  # no header takes it, and what refuses it does not say so
        raise InputError(f"{where}: a key is one line of ASCII text")
    return key


def ask(url: str, request: str | None, key: str) -> list[dict[str, Any]]:
    """Records of one router; none when it knows nothing of the request. RunError says why there is no answer."""
    import httpx

    query: dict[str, str | int] = {"id": request} if request else {"limit": LAST}
    headers = {"x-api-key": key} if key else {}
    try:
        answer = httpx.get(
            f"{url.rstrip('/')}/debug/decisions", params=query, headers=headers, timeout=TIMEOUT_S, trust_env=False
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RunError(f"{url}: no answer of a router ({_why(error)})") from error
    try:
        said = answer.json()
    except ValueError as error:
        raise RunError(f"{url}: no answer of a router (status {answer.status_code}, no JSON)") from error
    fields: dict[str, Any] = said if isinstance(said, dict) else {}
    found, refusal = fields.get("decisions"), fields.get("error")
    if answer.status_code == 200 and isinstance(found, list) and all(_is_record(one) for one in found):
        return found
    refused: dict[str, Any] = refusal if isinstance(refusal, dict) else {}
    if answer.status_code == 404 and refused.get("code") == "no_record":
        return []
    raise RunError(f"{url}: {refused.get('message') or f'no answer of a router (status {answer.status_code})'}")


def _why(error: Exception) -> str:
    """In one line; of a certificate, what can be asked instead."""
    name, words = type(error).__name__, " ".join(str(error).split())[:WORDS_MOST]
    instead = "; where it speaks TLS, its admin port (8081) answers plain HTTP" if "SSL" in words else ""
    return f"{name}: {words}{instead}" if words else name


def _is_record(one: object) -> bool:
    """What every record has."""
    return isinstance(one, dict) and isinstance(one.get("at"), int | float) and {"request_id", "state"} <= one.keys()
