"""Waiting for gloo without being left behind by it.

When a connection ends, gloo tells the waits for messages of which nothing has arrived or left. A message that was cut in the middle is forgotten, and
so is one that was begun when the peer was gone already: whoever waits for it sits until the time of the group is up. So a wait also looks, now and then, whether its group was cut, and gives up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

__all__ = ["LARGE", "Collective", "Pending", "Several", "Transfer"]

LARGE = 1 << 18
"""Bytes from which on a transfer is watched; what is smaller goes to the system in one piece, or nearly always."""

_LOOK = 0.025
"""Seconds between two looks."""

_CUT = "Connection closed by peer: a node was lost in the middle of a message"


class Pending(Protocol):
    """What can be waited for."""

    def wait(self) -> object:
        """Raises RuntimeError, in torch's words, if it cannot end well."""
        ...

    def is_completed(self) -> bool: ...


class Several:
    """Some of them as one."""

    def __init__(self, works: Sequence[Pending]) -> None:
        self._works = tuple(works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Collective:
    """A collective under way. `cut` tells whether the sockets of its group were shut."""

    def __init__(self, work: dist.Work, cut: Callable[[], bool]) -> None:
        self._work = work
        self._cut = cut

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        """Raises RuntimeError as torch does, and soon after the group was cut."""
        was_cut = False
        while not self._work.is_completed():
            try:
                self._work.wait(timedelta(seconds=_LOOK))
            except RuntimeError:  # its own, or that of this look: the next line tells
                if was_cut and not self._work.is_completed():  # for a whole look, in which gloo could have told it by itself
                    raise RuntimeError(_CUT) from None
                was_cut = self._cut()
        self._work.wait()


class Transfer:
    """A message to or from one peer. Its wait cannot be left, so a thread does it, which stays behind if the group was cut."""

    def __init__(self, work: Pending, cut: Callable[[], bool]) -> None:
        self._work = work
        self._cut = cut
        self._done = threading.Event()
        self._error: RuntimeError | None = None

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        """To be called once. Raises RuntimeError as torch does, and soon after the group was cut."""
        threading.Thread(target=self._watch, daemon=True).start()
        was_cut = False
        while not self._done.wait(_LOOK):
            if was_cut:
                raise RuntimeError(_CUT)
            was_cut = self._cut()
        if self._error is not None:
            raise self._error

    def _watch(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        self._done.set()
