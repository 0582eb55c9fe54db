"""What processes of one run say to each other: JSON objects, one a line, of bounded length, over sockets that never block the reader.

Nothing is unpickled and nothing is evaluated. A peer that sends something else is a peer with which nobody speaks any longer.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

from pdsl.grammar.errors import RunError

__all__ = ["LIMIT", "Channel", "Lines", "Message", "WireError", "encode", "listen"]

LIMIT = 64 << 20
"""Bytes of the longest line. The longest that is ever needed is a decision: the reports of all ranks."""

_CHUNK = 1 << 16

Message = dict[str, Any]


class WireError(RunError):
    """Something came over a wire that is no message, or a message is too long for it."""


def encode(message: Mapping[str, Any], limit: int = LIMIT) -> bytes:
    """A message as one line. Raises WireError if it is longer than `limit` bytes, TypeError if it is no JSON."""
    line = json.dumps(message, separators=(",", ":"), allow_nan=True).encode() + b"\n"
    if len(line) > limit:
        raise WireError(f"a message of {len(line)} bytes is too long; {limit} are the most")
    return line


class Lines:
    """Takes bytes as they come and gives whole messages."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completes. Raises WireError for a line that is too long, no JSON, or no object."""
        start = len(self._rest)
        self._rest += data
        if data.find(b"\n") < 0 and len(self._rest) <= self.limit:
            return []
        end = self._rest.rfind(b"\n", start)
        lines = bytes(self._rest[: end + 1]).split(b"\n")[:-1]
        del self._rest[: end + 1]
        if len(self._rest) > self.limit or any(len(line) > self.limit for line in lines):
            raise WireError(f"a line is longer than {self.limit} bytes")
        return [_decode(line) for line in lines]


def _decode(line: bytes) -> Message:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a line of {len(line)} bytes is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise WireError(f"a line holds {type(found).__name__} and no object")
    return found


class Channel:
    """One end of a connected stream socket for a process that waits on many. Never blocks; what cannot be sent yet is kept."""

    def __init__(self, connection: socket.socket, limit: int = LIMIT) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.open = True
        self._limit = limit
        self._lines = Lines(limit)
        self._out = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def widen(self, limit: int) -> None:
        """Take longer messages from now on: it is known who speaks."""
        self._limit = self._lines.limit = limit

    @property
    def pending(self) -> bool:
        """Whether something waits to be sent."""
        return self.open and bool(self._out)

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message and send what goes. A closed channel swallows it: its closing is found when reading."""
        if not self.open:
            return
        self._out += encode(message, self._limit)
        self.flush()

    def flush(self) -> None:
        """Send what goes without waiting."""
        while self._out and self.open:
            try:
                sent = self.socket.send(memoryview(self._out)[: _CHUNK * 4])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._out.clear()
                return  # the reader finds the end, after the last words that lie in the socket
            del self._out[:sent]

    def receive(self) -> list[Message]:
        """All whole messages that have come; `open` is False afterwards if the other end is gone or talks no sense."""
        found: list[Message] = []
        while self.open:
            try:
                data = self.socket.recv(_CHUNK * 4)
            except (BlockingIOError, InterruptedError):
                return found
            except OSError:
                data = b""
            if not data:
                self.close()
                return found
            try:
                found += self._lines.feed(data)
            except WireError:
                self.close()
        return found

    def drain(self, seconds: float) -> None:
        """Send what is queued, waiting at most that long; for last words."""
        if not self.pending:
            return
        try:
            self.socket.settimeout(seconds)
            self.socket.sendall(bytes(self._out))
        except OSError:
            pass
        self._out.clear()

    def close(self) -> None:
        self.open = False
        self._out.clear()
        self.socket.close()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises OSError if it cannot."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener
