"""Settings of every unit test, and a rule for all: no task is left whose failure nobody heard of, but for those of a peer."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.hanging import pytest_timeout_cancel_timer, pytest_timeout_set_timer  # noqa: F401 - hooks

# A slow machine is no defect of the code: time belongs into benchmarks.
settings.register_profile("everywhere", deadline=None)
settings.load_profile("everywhere")


class Unheard(logging.Handler):
    """What asyncio says of tasks and futures that are collected with an exception that nothing took."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """A peer that went away, or was too slow, is no news: fake servers have such clients, on slow machines more."""
        error = record.exc_info[1] if record.exc_info else None
        if "never retrieved" in (message := record.getMessage()) and not isinstance(error, OSError | EOFError):
            self.said.append(message)


@pytest.fixture(autouse=True, scope="module")
def _every_failure_is_heard() -> Iterator[None]:
    """Collected here and not in a later test: CPython 3.11 prints a traceback by parsing source, and a collection in the middle
    of hypothesis' own parsing then ends that with a SystemError (gh-106905; CI, 2026-11-22: test_fuzz after test_follow)."""
    unheard, log = Unheard(), logging.getLogger("asyncio")
    log.addHandler(unheard)
    try:
        yield
        gc.collect()
    finally:
        log.removeHandler(unheard)
    assert not unheard.said, unheard.said
