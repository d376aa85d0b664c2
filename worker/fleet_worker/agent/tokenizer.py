"""The model's tokenizer, as its files are, for routers that tokenise."""

from __future__ import annotations

from pathlib import Path

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MOST_BYTES = 64 * 1024 * 1024


def tokenizer_files(folder: Path | None) -> dict[str, str] | None:
    """By name; None before the model is here, or without a tokenizer that can be read as text."""
    if folder is None:
        return None
    found = {name: folder / name for name in FILES}
    try:
        read = {
            name: path.read_text("utf-8") for name, path in found.items() if path.is_file() and path.stat().st_size < MOST_BYTES
        }
    except (OSError, UnicodeDecodeError):
        return None
    return read if FILES[0] in read else None
