"""The schedules that PDSL generates, and what is known of each family: arguments, counts it takes, bubble, memory.

With equal stages and no latency the bubble of all families here is 1 - v*m / (v*max(m, p) + min(m, p) - 1) for p positions, m microbatches and v
stages per position; for m >= p that is (p-1) / (v*m + p-1). The tests compare it with the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Literal, TypeAlias

from attrs import frozen

from pdsl.lowering.schedule import Op, Operation, Schedule, ScheduleError, loop_placement, repeat

__all__ = [
    "FAMILIES",
    "PLANNED",
    "SCHEDULES",
    "PlannedFamily",
    "ScheduleFamily",
    "gpipe",
    "interleaved_1f1b",
    "one_f_one_b",
    "repeat",
    "single",
]

Placement: TypeAlias = Literal["loop", "v", "free"]


def _forward(stage: int, microbatch: int) -> Operation:
    return Operation(Op.FORWARD, stage, microbatch)


def _backward(stage: int, microbatch: int) -> Operation:
    return Operation(Op.BACKWARD, stage, microbatch)


def _at_least_one(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ScheduleError(f"{name} must be at least 1, not {value}")


def _warm_up(warm_up: int, forwards: Sequence[Operation], backwards: Sequence[Operation]) -> tuple[Operation, ...]:
    """`warm_up` forwards, then forward and backward in turn, then the remaining backwards."""
    ahead = min(warm_up, len(forwards))
    row = list(forwards[:ahead])
    for done, backward in enumerate(backwards):
        row.extend(forwards[ahead + done : ahead + done + 1])
        row.append(backward)
    return tuple(row)


def single(microbatches: int) -> Schedule:
    """One position with one stage: forward and backward of each microbatch in turn, which is gradient accumulation."""
    _at_least_one(microbatches=microbatches)
    row = tuple(op for i in range(microbatches) for op in (_forward(0, i), _backward(0, i)))
    return Schedule("single", 1, microbatches, (0,), (row,))


def gpipe(positions: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in order of microbatches. Every position holds all m activations at its peak."""
    _at_least_one(positions=positions, microbatches=microbatches)
    m = range(microbatches)
    rows = tuple((*(_forward(s, i) for i in m), *(_backward(s, i) for i in m)) for s in range(positions))
    return Schedule("gpipe", positions, microbatches, loop_placement(positions), rows)


def one_f_one_b(positions: int, microbatches: int) -> Schedule:
    """min(m, p-1-r) forwards on position r, then forward and backward in turn, then the rest. Position r holds min(m, p-r) activations.

    The rows are valid for every count of microbatches, so that an uneven split of the batch may give a long pipeline few of them. That a
    spec must ask for at least as many as there are stages is a rule of the language: `SCHEDULES["one_f_one_b"].accepts`.
    """
    _at_least_one(positions=positions, microbatches=microbatches)
    m = range(microbatches)
    rows = tuple(_warm_up(positions - 1 - s, [_forward(s, i) for i in m], [_backward(s, i) for i in m]) for s in range(positions))
    return Schedule("one_f_one_b", positions, microbatches, loop_placement(positions), rows)


