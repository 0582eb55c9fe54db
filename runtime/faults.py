"""What an error of a group means: a peer that is gone, or one that says nothing. In the words of the program, not of the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pdsl.grammar.errors import RunError

__all__ = ["follows_another", "in_words"]

_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "Connection refused", "recvValue failed")
_SILENT = ("Timed out waiting", "timed out after", "wait timeout after", "Watchdog caught collective operation timeout")


def follows_another(text: str) -> bool:
    """Whether an error tells only that a peer is gone: the reason lies with that peer."""
    return any(sign in text for sign in _GONE)


@contextmanager
def in_words(where: Callable[[], str], silence: float) -> Iterator[None]:
    """Around waits for other ranks. `where` says what this rank was at; `silence` are the seconds after which a wait ends.

    Raises RunError in place of torch's errors about peers that are gone or silent; every other error goes through as it is.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        sign = next((s for s in _GONE if s in text), None)
        if sign is not None:
            raise RunError(f"{where()}: a peer is gone ({sign})") from error
        if any(s in text for s in _SILENT):
            raise RunError(f"{where()}: no answer within {silence:g} s, from a process that is still there") from error
        raise
