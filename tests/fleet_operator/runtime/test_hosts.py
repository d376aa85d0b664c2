"""Names of pods in a hosts file, as cluster DNS would answer them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from fleet_operator.cluster.interface import WatchEvent
from fleet_operator.runtime.hosts import Hosts


def event(kind: Literal["ADDED", "MODIFIED", "DELETED"], uid: str, ip: str | None, **spec: Any) -> WatchEvent:
    status = {"podIP": ip} if ip is not None else {}
    return WatchEvent(kind, {"metadata": {"uid": uid, "namespace": "ml"}, "spec": spec, "status": status})


def test_a_pod_has_its_name_from_its_address_to_its_end(tmp_path: Path):
    hosts, named = Hosts(tmp_path), {"hostname": "t-decode-0-0", "subdomain": "f-workers"}
    hosts.see(event("ADDED", "a", None, **named))
    assert not hosts.path.exists()
    hosts.see(event("MODIFIED", "a", "127.1.1.1", **named))
    hosts.see(event("ADDED", "b", "127.1.1.2", **{**named, "hostname": "t-decode-0-1"}))
    hosts.see(event("ADDED", "c", "127.1.1.3"))
    hosts.see(event("ADDED", "d", "127.1.1.4", hostname="alone"))
    assert hosts.path.read_text() == "127.1.1.1 t-decode-0-0.f-workers.ml\n127.1.1.2 t-decode-0-1.f-workers.ml\n"
    hosts.see(event("DELETED", "a", "127.1.1.1", **named))
    hosts.see(event("ADDED", "e", "127.1.1.5", **named))  # another life of the same name
    assert hosts.path.read_text() == "127.1.1.2 t-decode-0-1.f-workers.ml\n127.1.1.5 t-decode-0-0.f-workers.ml\n"
    hosts.see(WatchEvent("SYNCED", {}))


def test_names_that_a_full_disk_did_not_take_are_written_later(tmp_path: Path):
    """Workers over several nodes never found each other: no other pod got a name after theirs."""
    folder = tmp_path / "state"
    hosts = Hosts(folder)
    hosts.see(event("ADDED", "a", "127.1.1.1", hostname="t-decode-0-0", subdomain="f-workers"))
    folder.mkdir()
    hosts.see(event("MODIFIED", "b", "127.1.1.2"))
    assert hosts.path.read_text() == "127.1.1.1 t-decode-0-0.f-workers.ml\n"
    hosts.path.unlink()
    hosts.see(event("MODIFIED", "b", "127.1.1.2"))
    assert not hosts.path.exists(), "nothing changed"
