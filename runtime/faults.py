"""What an error of a group means: a peer that is gone, or one that says nothing. In the words of the program, not of the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pdsl.grammar.errors import RunError

__all__ = ["PeerFault", "follows_another", "in_words"]


class PeerFault(RunError):
    """A rank waited for a peer that is gone or silent. With a fault budget that is where recovery begins."""


_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Connection refused",
    "recvValue failed",
    "Connection was likely closed",
    "Connect timeout",
    "connect failed",
    "caused pair closure",
)
_SILENT = (
    "Timed out waiting",
    "timed out after",
    "wait timeout after",
    "Watchdog caught collective operation timeout",
    "Socket Timeout",
    "Wait timeout",
)


def follows_another(text: str) -> bool:
    """Whether an error tells only that a peer is gone: the reason lies with that peer."""
    return any(sign in text for sign in _GONE)


@contextmanager
def in_words(where: Callable[[], str], silence: float) -> Iterator[None]:
    """Around waits for other ranks. `where` says what this rank was at; `silence` are the seconds after which a wait ends.

    Raises PeerFault in place of torch's errors about peers that are gone or silent; every other error goes through as it is.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        sign = next((s for s in _GONE if s in text), None)
        if sign is not None:
            raise PeerFault(f"{where()}: a peer is gone ({sign})") from error
        if any(s in text for s in _SILENT):
            raise PeerFault(f"{where()}: no answer within {silence:g} s, from a process that is still there") from error
        raise
