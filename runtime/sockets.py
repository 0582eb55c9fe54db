"""Ending waits from another thread: the sockets of a process group are shut, and whoever waits on one gets an error at once.

gloo has no abort, and a rank that waits for a peer that is stopped, not dead, would sit until its time is up. A group does not tell its sockets,
so they are found as what was opened while it was made.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["Interrupter", "open_sockets"]

_AGAIN = 0.02  # seconds; a group that is being made opens new sockets after the first were shut


def open_sockets() -> dict[int, int]:
    """The connected stream sockets of this process: descriptor to inode, which tells whether a descriptor still means the same socket."""
    found = {}
    for entry in Path("/dev/fd").iterdir():
        with suppress(OSError, ValueError):
            info = os.fstat(int(entry.name))
            if stat.S_ISSOCK(info.st_mode):
                found[int(entry.name)] = info.st_ino
    return found


def _shut(sockets: Mapping[int, int]) -> None:
    for descriptor, inode in sockets.items():
        with suppress(OSError):
            if os.fstat(descriptor).st_ino != inode:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as twin:
                internet = twin.family in (socket.AF_INET, socket.AF_INET6) and twin.type == socket.SOCK_STREAM
                if internet and not twin.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    twin.shutdown(socket.SHUT_RDWR)


class Interrupter:
    """Knows the sockets of one rank's groups by a key of the caller's, and shuts them on demand.

    `making` surrounds the making of a group: what is opened meanwhile belongs to its key, also to an interrupt that comes in between. No code of
    the user runs there, so no other socket is taken for one of the group's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, dict[int, int]] = {}
        self._before: dict[int, int] | None = None
        self._making = ""
        self._interrupted: set[str] = set()

    @contextmanager
    def making(self, key: str) -> Iterator[None]:
        """Raises ConnectionAbortedError at once if the key was interrupted."""
        with self._lock:
            if key in self._interrupted:
                raise ConnectionAbortedError("Connection closed by peer: a node was lost while groups were made")
            self._before, self._making = open_sockets(), key
        try:
            yield
        finally:
            with self._lock:
                self._known.setdefault(key, {}).update(self._new())
                self._before = None

    def _new(self) -> dict[int, int]:
        before = self._before if self._before is not None else {}
        return {fd: inode for fd, inode in open_sockets().items() if before.get(fd) != inode}

    def interrupt(self, *keys: str) -> None:
        """Shut all sockets of these keys. What is being made at this moment is shut until it gives up. Called from any thread."""
        with self._lock:
            self._interrupted.update(keys)
            for key in keys:
                _shut(self._known.get(key, {}))
        threading.Thread(target=self._while_making, daemon=True).start()

    def interrupted(self, key: str) -> bool:
        """Whether the groups of a key were interrupted and not forgotten since."""
        return key in self._interrupted

    def _while_making(self) -> None:
        while True:
            with self._lock:
                if self._before is None or self._making not in self._interrupted:
                    return
                _shut(self._new())
            time.sleep(_AGAIN)

    def forget(self, *keys: str) -> None:
        """The groups of these keys are gone; the next are made."""
        with self._lock:
            for key in keys:
                self._known.pop(key, None)
            self._interrupted.difference_update(keys)
