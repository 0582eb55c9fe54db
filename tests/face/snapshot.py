"""Texts that must stay as they are until somebody looks at the difference: `UPDATE_SNAPSHOTS=1 pytest tests/face` writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["matches_snapshot"]

_FOLDER = Path(__file__).parent / "snapshots"


def matches_snapshot(name: str, text: str) -> bool:
    path = _FOLDER / name
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    return True
