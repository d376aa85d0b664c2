"""The cache of nodes: what matters of each as its watch last showed it. Old news never replaces newer."""

from __future__ import annotations

from fleet_operator.cluster.interface import Listed, Object, WatchEvent
from fleet_operator.fleet_objects import later
from fleet_operator.nodes import NodeView, observe_node
from fleet_operator.settings import Platform
from fleet_operator.work_queue import Key


class KnownNodes:
    """Nodes by name."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.views: dict[str, NodeView] = {}
        self._seen: dict[str, Object] = {}
        """Name, uid and version of each: metadata alone."""

    def take(self, event: WatchEvent) -> bool:
        """Whether the event changes anything that matters."""
        meta = event.object["metadata"]
        name, known = meta["name"], self._seen.get(meta["name"])
        if event.type == "DELETED":
            if known is None or known["metadata"]["uid"] != meta.get("uid"):
                return False
            del self._seen[name], self.views[name]
            return True
        seen = {"metadata": {key: meta.get(key) for key in ("name", "uid", "resourceVersion")}}
        if known is not None and not _newer(seen, known):
            return False
        self._seen[name], before = seen, self.views.get(name)
        self.views[name] = observe_node(event.object, self._platform)
        return self.views[name] != before

    def missed(self, listed: Listed) -> tuple[list[Key], list[Object]]:
        """See `FleetObjects.missed`."""
        known = {("", name): seen for name, seen in self._seen.items()}
        changed = [key for key, found in listed.versions.items() if key not in known or later(found, _version(known[key]))]
        gone = [seen for key, seen in known.items() if key not in listed.versions and not later(_version(seen), listed.version)]
        return changed, gone


def _newer(news: Object, known: Object) -> bool:
    same = news["metadata"]["uid"] == known["metadata"]["uid"]
    return not same or news["metadata"]["resourceVersion"] is None or later(_version(news), _version(known))


def _version(seen: Object) -> str:
    return str(seen["metadata"]["resourceVersion"])
