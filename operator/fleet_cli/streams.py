"""Standard streams as users hand them over: closed, full, a pipe whose reader left, an encoding that knows no umlauts."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TextIO

from fleet_cli.errors import RunError


def open_streams() -> None:
    """Closed descriptors lead nowhere, or the first file that is opened would become standard output. What the encoding of
    standard output does not have is written as an escape."""
    missing = [number for number in range(3) if not _is_open(number)]
    while missing and os.open(os.devnull, os.O_RDWR) < missing[-1]:
        pass
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - it lives as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def emit(text: str) -> None:
    """Write a command's result. RunError when it cannot be written, BrokenPipeError when nobody reads it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise unwritten(error) from error


def unwritten(error: OSError) -> RunError:
    """Standard output does not take what was to be written."""
    return RunError(f"cannot write to standard output: {error.strerror}")


def complain(text: str) -> None:
    """One line on standard error, if there is one."""
    if sys.stderr is not None:  # None would mean standard output to print()
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def silence(stream: TextIO) -> None:
    """What is still buffered goes nowhere: else the interpreter's last flush fails once more, with a traceback."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
