"""Names of pods where there is no cluster DNS: a hosts file per runtime, followed from the pods of all nodes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from fleet_operator.cluster.interface import WatchEvent

FILE = "hosts"


class Hosts:
    """HOSTNAME.SUBDOMAIN.NAMESPACE of every pod that asks for such a name and has an address."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._lines: dict[str, str] = {}
        """By uid."""
        self._late = False
        """The file does not have them all: a full disk."""

    def see(self, event: WatchEvent) -> None:
        """Write the file when a pod gets or loses its name."""
        if event.type == "SYNCED":
            return
        meta, spec = event.object["metadata"], event.object.get("spec") or {}
        address = (event.object.get("status") or {}).get("podIP")
        named = spec.get("hostname") and spec.get("subdomain") and address and event.type != "DELETED"
        before = self._lines.get(meta["uid"])
        if named:
            self._lines[meta["uid"]] = f"{address} {spec['hostname']}.{spec['subdomain']}.{meta['namespace']}"
        else:
            self._lines.pop(meta["uid"], None)
        if self._late or self._lines.get(meta["uid"]) != before:
            self._write()

    def _write(self) -> None:
        """Whole or not at all: others read it at any time. What fails is tried again at the next change of any pod; those that
        miss a name begin anew until then."""
        self._late = True
        beside = self.path.with_suffix(".new")
        with contextlib.suppress(OSError):  # or a folder that is being removed
            beside.write_text("".join(f"{line}\n" for line in self._lines.values()))
            os.replace(beside, self.path)
            self._late = False
