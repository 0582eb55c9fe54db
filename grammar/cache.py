"""Where PDSL keeps what it can compute again, and how it reads and writes there.

`PDSL_CACHE` names the folder; otherwise it is `pdsl` under `XDG_CACHE_HOME` or under `~/.cache`. A folder that cannot be written means no
cache, never an error. Entries are written under a name of their own and renamed, so concurrent starts see whole entries only.
"""

from __future__ import annotations

import os
from pathlib import Path
from zlib import crc32

__all__ = ["cache_folder", "read_entry", "write_entry"]


def cache_folder() -> Path | None:
    """The folder for cached data, or None where not even a home is known. It need not exist."""
    named = os.environ.get("PDSL_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    if base and Path(base).is_absolute():
        return Path(base) / "pdsl"
    try:
        return Path.home() / ".cache" / "pdsl"
    except RuntimeError:
        return None


def read_entry(name: str, key: str) -> str | None:
    """The text stored under `name` if it was stored with this `key` and is whole; None otherwise."""
    folder = cache_folder()
    if folder is None:
        return None
    try:
        data = (folder / name).read_bytes()
        head, _, body = data.partition(b"\n")
        return body.decode("utf-8") if head == _head(key, body) else None
    except (OSError, ValueError):
        return None


def write_entry(name: str, key: str, body: str) -> bool:
    """Store a text under `name`; whether it worked. Readers see the old entry or the new one, nothing between."""
    folder = cache_folder()
    if folder is None:
        return False
    data = body.encode("utf-8")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"{name}.{os.getpid()}.{os.urandom(4).hex()}"
        try:
            draft.write_bytes(_head(key, data) + b"\n" + data)
            draft.replace(folder / name)
        except OSError:
            draft.unlink(missing_ok=True)
            return False
    except (OSError, ValueError):
        return False
    return True


def _head(key: str, body: bytes) -> bytes:
    return f"{key} {len(body)} {crc32(body):08x}".encode()
