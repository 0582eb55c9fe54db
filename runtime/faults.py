"""What ended a rank, as data and in words: a peer that is gone, one that says nothing, or a reason of its own."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pdsl.grammar.errors import PdslError, PeerError, RunError
from pdsl.lowering.factory import describe_error

__all__ = ["Silence", "follows_another", "in_words", "outcome_of", "reason_of"]

_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Connection refused",
    "recvValue failed",
    "failed to recv",
    "Application timeout caused pair closure",
)
_SILENT = ("Timed out waiting", "timed out after", "wait timeout after", "Watchdog caught collective operation timeout")


class Silence(RunError):
    """A wait for another rank ran out of time though its process is still there."""


def follows_another(error: BaseException) -> bool:
    """Whether an error tells only that a peer is gone: the reason lies with that peer.

    An OSError is of the user's own connections, whatever its text.
    """
    return isinstance(error, PeerError) or (isinstance(error, RuntimeError) and any(sign in str(error) for sign in _GONE))


@contextmanager
def in_words(where: Callable[[], str], silence: float) -> Iterator[None]:
    """Around waits for other ranks. `where` says what this rank was at; `silence` are the seconds after which a wait ends.

    Raises PeerError or Silence in place of torch's errors about peers that are gone or silent; every other error goes through as it is.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        sign = next((s for s in _GONE if s in text), None)
        if sign is not None:
            raise PeerError(f"{where()}: a peer is gone ({sign})") from error
        if any(s in text for s in _SILENT):
            raise Silence(f"{where()}: no answer within {silence:g} s, from a process that is still there") from error
        raise


def outcome_of(error: BaseException) -> dict[str, Any]:
    """An error as plain data. `follows` tells that this rank only lost a peer, `silent` that it waited in vain for one."""
    ours = isinstance(error, PdslError)
    text = str(error).strip() or type(error).__name__
    return {
        "reason": text if ours else describe_error(error),
        "follows": follows_another(error),
        "silent": isinstance(error, Silence),
        "traceback": "".join(traceback.format_exception(error)),
    }


def reason_of(outcome: dict[str, Any]) -> str:
    """The reason in one line."""
    found: str = outcome["reason"].splitlines()[0]
    return found
