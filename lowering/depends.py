"""What a factory read that no import statement of its source names: modules imported as it ran, files that it opened.

Facts that depend on them are stale once one of them has changed. What a factory reads from the environment or the network is not seen.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Stamp", "still_so", "watching"]

Stamp = tuple[str, int, int]
"""A file: its absolute path, size in bytes, and time of the last change in nanoseconds."""

_MOST = 500


class Watch:
    """The files that were read while it watched."""

    def __init__(self) -> None:
        self.opened: dict[str, None] = {}

    def note(self, file: Any, mode: str) -> None:
        """Remember a file that is opened to be read. Descriptors and what is no path are passed over."""
        if isinstance(file, str | os.PathLike) and not set(mode) & set("wxa+"):
            self.opened.setdefault(os.fsdecode(Path(os.fsdecode(file)).absolute()))

    def stamps(self) -> tuple[Stamp, ...] | None:
        """The opened files and the sources of all modules that are loaded now, but for Python's, PDSL's and installed ones; None if too many."""
        sources = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        paths = dict.fromkeys(str(Path(file).absolute()) for file in sources if isinstance(file, str))
        found = [stamp for path in sorted({*paths, *self.opened}) if not _installed(path) and (stamp := _stamp(path)) is not None]
        return tuple(found) if len(found) <= _MOST else None


@contextmanager
def watching() -> Iterator[Watch]:
    """Within the block every file that Python code opens is noted."""
    watch, original = Watch(), builtins.open

    def opening(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        watch.note(file, mode)
        return original(file, mode, *args, **kwargs)

    builtins.open = io.open = opening
    try:
        yield watch
    finally:
        builtins.open = io.open = original


def still_so(text: str) -> bool:
    """Whether the files of a JSON list of stamps are all as they were."""
    try:
        return all(_stamp(path) == (path, size, changed) for path, size, changed in json.loads(text))
    except (ValueError, TypeError):
        return False


def _stamp(path: str) -> Stamp | None:
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return None
    return (path, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def _installed(path: str) -> bool:
    """Whether a file belongs to Python, to PDSL or to an installed package."""
    import sysconfig  # slow to import, and needed only where something is kept

    here = Path(__file__).resolve().parent
    own = (str(here), str(here.parent / "pdsl"), str(here.parent / "grammar"), str(here.parent / "runtime"))
    python = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "/proc", "/dev", "/sys")
    return path.startswith(tuple(f"{folder}{os.sep}" for folder in (*own, *python))) or bool(
        {"site-packages", "dist-packages"} & set(Path(path).parts)
    )
