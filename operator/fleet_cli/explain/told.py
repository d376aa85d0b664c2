"""A decision record (router: explain/shown.py) in words. Pure: dict in, text out; what is not in the record is not said."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

CANDIDATES_MOST = 8
"""Of each side; the rest is counted."""


def told(record: dict[str, Any]) -> str:
    """Several lines. What clients named is in it: nothing of that may move a terminal's cursor."""
    lines = [_what(record), _became(record)]
    tries = record.get("tries", [])
    for number, one in enumerate(tries, 1):
        lines += _try(one, f"try {number}" if len(tries) > 1 else "decision")
    return "\n".join("".join(map(_shown, line)) for line in lines) + "\n"


def _shown(char: str) -> str:
    return char if char.isprintable() else ascii(char)[1:-1]


def _line(name: str, *words: str) -> str:
    return f"{name:<10}{', '.join(word for word in words if word)}".rstrip()


def _what(record: dict[str, Any]) -> str:
    at = datetime.fromtimestamp(record["at"], UTC).isoformat(timespec="milliseconds")
    named = [f"{name} {record[name]}" for name in ("tenant", "class", "adapter") if record.get(name)]
    size = f"prompt {record['prompt_bytes']} bytes" if "prompt_bytes" in record else ""
    return _line(
        "request", record["request_id"], at, record.get("path", ""), *named, size, "stream" if record.get("stream") else ""
    )


def _became(record: dict[str, Any]) -> str:
    error = record.get("error") or {}
    return _line(
        record["state"],
        f"status {record['status']}" if record.get("status") else "",
        f"error {error['code']}" if error.get("code") else "",
        f"reason {error['reason']}" if error.get("reason") else "",
        _at("decided after", record.get("waited_s")),
        _at("first byte", record.get("first_byte_s")),
        _at("ended", record.get("ended_s")),
        f"trace {record['trace_id']}" if record.get("trace_id") else "",
    )


def _try(one: dict[str, Any], title: str) -> list[str]:
    path = " -> ".join(one[role] for role in ("prefill", "decode") if one.get(role))
    cost = f"expected {one['cost_s']:.4f} s" if "cost_s" in one else ""
    pair = f"of these {one['pair_s']:.4f} s for the pair" if one.get("pair_s") else ""
    met = f"met before any request ({one['prewarmed_s']:.4f} s)" if "prewarmed_s" in one else ""
    decided = f"decided in {one.get('decided_s', 0) * 1e6:.0f} us" if one.get("decode") else ""
    lines = [_line(title, one["reason"], path, cost, pair, met, decided)]
    if "prompt_tokens" in one:
        moved = f"{one['moved_tokens']} to move" if one.get("moved_tokens") else ""
        lines.append(_line("", f"about {one['prompt_tokens']} tokens", f"{one['missing_tokens']} not cached", moved))
    for role in ("prefill", "decode"):
        lines += _side([row for row in one.get("candidates", []) if row["role"] == role], role, one.get(role, ""))
    if (hedge := one.get("hedge")) is not None:
        became = ", ".join([hedge.get("outcome", "runs"), *([hedge["why"]] if "why" in hedge else [])])
        lines.append(_line("", f"late: {hedge['prefill']} asked, too, at {hedge['at_s']:.3f} s: {became}"))
    lines += [_line("", f"prefilled {one['prefilled_s']:.3f} s")] if "prefilled_s" in one else []
    return lines + ([_line("", f"failed {one['failed_s']:.3f} s: {one['why']}")] if one.get("why") else [])


def _side(rows: list[dict[str, Any]], role: str, chosen: str) -> list[str]:
    """A table of candidates; for decode the cost of a prefill there stands beside."""
    lines = []
    shown = rows[:CANDIDATES_MOST] + [row for row in rows[CANDIDATES_MOST:] if row["worker"] == chosen]
    for row in shown:
        local = f"  {_seconds(row['local_s'])} with its own prefill" if "local_s" in row else ""
        mark = "  <- chosen" if row["worker"] == chosen else ""
        cost = f"{_seconds(row['cost_s']):>11}  {row['missing_tokens']:>7} missing"
        lines.append(f"{'':<10}{role:<8} {row['worker']:<32} {cost}{local}{mark}")
    if len(rows) > len(shown):
        lines.append(f"{'':<10}{role:<8} and {len(rows) - len(shown)} more")
    return lines


def _seconds(cost_s: float | None) -> str:
    """None: its queue or its share of the work alone said that it was not to be it, so that nobody counted the rest."""
    return "passed over" if cost_s is None else f"{cost_s:.4f} s"


def _at(word: str, seconds: float | None) -> str:
    return "" if seconds is None else f"{word} {seconds:.3f} s"
