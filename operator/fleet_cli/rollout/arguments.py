"""What `fleet rollout` takes. What it does is imported when it runs: nobody's --help waits for the models of the API."""

from __future__ import annotations

import argparse
import math
from functools import partial

from fleet_cli.words import named

WORDS = {
    "status": "follow the rollout until it is complete (exit 0) or failed (exit 1)",
    "history": "stored revisions of each tier",
    "undo": "go back to an earlier revision; sizes, ratio and limits on input stay",
    "pause": "begin nothing new; lost workers still come back",
    "resume": "go on",
    "restart": "replace every worker, as one rollout",
}


def add_rollout(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`fleet rollout ACTION NAME`."""
    rollout = commands.add_parser("rollout", help="look at, pause, undo or repeat a fleet's rollout in a cluster")
    actions = rollout.add_subparsers(required=True, metavar="ACTION")
    for name, words in WORDS.items():
        action = actions.add_parser(name, help=words, description=words)
        action.add_argument("name", metavar="NAME", type=named("a name"), help="the InferenceFleet")
        action.add_argument("-n", "--namespace", type=named(), help="default: the kubeconfig's")
        action.add_argument("--kubeconfig", metavar="FILE", help="default: $KUBECONFIG or ~/.kube/config")
        action.add_argument("--context", help="default: the current one")
        if name == "undo":
            action.add_argument("--tier", help="needed when the fleet has several")
            action.add_argument("--to-revision", type=int, metavar="NO", help="number in the history; default: the one before")
        if name == "status":
            action.add_argument(
                "--timeout", type=_seconds, default=600.0, metavar="S", help="stop waiting (default 600; 0 asks once)"
            )
        action.set_defaults(run=partial(_run, name))


def _run(action: str, options: argparse.Namespace) -> int:
    from fleet_cli.rollout.command import ACTIONS

    return ACTIONS[action](options)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if math.isnan(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return found