def _groups(positions: int, microbatches: int) -> tuple[int, ...]:
    """Sizes of the groups of microbatches that interleaving sends through one chunk before the next: max(1, m // p) groups, as equal as possible.

    A group of fewer than p microbatches would let the first position run dry between two chunks, so all have at least p (or all m, if m < p).
    """
    rounds = max(1, microbatches // positions)
    size, larger = divmod(microbatches, rounds)
    return (size + 1,) * larger + (size,) * (rounds - larger)


def interleaved_1f1b(positions: int, microbatches: int, virtual: int) -> Schedule:
    """1F1B over `virtual` stages per position in loop placement, for any count of microbatches.

    Forwards go in groups of k microbatches, chunk by chunk; backwards in the same groups with the chunks reversed. The warm-up on position r is
    (v-1)*k + 2*(p-1-r) forwards, k the largest group. The order is Megatron's where p divides m, and torch's where m // p divides m; elsewhere
    the groups differ by one, which costs memory but no time: with m >= p the bubble is (p-1) / (v*m + p-1) for every m.
    """
    _at_least_one(positions=positions, microbatches=microbatches, virtual=virtual)
    forwards: list[tuple[int, int]] = []
    backwards: list[tuple[int, int]] = []
    first = 0
    groups = _groups(positions, microbatches)
    for size in groups:
        group = range(first, first + size)
        forwards += [(chunk, i) for chunk in range(virtual) for i in group]
        backwards += [(chunk, i) for chunk in reversed(range(virtual)) for i in group]
        first += size

    def row(position: int) -> tuple[Operation, ...]:
        warm_up = (virtual - 1) * max(groups) + 2 * (positions - 1 - position)
        return _warm_up(
            warm_up,
            [_forward(chunk * positions + position, i) for chunk, i in forwards],
            [_backward(chunk * positions + position, i) for chunk, i in backwards],
        )

    placement = loop_placement(positions, virtual)
    return Schedule("interleaved_1f1b", len(placement), microbatches, placement, tuple(row(r) for r in range(positions)))


# --- what is known of the families ------------------------------------------------------------------------------------------------------


def _refuse_1f1b(positions: int, microbatches: int, _virtual: int) -> str | None:
    if microbatches >= positions:
        return None
    return f"one_f_one_b needs at least as many microbatches as stages: {microbatches} < {positions}"


def _refuse_interleaved(_positions: int, _microbatches: int, virtual: int) -> str | None:
    if virtual >= 2:
        return None
    return f"interleaved_1f1b needs at least 2 virtual stages per position, not {virtual}; with 1 it is one_f_one_b"


def _held_interleaved(positions: int, microbatches: int, virtual: int) -> int:
    largest = max(_groups(positions, microbatches))
    return min(virtual * microbatches, (virtual - 1) * largest + 2 * (positions - 1) + 1)


@frozen
class ScheduleFamily:
    """One schedule of the language that this version generates and executes.

    `arguments` are the keyword arguments in the spec. `placement` is where stages go; `stages_per_position` is their count, or None if the
    argument `virtual` says it. `build`, `held` and `refusal` take (positions, microbatches, virtual).
    """

    name: str
    summary: str
    arguments: tuple[str, ...]
    build: Callable[[int, int, int], Schedule]
    held: Callable[[int, int, int], int]
    refusal: Callable[[int, int, int], str | None] | None = None
    placement: Placement = "loop"
    stages_per_position: int | None = 1

    @property
    def virtual(self) -> bool:
        """Whether the spec may ask for more than one stage per position."""
        return self.stages_per_position is None

    def per_position(self, virtual: int = 1) -> int:
        """Stages on each position."""
        return virtual if self.stages_per_position is None else self.stages_per_position

    def accepts(self, positions: int, microbatches: int, virtual: int = 1) -> str | None:
        """None if the counts are fine, else the reason with its numbers, fit to be the message of a diagnostic."""
        if microbatches < 1:
            return f"{self.name} needs at least 1 microbatch, not {microbatches}"
        if positions < 1:
            return f"{self.name} needs at least 1 position, not {positions}"
        if not self.virtual and virtual != 1:
            return f"{self.name} has 1 stage per position, so virtual = {virtual} has no meaning; interleaved_1f1b has virtual stages"
        return self.refusal(positions, microbatches, virtual) if self.refusal else None

    def generate(self, positions: int, microbatches: int, virtual: int = 1) -> Schedule:
        """The schedule for these counts. Raises ScheduleError with the reason if `accepts` gives one."""
        reason = self.accepts(positions, microbatches, virtual)
        if reason is not None:
            raise ScheduleError(reason)
        return self.build(positions, microbatches, virtual)

    def accumulate(self, positions: int, microbatches: int, virtual: int = 1, rounds: int = 1) -> Schedule:
        """A schedule for `rounds` times `microbatches` that holds no more activations than one round does.

        Where the peak does not grow with the count (1F1B, interleaving) all run through in one go and the bubble is paid once; else (GPipe) the
        rounds follow each other. Each stage runs its forwards, and its backwards, in the same order either way. Raises ScheduleError as `generate`.
        """
        one = self.generate(positions, microbatches, virtual)
        total = rounds * microbatches
        if rounds > 1 and self.held(positions, total, virtual) <= self.held(positions, microbatches, virtual):
            return self.generate(positions, total, virtual)
        return repeat(one, rounds)

    def bubble(self, positions: int, microbatches: int, virtual: int = 1) -> Fraction:
        """Share of idle time for equal stages without latency, exact (formula at the top of this module)."""
        v, p, m = self.per_position(virtual), positions, microbatches
        return 1 - Fraction(v * m, v * max(m, p) + min(m, p) - 1)

    def peak(self, positions: int, microbatches: int, virtual: int = 1) -> int:
        """The most activations (stage x microbatch) that a position holds at once; the first position is the one."""
        return self.held(positions, microbatches, virtual)

    def valid_microbatches(self, positions: int, microbatches: int, virtual: int = 1) -> tuple[int, ...]:
        """Counts worth naming beside `microbatches`, ascending: accepted ones without the price that `advice` tells of.

        If the count is accepted without advice, these are larger counts with a smaller bubble; else the multiples of p next to it.
        """
        p = positions
        if self.accepts(p, microbatches, virtual) is None and self.advice(p, microbatches, virtual) is None:
            return (2 * microbatches, 4 * microbatches)
        below = max(microbatches, 1) // p * p
        if below == 0:
            return (p, 2 * p, 4 * p)
        return (below, below + p)

    def advice(self, positions: int, microbatches: int, virtual: int = 1) -> str | None:
        """What an accepted but awkward count costs, as the message of a warning, or None. Only interleaving has such counts.

        Interleaving pays in bubble for fewer microbatches than positions, and in memory for counts that p does not divide.
        """
        p, m = positions, microbatches
        if not self.virtual or self.accepts(p, m, virtual) is not None or m % p == 0:
            return None
        options = (p, 2 * p) if m < p else (m // p * p, m // p * p + p)
        if m < p:
            told = ", ".join(f"{n} of {_percent(self.bubble(p, n, virtual))}" for n in options)
            return (
                f"{self.name} cannot fill {p} positions with {m} microbatches: the bubble is {_percent(self.bubble(p, m, virtual))}; "
                f"microbatches = {told}"
            )
        peak = self.peak(p, m, virtual)
        told = ", ".join(f"microbatches = {n} holds {self.peak(p, n, virtual)} ({_percent(self.bubble(p, n, virtual))})" for n in options)
        rounds = max(1, m // p)
        return (
            f"{m} microbatches are no multiple of {p} positions: {self.name} runs them in {rounds} round{'s' if rounds > 1 else ''} of up to "
            f"{max(_groups(p, m))} and holds {peak} activations at once, with a bubble of {_percent(self.bubble(p, m, virtual))}; {told}"
        )


def _percent(share: Fraction) -> str:
    return f"{round(100 * share)} %"


SCHEDULES: Mapping[str, ScheduleFamily] = MappingProxyType(
    {
        family.name: family
        for family in (
            ScheduleFamily(
                "gpipe",
                "all forwards, then all backwards; holds all microbatches",
                ("microbatches",),
                lambda p, m, _v: gpipe(p, m),
                lambda _p, m, _v: m,
            ),
            ScheduleFamily(
                "one_f_one_b",
                "forward and backward in turn; holds at most as many microbatches as there are stages",
                ("microbatches",),
                lambda p, m, _v: one_f_one_b(p, m),
                lambda p, m, _v: min(m, p),
                _refuse_1f1b,
            ),
            ScheduleFamily(
                "interleaved_1f1b",
                "1F1B over several stages per position; a smaller bubble for more transfers and memory",
                ("microbatches", "virtual"),
                interleaved_1f1b,
                _held_interleaved,
                _refuse_interleaved,
                stages_per_position=None,
            ),
        )
    }
)
"""The families that can be run, by the name they have in a spec."""


@frozen
class PlannedFamily:
    """A schedule that the language knows and this version does not execute yet."""

    name: str
    summary: str
    arguments: tuple[str, ...]
    placement: Placement
    stages_per_position: int | None

    @property
    def reason(self) -> str:
        """A sentence for a diagnostic."""
        return f"{self.name} is planned, but not executed yet; {', '.join(SCHEDULES)} are"


PLANNED: Mapping[str, PlannedFamily] = MappingProxyType(
    {
        family.name: family
        for family in (
            PlannedFamily("looped_bfs", "all microbatches through one chunk before the next", ("microbatches", "virtual"), "loop", None),
            PlannedFamily("interleaved_zero_bubble", "interleaved 1F1B with split backward", ("microbatches", "virtual"), "loop", None),
            PlannedFamily("zbv", "split backward, two stages per position in a V", ("microbatches",), "v", 2),
            PlannedFamily("dualpipe_v", "two overlapping streams, two stages per position in a V", ("microbatches",), "v", 2),
            PlannedFamily("auto", "the best found for the given costs, latency and memory", ("microbatches",), "free", None),
            PlannedFamily("rows", "rows of operations from a file", ("file",), "free", None),
        )
    }
)
"""The families to come, so that a checker can say so instead of calling them unknown."""

FAMILIES: Mapping[str, ScheduleFamily | PlannedFamily] = MappingProxyType({**SCHEDULES, **PLANNED})
"""All schedules that the language knows."""
