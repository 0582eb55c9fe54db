"""All deadlines of a run, derived from the one that a user gives: after how many seconds a node that says nothing is lost.

Every wait is longer than what it waits for needs at most, so deadlines fire in one order: signs of life, then doubt, then the declared loss, then
whatever waits for those who were lost. A process that ends or a connection that closes is noticed at once and waits for none of them.
"""

from __future__ import annotations

from attrs import frozen

__all__ = ["BEATS", "SETTLE", "Deadline", "deadlines", "declared", "heartbeat", "recovered", "settle", "stand_still", "wait"]

BEATS = 10
"""Signs of life within one silence: nine may be late or lost, and the tenth still comes in time."""

SETTLE = 2
"""Signs of life for which a doubt must stand, so that the doubts of the others have arrived."""


def heartbeat(silence: float) -> float:
    """Seconds between two signs of life of an agent or a rank."""
    return silence / BEATS


def settle(silence: float) -> float:
    """Seconds for which a doubt must stand before the majority may declare a node lost."""
    return SETTLE * heartbeat(silence)


def declared(silence: float) -> float:
    """Seconds after its last sign of life within which a silent node is declared lost: the silence, one tick to see it, the doubt."""
    return silence + heartbeat(silence) + settle(silence)


def wait(silence: float) -> float:
    """Seconds that a store or a group waits for a peer. Who waits longer for a peer that lives takes it for stuck."""
    return silence


def stand_still(silence: float) -> float:
    """Seconds after a loss is known within which every rank must have left what it was doing; a rank that has not is ended with its node."""
    return silence


def recovered(silence: float) -> float:
    """Seconds after the last sign of life within which the survivors have agreed on the next plan, or the run has ended with a message.

    A further loss on the way starts the count again.
    """
    return declared(silence) + stand_still(silence) + wait(silence)


@frozen
class Deadline:
    """One deadline: its name, its seconds, and what happens then."""

    name: str
    seconds: float
    what: str


def deadlines(silence: float) -> tuple[Deadline, ...]:
    """All deadlines in the order in which they fire."""
    return (
        Deadline("exit", 0.0, "a process that ends or a connection that closes is noticed at once"),
        Deadline("heartbeat", heartbeat(silence), "every agent and every rank gives a sign of life"),
        Deadline("settle", settle(silence), "a doubt has stood long enough to be shared"),
        Deadline("silence", silence, "who said nothing for so long is in doubt"),
        Deadline("wait", wait(silence), "a store or a group gives up waiting for a peer"),
        Deadline("stand still", stand_still(silence), "every rank has left its step after a loss, or its node is lost too"),
        Deadline("declared", declared(silence), "the majority has declared the silent node lost"),
        Deadline("recovered", recovered(silence), "the survivors train on, or the run has ended with a message"),
    )
