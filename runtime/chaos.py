"""Faults on purpose: where and how a rank is to fail, so that every state of the recovery can be hit again and again in the same way.

A fault names a rank, a point of its work and the step from which on it may strike; it strikes once, the first time that the rank comes by.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from attrs import asdict, frozen

from pdsl.grammar.errors import RunError
from pdsl.lowering.plan import Plan

__all__ = ["HOW", "POINTS", "Chaos", "Fault", "random_faults"]

POINTS = ("compute", "backward", "sums", "commit", "applied", "agree", "group", "move", "vote", "enter")
"""Before the forward; between forward and backward of some microbatch; before the sums; when the step is known to be committed; when it is
written; before reporting; while groups are made; before state moves; before the vote on it; after the vote."""

_OF_A_STEP = POINTS[:5]
_KNOWN = (*POINTS, "validate")  # not drawn at random: few runs come by it

HOW = ("rank", "node", "stop", "exit", "raise")
"""SIGKILL of the rank alone, of its whole node at once, SIGSTOP of the node, a clean exit, an exception."""


@frozen
class Fault:
    """One fault. `rank` strikes itself, or its node."""

    rank: int
    point: str
    step: int
    how: str

    def to_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Raises RunError for a point or a kind of fault that there is not."""
        made = cls(int(data["rank"]), str(data["point"]), int(data["step"]), str(data["how"]))
        for what, known in ((made.point, _KNOWN), (made.how, HOW)):
            if what not in known:
                raise RunError(f"no fault {what!r}: there are {', '.join(known)}")
        return made


class Chaos:
    """The faults of one rank. Called as `chaos(point, step)` when it comes by a point."""

    def __init__(self, rank: int, faults: Iterable[Fault] = ()) -> None:
        self._left = [f for f in faults if f.rank == rank]

    def __call__(self, point: str, step: int) -> None:
        for fault in self._left:
            if fault.point == point and step >= fault.step:
                self._left.remove(fault)
                _strike(fault)
                return


def _strike(fault: Fault) -> None:
    if fault.how == "raise":
        raise ValueError(f"a fault on purpose: rank {fault.rank} at {fault.point} of step {fault.step}")
    if fault.how == "exit":
        os._exit(0)
    if fault.how == "rank":
        os.kill(os.getpid(), signal.SIGKILL)
    os.killpg(os.getpgrp(), signal.SIGSTOP if fault.how == "stop" else signal.SIGKILL)


def random_faults(plan: Plan, kills: int, steps: int, seed: int, *, how: Sequence[str] = HOW) -> tuple[Fault, ...]:
    """Faults on `kills` different nodes, at random points of random steps. The same for the same seed, on every machine.

    All but the first may strike in the recovery from another one. An exception never strikes where it would rightly end the run: in the first step,
    or in a step that is tried again. Raises RunError if there are not so many nodes, or if no fault of these kinds can be had in so few steps.
    """
    dice = random.Random(seed)
    if kills >= len(plan.nodes):
        raise RunError(f"{kills} nodes are to be lost, and the plan has {len(plan.nodes)}: at least one must be left")
    if set(how) <= {"raise"} and steps <= kills:
        raise RunError(f"{kills} exceptions in steps after the first need at least {kills + 1} steps; there are {steps}")
    made: list[Fault] = []
    for node in dice.sample(plan.nodes, kills):
        rank = node * plan.ranks_per_node + dice.randrange(plan.ranks_per_node)
        kind = dice.choice(how)
        point = dice.choice(_OF_A_STEP if not made or kind == "raise" else POINTS)
        untouched = [s for s in range(1, steps) if all(s != f.step for f in made)]
        if kind == "raise" and not untouched:
            kind = "rank"
        open_steps = [s for s in range(steps) if all(s != f.step for f in made if f.how == "raise")]
        if kind == "raise":
            open_steps = untouched
        elif point not in _OF_A_STEP:
            open_steps = [0, made[0].step]
        step = dice.choice(open_steps)
        made.append(Fault(rank, point, step, kind))
    return tuple(made)
