"""`fleet` (also `kubectl fleet`): the command line. Commands import what they need when they run."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from fleet_cli.errors import EXIT_KILLED, EXIT_OK, EXIT_UNREAD, CliError, InputError
from fleet_cli.explain.command import add_explain
from fleet_cli.interrupts import interruptible
from fleet_cli.rollout.arguments import add_rollout
from fleet_cli.streams import complain, emit, open_streams, silence, unwritten

DEFAULT_PORT = 8080


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit code 0 when it did what was asked, 2 when the input is wrong, 1 for any other failure, and as for
    programs that a signal ended: 130 when it was interrupted, 141 when nobody read its output."""
    open_streams()
    try:
        with interruptible():
            code = _run(arguments)
        emit("")  # what argparse wrote
    except BrokenPipeError:
        code = EXIT_UNREAD
    except CliError as error:
        complain(f"fleet: {error}")
        code = error.exit_code
    except KeyboardInterrupt:
        complain("fleet: interrupted")
        code = EXIT_KILLED
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return code
    silence(sys.stdout)
    return code


def _run(arguments: Sequence[str] | None) -> int:
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as ended:  # --help, --version, or an option that cannot be used
        if ended.code:
            raise
        return EXIT_OK
    except BrokenPipeError:
        raise
    except OSError as error:  # argparse up to Python 3.11.3 does not expect that --help cannot be written
        raise unwritten(error) from error
    code: int = options.run(options)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fleet", description="Disaggregated LLM inference: fleets of prefill and decode workers."
    )
    parser.add_argument("--version", action="version", version=f"inferencefleet {version('inferencefleet')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_up(commands)
    validate = commands.add_parser("validate", help="say what the API server would say about manifests")
    validate.add_argument("files", nargs="+", metavar="FILE", help="manifest of an InferenceFleet; - is standard input")
    validate.set_defaults(run=_validate)
    add_rollout(commands)
    add_explain(commands)
    crds = commands.add_parser("crds", help="print the CustomResourceDefinitions, for kubectl apply --server-side -f -")
    crds.set_defaults(run=_crds)
    return parser


def _add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    up = commands.add_parser(
        "up",
        help="run a fleet on this machine, without cluster and GPU",
        description="Run a fleet on this machine: the operator on an in-memory store, every pod as a local process. "
        "Ctrl-C drains and stops everything, a second Ctrl-C kills.",
    )
    up.add_argument("file", nargs="?", metavar="FILE", help="manifest of an InferenceFleet; without it a tiny bundled fleet")
    up.add_argument("--once", action="store_true", help="send real requests, print the proof that KV moved, stop; exit 0 or 1")
    up.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, help=f"port of the endpoint on 127.0.0.1 (default {DEFAULT_PORT})"
    )
    up.add_argument("--state", type=_folder, metavar="DIR", help="keep logs and volumes here (default: a folder that is removed)")
    up.add_argument(
        "--pvc", action="append", default=[], type=_claim, metavar="CLAIM=DIR", help="folder that stands in for a pvc:// claim"
    )
    up.add_argument(
        "--tenants", type=_folder, metavar="FILE", help="tenants and hashes of their keys: the Secret that spec.tenants names"
    )
    up.set_defaults(run=_up)


def _up(options: argparse.Namespace) -> int:
    from fleet_cli.up.command import UpOptions, up

    claims = dict(options.pvc)
    given = UpOptions(
        file=options.file, once=options.once, port=options.port, state=options.state, claims=claims, tenants=options.tenants
    )
    return up(given)


def _validate(options: argparse.Namespace) -> int:
    """Every file is judged, whatever is wrong with those before it. Warnings are those of the webhook, as kubectl prints them."""
    from fleet_api.compat import risks
    from fleet_api.structure import normalised
    from fleet_cli.manifest import read_manifest

    code, several = EXIT_OK, len(options.files) > 1
    for file in options.files:
        try:
            manifest = read_manifest(file)
        except InputError as error:
            named = str(error).startswith((file, f"cannot read {file}:"))
            complain(f"fleet: {file}: {error}" if several and not named else f"fleet: {error}")
            code = error.exit_code
            continue
        for risk in risks(normalised(manifest)):
            complain(f"Warning: {file}: {risk}" if several else f"Warning: {risk}")
        emit(f"{file}: inferencefleet.inferencefleet.io/{manifest['metadata']['name']} is valid\n")
    return code


def _crds(_options: argparse.Namespace) -> int:
    from fleet_api.crd import files

    emit("---\n".join(files().values()))
    return EXIT_OK


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65_535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 1 to 65535")
    return int(text)


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("'' is not a folder")
    try:
        found = Path(text).expanduser().absolute()
        str(found).encode()
        return found
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: there is no such home folder") from error
    except FileNotFoundError as error:  # nothing is looked up but the folder that a path begins in
        raise argparse.ArgumentTypeError(f"{text!r}: the folder that you are in is gone") from error
    except UnicodeEncodeError as error:  # manifests, logs and environments of pods hold it as text
        raise argparse.ArgumentTypeError(f"{text!r} is not text in UTF-8") from error


def _claim(text: str) -> tuple[str, Path]:
    claim, equals, folder = text.partition("=")
    if not claim or not equals or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not CLAIM=DIR")
    return claim, _folder(folder)


if __name__ == "__main__":
    sys.exit(main())
