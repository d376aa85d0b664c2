"""What a local fleet says when one of its parts ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fleet_cli.errors import RunError
from fleet_cli.up.bundled import bundled_manifest
from fleet_cli.up.command import as_new
from fleet_cli.up.local import LocalFleet

READY_S = 20


def test_a_runtime_that_ends_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A temporary folder that cannot be used was 'unhandled errors in a TaskGroup (1 sub-exception)'."""
    locks = tmp_path / "a file where a folder belongs"
    locks.touch()
    monkeypatch.setattr("fleet_operator.runtime.addresses.tempfile.gettempdir", lambda: str(locks))

    async def go():
        manifest = as_new(bundled_manifest(tmp_path))
        async with asyncio.timeout(READY_S), LocalFleet(manifest=manifest, state_dir=tmp_path, port=1, claims={}) as local:
            while True:
                local.raise_if_dead()
                await asyncio.sleep(0.02)

    with pytest.raises(
        RunError, match=r"^the runtime stopped: .*Not a directory: '.*a file where a folder belongs/inferencefleet"
    ):
        asyncio.run(go())
