"""The schedules of the language, and what is known of each family: arguments, counts it takes, where stages go, bubble, memory.

Times are for equal stages without latency, with a forward, an input half and a weight half of the backward that take one unit each. The tests compare
every formula here with the simulator and with the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, TypeAlias

from attrs import frozen

from pdsl.lowering.loop_schedules import (
    eager_1f1b,
    gpipe,
    groups,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    single,
    zero_bubble,
    zero_bubble_2,
)
from pdsl.lowering.schedule import Schedule, ScheduleError, loop_placement, peak_in_flight, repeat, v_placement
from pdsl.lowering.simulate import StageCosts, simulate
from pdsl.lowering.v_patterns import v_half, v_min
from pdsl.lowering.v_schedules import dualpipe_v, zbv

__all__ = [
    "FAMILIES",
    "SCHEDULES",
    "SEARCHED",
    "OtherFamily",
    "Placement",
    "ScheduleFamily",
    "dualpipe_v",
    "eager_1f1b",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_f_one_b",
    "placed",
    "repeat",
    "single",
    "v_half",
    "v_min",
    "zbv",
    "zero_bubble",
    "zero_bubble_2",
]

Placement: TypeAlias = Literal["loop", "v"]

Counts: TypeAlias = Callable[[int, int, int], int]
"""Something of (positions, microbatches, virtual)."""


def placed(placement: Placement, positions: int, per_position: int) -> tuple[int, ...]:
    """The position of each stage: around in a loop, or there and back in a V."""
    return v_placement(positions) if placement == "v" else loop_placement(positions, per_position)


@frozen
class ScheduleFamily:
    """One schedule of the language that this version generates and executes.

    `arguments` are the keyword arguments in the spec. `placement` is where stages go; `stages_per_position` is their count, or None if the
    argument `virtual` says it. `build` makes the rows, for every count; `held` is the most activations (stage x microbatch) of a position and `step` the
    time of a step in units, all by (positions, microbatches, virtual). `refusal` is why a spec may not ask for these counts, or None. `holds_all`:
    the memory grows with the microbatches. `full` gives the least count that p positions work well with.
    """

    name: str
    summary: str
    arguments: tuple[str, ...]
    build: Callable[[int, int, int], Schedule]
    held: Counts
    step: Counts
    refusal: Callable[[int, int, int], str | None] | None = None
    placement: Placement = "loop"
    stages_per_position: int | None = 1
    split: bool = False
    holds_all: bool = False
    full: Callable[[int], int] = lambda positions: positions

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
            each = self.stages_per_position
            return (
                f"{self.name} has {each} stage{'s' if each != 1 else ''} per position, so virtual = {virtual} has no meaning; "
                "interleaved_1f1b has virtual stages"
            )
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
        """Share of idle time for equal stages without latency, exact."""
        return 1 - Fraction(3 * self.per_position(virtual) * microbatches, self.step(positions, microbatches, virtual))

    def peak(self, positions: int, microbatches: int, virtual: int = 1) -> int:
        """The most activations (stage x microbatch) that any position holds at once."""
        return self.held(positions, microbatches, virtual)

    def valid_microbatches(self, positions: int, microbatches: int, virtual: int = 1) -> tuple[int, ...]:
        """Counts worth naming beside `microbatches`, ascending: accepted ones without the price that `advice` tells of.

        If the count is accepted without advice, these are larger counts with a smaller bubble; else the next ones without the price.
        """
        p = positions
        if self.accepts(p, microbatches, virtual) is None and self.advice(p, microbatches, virtual) is None:
            return (2 * microbatches, 4 * microbatches)
        enough = self.full(p)
        if microbatches < enough:
            return (enough, 2 * enough, 4 * enough)
        below = microbatches // p * p
        return (below, below + p)

    def advice(self, positions: int, microbatches: int, virtual: int = 1) -> str | None:
        """What an accepted but awkward count costs, as the message of a warning, or None.

        Interleaving pays in bubble for fewer microbatches than positions, and in memory for counts that p does not divide. Schedules in a V that are made
        for many microbatches pay in bubble for few; a fifth of the step is worth a warning.
        """
        p, m = positions, microbatches
        if self.stages_per_position == 1 or p == 1 or self.accepts(p, m, virtual) is not None:
            return None
        enough = self.full(p)
        if m < enough:
            if 5 * self.bubble(p, m, virtual) < 1:
                return None
            told = ", ".join(f"{n} of {_percent(self.bubble(p, n, virtual))}" for n in (enough, 2 * enough))
            return (
                f"{self.name} cannot fill {p} positions with {m} microbatch{'' if m == 1 else 'es'}: "
                f"the bubble is {_percent(self.bubble(p, m, virtual))}; microbatches = {told}"
            )
        if not self.virtual or self.holds_all or m % p == 0:
            return None
        options = (m // p * p, m // p * p + p)
        told = ", ".join(f"microbatches = {n} holds {self.peak(p, n, virtual)} ({_percent(self.bubble(p, n, virtual))})" for n in options)
        rounds = max(1, m // p)
        return (
            f"{m} microbatches are no multiple of {p} positions: {self.name} runs them in {rounds} round{'s' if rounds > 1 else ''} of up to "
            f"{max(groups(p, m))} and holds {self.peak(p, m, virtual)} activations at once, "
            f"with a bubble of {_percent(self.bubble(p, m, virtual))}; {told}"
        )


def _percent(share: Fraction) -> str:
    return f"{round(100 * share)} %"


# --- times and memory -----------------------------------------------------------------------------------------------------------------------


def _whole(positions: int, microbatches: int, stages: int) -> int:
    """Of every schedule with whole backwards here: the bubble is (p-1) / (v*m + p-1) for m >= p."""
    p, m = positions, microbatches
    return 3 * (stages * max(m, p) + min(m, p) - 1)


@lru_cache(maxsize=1024)
def _simulated(build: Callable[[int, int, int], Schedule], positions: int, microbatches: int, virtual: int) -> int:
    made = build(positions, microbatches, virtual)
    return int(simulate(made, StageCosts.equal(made.stages)).makespan)


def _filled(build: Callable[[int, int, int], Schedule], full: Callable[[int], int], stages: int | None = None) -> Counts:
    """3vm + p - 1 from a count on, which is the least that any order takes: the last position begins after p - 1 forwards. Below it is simulated."""

    def step(positions: int, microbatches: int, virtual: int) -> int:
        if microbatches < full(positions):
            return _simulated(build, positions, microbatches, virtual)
        return 3 * (stages or virtual) * microbatches + positions - 1

    return step


def _settled(positions: int) -> int:
    """Microbatches after which a pattern repeats."""
    return 3 * positions


def _patterned(build: Callable[[int, int, int], Schedule]) -> Counts:
    """Simulated until the pattern of two stages repeats; every further microbatch takes what its work takes."""

    def step(positions: int, microbatches: int, virtual: int) -> int:
        few = min(microbatches, _settled(positions))
        return _simulated(build, positions, few, virtual) + 6 * (microbatches - few)

    return step


@lru_cache(maxsize=1024)
def _counted(build: Callable[[int, int, int], Schedule], positions: int, microbatches: int) -> int:
    return max(peak_in_flight(build(positions, microbatches, 1)))


def _held_interleaved(positions: int, microbatches: int, virtual: int) -> int:
    largest = max(groups(positions, microbatches))
    return min(virtual * microbatches, (virtual - 1) * largest + 2 * (positions - 1) + 1)


def _held_interleaved_zero_bubble(positions: int, microbatches: int, virtual: int) -> int:
    return min(virtual * microbatches, (virtual - 1) * max(groups(positions, microbatches)) + positions)


def _refuse_1f1b(positions: int, microbatches: int, _virtual: int) -> str | None:
    if microbatches >= positions:
        return None
    return f"one_f_one_b needs at least as many microbatches as stages: {microbatches} < {positions}"


def _refuse_one_chunk(name: str, instead: str) -> Callable[[int, int, int], str | None]:
    def refusal(_positions: int, _microbatches: int, virtual: int) -> str | None:
        if virtual >= 2:
            return None
        return f"{name} needs at least 2 virtual stages per position, not {virtual}; with 1 it is {instead}"

    return refusal


def _of_two(make: Callable[[int, int], Schedule]) -> Callable[[int, int, int], Schedule]:
    def build(positions: int, microbatches: int, _virtual: int) -> Schedule:
        return make(positions, microbatches)

    return build


# --- the families ---------------------------------------------------------------------------------------------------------------------------

_GPIPE, _1F1B, _EAGER, _ZB1, _ZB2 = map(_of_two, (gpipe, one_f_one_b, eager_1f1b, zero_bubble, zero_bubble_2))
_ZBV, _DUALPIPE, _HALF, _MIN = map(_of_two, (zbv, dualpipe_v, v_half, v_min))


def _in_v(
    name: str, summary: str, build: Callable[[int, int, int], Schedule], held: Counts, step: Counts, full: Callable[[int], int]
) -> ScheduleFamily:
    return ScheduleFamily(name, summary, ("microbatches",), build, held, step, placement="v", stages_per_position=2, split=True, full=full)


SCHEDULES: Mapping[str, ScheduleFamily] = MappingProxyType(
    {
        family.name: family
        for family in (
            ScheduleFamily(
                "gpipe",
                "all forwards, then all backwards; holds all microbatches",
                ("microbatches",),
                _GPIPE,
                lambda _p, m, _v: m,
                lambda p, m, _v: _whole(p, m, 1),
                holds_all=True,
            ),
            ScheduleFamily(
                "one_f_one_b",
                "forward and backward in turn; holds at most as many microbatches as there are stages",
                ("microbatches",),
                _1F1B,
                lambda p, m, _v: min(m, p),
                lambda p, m, _v: _whole(p, m, 1),
                _refuse_1f1b,
            ),
            ScheduleFamily(
                "interleaved_1f1b",
                "1F1B over several stages per position; a smaller bubble for more transfers and memory",
                ("microbatches", "virtual"),
                interleaved_1f1b,
                _held_interleaved,
                _whole,
                _refuse_one_chunk("interleaved_1f1b", "one_f_one_b"),
                stages_per_position=None,
            ),
            ScheduleFamily(
                "eager_1f1b",
                "1F1B with twice as many microbatches in flight, which hides slow transfers",
                ("microbatches",),
                _EAGER,
                lambda p, m, _v: min(m, 2 * p - 1),
                lambda p, m, _v: _whole(p, m, 1),
            ),
            ScheduleFamily(
                "looped_bfs",
                "all microbatches through one stage of a position before its next; holds all, and gathers parameters seldom",
                ("microbatches", "virtual"),
                looped_bfs,
                lambda _p, m, v: v * m,
                _whole,
                _refuse_one_chunk("looped_bfs", "gpipe"),
                stages_per_position=None,
                holds_all=True,
            ),
            ScheduleFamily(
                "zero_bubble",
                "1F1B with split backward: weight gradients fill the time in which positions would wait",
                ("microbatches",),
                _ZB1,
                lambda p, m, _v: min(m, p),
                lambda p, m, _v: 2 * m + p - 1 + max(m, p),
                split=True,
            ),
            ScheduleFamily(
                "zero_bubble_2",
                "zero_bubble with twice as many microbatches in flight, which hides slow transfers",
                ("microbatches",),
                _ZB2,
                lambda p, m, _v: min(m, 2 * p - 1),
                _filled(_ZB2, lambda p: 2 * p - 1, 1),
                split=True,
            ),
            ScheduleFamily(
                "interleaved_zero_bubble",
                "interleaved 1F1B with split backward",
                ("microbatches", "virtual"),
                interleaved_zero_bubble,
                _held_interleaved_zero_bubble,
                _filled(interleaved_zero_bubble, lambda p: p),
                _refuse_one_chunk("interleaved_zero_bubble", "zero_bubble"),
                stages_per_position=None,
                split=True,
            ),
            _in_v(
                "zbv",
                "split backward, two stages per position in a V; the bubble of zero_bubble, halved",
                _ZBV,
                lambda p, m, _v: min(2 * m, 2 * p),
                _filled(_ZBV, lambda p: 2 * p - 1, 2),
                lambda p: 2 * p - 1,
            ),
            _in_v(
                "dualpipe_v",
                "two overlapping streams, two stages per position in a V",
                _DUALPIPE,
                lambda p, m, _v: min(2 * m, 2 * p + 1),
                _filled(_DUALPIPE, lambda p: 2 * p, 2),
                lambda p: 2 * p,
            ),
            _in_v(
                "v_half",
                "split backward, two stages per position in a V; half of the memory of one_f_one_b",
                _HALF,
                lambda p, m, _v: _counted(_HALF, p, min(m, _settled(p))),
                _patterned(_HALF),
                lambda p: p,
            ),
            _in_v(
                "v_min",
                "split backward, two stages per position in a V; a third of the memory of one_f_one_b",
                _MIN,
                lambda p, m, _v: _counted(_MIN, p, min(m, _settled(p))),
                _patterned(_MIN),
                lambda p: p,
            ),
        )
    }
)
"""The families that can be run, by the name they have in a spec."""


@frozen
class OtherFamily:
    """A schedule that the language knows and that is not generated from counts: it is searched for, or read from a file. Its stages may be anywhere."""

    name: str
    summary: str
    arguments: tuple[str, ...]


SEARCHED: Mapping[str, OtherFamily] = MappingProxyType(
    {"auto": OtherFamily("auto", "the best found for the given costs, latency and memory", ("microbatches", "hop", "split"))}
)
"""The schedule that has no rows of its own: a plan searches for them, see `search`."""

FAMILIES: Mapping[str, ScheduleFamily | OtherFamily] = MappingProxyType(
    {**SCHEDULES, **SEARCHED, "rows": OtherFamily("rows", "rows of operations from a file", ("file",))}
)
"""All schedules that the language knows. The rows of `rows` are in a file, see `schedule_rows`."""
