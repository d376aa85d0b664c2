"""A router's memory lies in huge pages where the kernel gives them to those who ask."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleet_router.__main__ import HUGE_PAGES, HUGE_PAGES_MODE, TUNABLES, tunables_needed

ASKED = "always [madvise] never"


@pytest.mark.parametrize(
    ("given", "mode", "needed"),
    [
        (None, ASKED, HUGE_PAGES),
        ("", ASKED, HUGE_PAGES),
        ("glibc.malloc.check=1", ASKED, f"glibc.malloc.check=1:{HUGE_PAGES}"),
        (HUGE_PAGES, ASKED, ""),
        ("glibc.malloc.hugetlb=0", ASKED, ""),
        (None, "[always] madvise never", ""),
        (None, "always madvise [never]", ""),
    ],
)
def test_they_are_asked_for_where_that_has_an_effect_and_nobody_has_decided(given: str | None, mode: str, needed: str):
    assert tunables_needed(given, mode) == needed


def memory_of(first: str) -> str:
    """What the kernel says of a large allocation of a process that did `first` as it began. The process is told its arguments
    anew when it begins again: they end with what follows `-c`."""
    code = f"import sys\n{first}\nheld = [0] * (8 << 20)\nprint(open('/proc/self/smaps').read())"
    mine = {name: value for name, value in os.environ.items() if name != TUNABLES}
    return subprocess.run([sys.executable, "-c", code], env=mine, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(
    not HUGE_PAGES_MODE.exists() or "[madvise]" not in HUGE_PAGES_MODE.read_text(),
    reason="huge pages are for all here, or for nobody",
)
def test_a_process_that_asked_is_advised_so():
    """`hg` stands among the flags of a mapping for which they were asked."""
    asked, plain = memory_of("from fleet_router.__main__ import huge_pages; huge_pages()"), memory_of("")
    flags = [line.split()[1:] for line in asked.splitlines() if line.startswith("VmFlags:")]
    assert any("hg" in one for one in flags)
    assert " hg" not in plain


def test_without_such_pages_a_process_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from fleet_router import __main__

    monkeypatch.setattr(__main__, "HUGE_PAGES_MODE", tmp_path / "none")
    monkeypatch.delenv(TUNABLES, raising=False)
    __main__.huge_pages()
    assert TUNABLES not in os.environ
