"""What ends a command early: one line for the user and an exit code."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_KILLED = 130
EXIT_UNREAD = 141


class CliError(Exception):
    """Base; the message is the one line that the user reads."""

    exit_code = EXIT_FAILED


class InputError(CliError):
    """What the user gave cannot be used: a manifest, a path, an option. Trying again unchanged does not help."""

    exit_code = EXIT_BAD_INPUT


class RunError(CliError):
    """Something of this machine or of the fleet failed: a busy port, a worker that keeps dying, a wrong answer."""
