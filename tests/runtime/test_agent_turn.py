"""One turn of an agent's loop: what is closed in it is not asked any more in the same turn."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from pdsl.runtime.peers import Watch


@pytest.fixture
def watch() -> Iterator[Watch]:
    found = Watch()
    yield found
    found.close()


def test_a_socket_that_was_closed_earlier_in_the_turn_is_left_alone(watch: Watch):
    pairs = [socket.socketpair(), socket.socketpair()]
    called: list[int] = []

    def hear(which: int) -> None:
        called.append(which)
        other = pairs[1 - which][0]
        watch.forget(other)
        other.close()

    for which, (ours, theirs) in enumerate(pairs):
        watch.add(ours, lambda which=which: hear(which))  # type: ignore[misc]
        theirs.send(b"!")  # both are ready in one turn, whichever comes first
    watch.turn(1.0)
    assert len(called) == 1
    for pair in pairs:
        for end in pair:
            end.close()


def test_a_socket_that_took_the_number_of_a_closed_one_is_not_asked_for_it(watch: Watch):
    pairs = [socket.socketpair(), socket.socketpair()]
    called: list[str] = []
    fresh: list[socket.socket] = []

    def hear(which: int) -> None:
        called.append(f"old {which}")
        other = pairs[1 - which][0]
        number = other.fileno()
        watch.forget(other)
        other.close()
        fresh.extend(socket.socketpair())
        new = next(s for s in fresh if s.fileno() == number)
        watch.add(new, lambda: called.append("new"))

    for which, (ours, theirs) in enumerate(pairs):
        watch.add(ours, lambda which=which: hear(which))  # type: ignore[misc]
        theirs.send(b"!")
    watch.turn(1.0)
    assert len(called) == 1, called
    for end in [s for pair in pairs for s in pair] + fresh:
        end.close()
