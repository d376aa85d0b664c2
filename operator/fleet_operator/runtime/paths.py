"""Pure: what a container sees of its mounts. Processes share the machine's file system, so mount paths become host paths."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_VARIABLE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


def translate(text: str, mounts: Mapping[str, Path]) -> str:
    """`text` with every path at or below a mount path rewritten, also inside JSON or a URL; longest mount path first."""
    if not mounts:
        return text
    ordered = sorted(mounts, key=len, reverse=True)
    alternatives = "|".join(re.escape(path.rstrip("/")) for path in ordered if path.rstrip("/"))
    # a mount path must start a path (not be the tail of another one) and end at a separator
    pattern = re.compile(rf"(?:(?<=://)|(?<![\w./-]))({alternatives})(?=[/\"'\s,:;\]}})=]|\\|$)")
    by_path = {path.rstrip("/"): str(host) for path, host in mounts.items()}
    return pattern.sub(lambda match: by_path[match.group(1)], text)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Kubernetes' $(NAME) references; $$ escapes, an unknown name stays as it is."""

    def value(match: re.Match[str]) -> str:
        if match.group(0) == "$$":
            return "$"
        return variables.get(match.group(1), match.group(0))

    return _VARIABLE.sub(value, text)


def mount_table(container: Mapping[str, Any], volumes: Mapping[str, Path]) -> dict[str, Path]:
    """mountPath to host directory of one container; KeyError names a volume that the pod does not have."""
    table = {}
    for mount in container.get("volumeMounts") or []:
        host = volumes[mount["name"]]
        table[mount["mountPath"]] = host / mount["subPath"] if mount.get("subPath") else host
    return table


def command_line(container: Mapping[str, Any], variables: Mapping[str, str], mounts: Mapping[str, Path]) -> Sequence[str]:
    """command and args as the process gets them; empty when the container relies on its image's entry point."""
    if not container.get("command"):
        return []
    words = [*container["command"], *(container.get("args") or [])]
    return [translate(expand(word, variables), mounts) for word in words]
