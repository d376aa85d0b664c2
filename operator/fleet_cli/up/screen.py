"""Showing progress: a live panel in a terminal, plain lines without control codes anywhere else."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

from fleet_cli.errors import RunError
from fleet_cli.streams import silence
from fleet_cli.up.view import PodLine, Snapshot, adapter_lines, kv_line, kv_total, role_lines, trouble_lines

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

REFRESH_PER_S = 4
PIECE = 400
"""Characters, of at most ten bytes (an escape for what the encoding does not have): a pipe that takes any bytes takes 4096."""
UNSENT = 64 * 1024
"""Characters that are kept for a reader who is late."""
LAST_WORDS_S = 5.0
"""He has that long at the end."""
NOBODY_READS = "nobody reads it"


class Screen(Protocol):
    """Where `fleet up` writes."""

    def say(self, text: str) -> None:
        """A line that stays."""
        ...

    def block(self, text: str) -> None:
        """Lines that stay, exactly as they are: something to paste."""
        ...

    def show(self, snapshot: Snapshot) -> None:
        """The newest state; may be called as often as it changes."""
        ...

    def __enter__(self) -> Screen: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def open_screen(out: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> Screen:
    """A live screen when `out` (standard output) is a terminal that can move its cursor, else plain lines."""
    out = out or sys.stdout
    live = out.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")  # there a panel is never drawn
    return LiveScreen(out, now) if live else PlainScreen(out, now)


class PlainScreen:
    """One line per change, with the seconds since the start."""

    def __init__(self, out: TextIO, now: Callable[[], float]) -> None:
        self._out, self._now, self._start = out, now, now()
        self.lost = ""
        """Why something could not be written, once that happened."""
        self._states: dict[str, str] = {}
        self._adapters: dict[str, str] = {}
        self._troubles: dict[str, str] = {}
        self._lines: list[str] = []
        self._unsent = ""

    def say(self, text: str) -> None:
        """See Screen."""
        stamp = f"[{self._now() - self._start:6.1f} s] "
        self._write("".join(f"{stamp}{line}\n" for line in text.splitlines()))

    def block(self, text: str) -> None:
        """See Screen."""
        self._write(f"\n{text}\n\n")

    def show(self, snapshot: Snapshot) -> None:
        """See Screen: says what changed since the last call."""
        states = {pod.name: _describe(pod) for pod in snapshot.pods}
        for name in [*states, *(name for name in self._states if name not in states)]:
            if self._states.get(name) != states.get(name):
                self.say(f"pod {name}: {states.get(name, 'gone')}")
        adapters = self._adapters if snapshot.stopping else adapter_lines(snapshot.status)
        for name in adapters:
            if self._adapters.get(name) != adapters[name]:
                self.say(f"adapter {name}: {adapters[name]}")
        troubles = self._troubles if snapshot.stopping else trouble_lines(snapshot.status)
        for key, words in troubles.items():
            if key not in self._troubles:  # the words alone may change with every worker
                self.say(words)
        lines = [*role_lines(snapshot.status), kv_line(kv_total(snapshot.status))]
        if snapshot.ready and not snapshot.stopping and lines != self._lines:
            self.say("; ".join(lines))
            self._lines = lines
        self._states, self._adapters, self._troubles = states, adapters, troubles
        self._write("")

    def _write(self, text: str) -> None:
        """A fleet that runs is worth more than its log, and this thread runs it: what a pipe does not take at once waits for the
        next call."""
        if len(self._unsent) + len(text) > UNSENT:
            self.lost = self.lost or NOBODY_READS
        else:
            self._unsent += text
        while self._unsent and _takes(self._out):
            piece, self._unsent = self._unsent[:PIECE], self._unsent[PIECE:]
            self._put(piece)

    def _put(self, text: str) -> None:
        """What a full disk does not take is lost, and said at the end."""
        try:
            self._out.write(text)
            self._out.flush()
        except BrokenPipeError:
            # The reader left (`fleet up | head`): nobody would see a fleet that runs on, so stop as with Ctrl-C.
            silence(self._out)
            signal.raise_signal(signal.SIGINT)
        except (OSError, ValueError) as error:
            self.lost = self.lost or str(getattr(error, "strerror", None) or error)

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        ends = time.monotonic() + LAST_WORDS_S
        while self._unsent and _takes(self._out, max(0.0, ends - time.monotonic())):
            self._write("")
        self._put("")
        if self._unsent:
            self.lost = self.lost or NOBODY_READS
        if self.lost and error is None:
            raise RunError(f"cannot write to standard output: {self.lost}")


def _takes(out: TextIO, within_s: float = 0.0) -> bool:
    """Whether a piece can be written without waiting for a reader."""
    try:
        return bool(select.select([], [out], [], within_s)[1])
    except (OSError, ValueError):  # not a file, or closed: writing it tells
        return True


class LiveScreen:
    """A panel at the bottom that follows the fleet; lines that stay scroll above it."""

    def __init__(self, out: TextIO, now: Callable[[], float]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._now, self._start = now, now()
        self._console = Console(file=out, highlight=False, soft_wrap=True, emoji=False)
        self._snapshot: Snapshot | None = None
        self._live: Live = Live(
            get_renderable=self._panel, console=self._console, refresh_per_second=REFRESH_PER_S, transient=True
        )

    def say(self, text: str) -> None:
        """See Screen."""
        with contextlib.suppress(OSError):  # a terminal that is gone
            self._console.print(text, markup=False)

    def block(self, text: str) -> None:
        """See Screen."""
        self.say(f"\n{text}\n")

    def show(self, snapshot: Snapshot) -> None:
        """See Screen."""
        self._snapshot = snapshot

    def __enter__(self) -> LiveScreen:
        self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._live.__exit__(kind, error, trace)

    def _panel(self) -> RenderableType:
        from rich.console import Group
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        seconds = f"{self._now() - self._start:.0f} s"
        if self._snapshot is None:
            return Spinner("dots", text=f"starting the operator  {seconds}")
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("pod", "role", "state", "restarts"):
            table.add_column(column)
        for pod in self._snapshot.pods:
            style = {"ready": "green", "draining": "yellow", "restarting": "red", "not answering": "red"}.get(pod.state, "cyan")
            table.add_row(pod.name, pod.role, Text(pod.state, style=style), str(pod.restarts) if pod.restarts else "")
        head: RenderableType = Spinner("dots", text=f"{'stopping' if self._snapshot.stopping else 'warming up'}  {seconds}")
        if self._snapshot.complete and not self._snapshot.stopping:
            head = Text("Ready", style="bold green")
        lines = [] if self._snapshot.stopping else [*role_lines(self._snapshot.status), *_adapters(self._snapshot)]
        lines += [] if self._snapshot.stopping else trouble_lines(self._snapshot.status).values()
        lines.append(kv_line(kv_total(self._snapshot.status)))
        return Group(head, table, Text("\n".join(lines), no_wrap=False, overflow="fold"))  # the console wraps nothing


def _adapters(snapshot: Snapshot) -> list[str]:
    return [f"adapter {name}: {said}" for name, said in adapter_lines(snapshot.status).items()]


def _describe(pod: PodLine) -> str:
    return f"{pod.state} ({pod.restarts} restarts)" if pod.restarts else pod.state
