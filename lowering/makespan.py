"""The step time of a pipeline without its rows: what the simulator gives for a named schedule, fast enough to be asked thousands of times.

Times are in FLOPs of one sample: a forward takes those of its stage, a backward twice as many, each half as many, transfers nothing. That is
`programs.stage_costs` where nothing is computed again, but for the halves of the first stage, which it does in one. GPipe has a closed form. 1F1B is walked along its diagonals, two additions and a comparison for each operation. The rows of other
schedules are put once into an order that agrees with every dependency, and then walked for any costs. The tests compare all of them with `simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate

from pdsl.lowering.schedule import Op, Operation, Schedule
from pdsl.lowering.schedules import SCHEDULES, placed

__all__ = ["StepTimes", "makespan"]

_MOST_WALKED, _MOST_SIMULATED = 40_000, 12_000  # operations for one count of microbatches; beyond it the steady state is taken


def makespan(schedule: str, positions: int, forward: Sequence[int], microbatches: int) -> int:
    """The end of one step of `microbatches` microbatches, exact. `forward` is the FLOPs of each stage, in order; a stage without counts as one."""
    costs = tuple(max(1, cost) for cost in forward)
    if len(costs) == 1:
        return 3 * costs[0] * microbatches
    if schedule == "gpipe":
        return 3 * (sum(costs) + (microbatches - 1) * max(costs))
    if schedule == "one_f_one_b" and len(costs) == positions:
        return _one_f_one_b(costs, microbatches)
    return _simulated(schedule, positions, costs, microbatches)


def _one_f_one_b(forward: tuple[int, ...], microbatches: int) -> int:
    """Forwards of stage s and microbatch i lie on diagonal i + s; the backwards of microbatch j follow the forwards of diagonal j + p - 1.

    That order agrees with every dependency and with the row of every position, so one pass gives all ends.
    """
    p = len(forward)
    free = [0] * p  # when each position is done with what it was given so far
    arrived = [0] * p  # when the forward of the stage before ended, on the last diagonal
    pairs = tuple(enumerate(forward))
    back = tuple((s, 2 * forward[s]) for s in reversed(range(p)))
    for diagonal in range(microbatches + p - 1):
        first, last = max(0, diagonal - microbatches + 1), min(p - 1, diagonal)
        before = arrived[first - 1] if first else 0
        for s, cost in pairs[first : last + 1]:
            end = free[s]
            if before > end:  # noqa: PLR1730  a call of max would cost as much as the rest of the loop
                end = before
            end += cost
            before, arrived[s] = arrived[s], end
            free[s] = end
        if diagonal < p - 1:
            continue
        end = 0
        for s, cost in back:
            if free[s] > end:  # noqa: PLR1730
                end = free[s]
            end += cost
            free[s] = end
    return free[0]


@lru_cache(maxsize=4096)
def _simulated(schedule: str, positions: int, forward: tuple[int, ...], microbatches: int) -> int:
    order, slots = _order(schedule, positions, microbatches, len(forward) // positions)
    ends = [0] * (slots + 1)  # the last one is for operations that need nothing of another stage
    free = [0] * positions
    for position, stage, twice, slot, need in order:
        end = free[position]
        if ends[need] > end:  # noqa: PLR1730
            end = ends[need]
        end += 2 * forward[stage] if twice else forward[stage]
        ends[slot] = free[position] = end
    return max(free)


_Step = tuple[int, int, bool, int, int]
"""Position, stage, whether it takes twice a forward, the slot of its result, the slot of what it needs of another stage."""


@lru_cache(maxsize=128)
def _order(schedule: str, positions: int, microbatches: int, each: int) -> tuple[tuple[_Step, ...], int]:
    """All operations of a schedule in an order in which each comes after what it needs, and the count of slots."""
    made = SCHEDULES[schedule].build(positions, microbatches, each)
    at = [0] * made.positions
    none = 3 * made.stages * microbatches
    done = {none}
    found: list[_Step] = []
    sleepers: dict[int, int] = {}
    awake = list(range(made.positions))
    while awake:
        position = awake.pop()
        row = made.rows[position]
        while at[position] < len(row):
            o = row[at[position]]
            slot, need = _slot_and_need(made, o, none)
            if need not in done:
                sleepers[need] = position  # what a slot gives goes to one position; what its own row gives is there already
                break
            found.append((position, o.stage, o.op is Op.BACKWARD, slot, need))
            done.add(slot)
            at[position] += 1
            if slot in sleepers:
                awake.append(sleepers.pop(slot))
    return tuple(found), none


def _slot_and_need(made: Schedule, o: Operation, none: int) -> tuple[int, int]:
    """Slots are forwards, then gradients of inputs, then of weights, by stage and microbatch; `none` stands for no need."""
    m = made.microbatches
    size = made.stages * m
    at = o.stage * m + o.microbatch
    if o.op is Op.FORWARD:
        return at, at - m if o.stage else none
    if o.op is Op.BACKWARD_WEIGHT:
        return 2 * size + at, none  # its input half comes before it in its own row
    return size + at, size + at + m if o.stage + 1 < made.stages else none


class StepTimes:
    """Step times of one template by its count of microbatches, each computed once, and only when it is asked for.

    Of GPipe and 1F1B step times grow with the count faster and faster, at last by what the slowest position takes for one microbatch: from the
    count at which they do the rest is one multiplication. Other schedules with unequal stages may settle on a longer period, which is
    measured at the largest count that is worth simulating.
    """

    def __init__(self, schedule: str, positions: int, forward: Sequence[int]) -> None:
        self._schedule, self._positions = schedule, positions
        self._costs = tuple(max(1, cost) for cost in forward)
        self._known: dict[int, int] = {}
        family = SCHEDULES[schedule]
        work = [0] * positions
        for cost, at in zip(self._costs, placed(family.placement, positions, len(self._costs) // positions), strict=True):
            work[at] += cost
        self._busiest = max(work)
        # one microbatch goes all the way forth and back; of split backwards only the last weight half is still to be done then
        self._one = 2 * sum(self._costs) + (self._costs[0] if family.split else sum(self._costs))
        # a position begins after the stages before its first one, and whole backwards still go back through them in the end
        ways = 1 if family.split else 3
        before = accumulate((ways * cost for cost in self._costs[: positions - 1]), initial=0)
        self._work = tuple(zip(before, work, strict=True))
        self._walked = schedule == "one_f_one_b" and len(self._costs) == positions > 1
        self._most = max(2 * positions, (_MOST_WALKED if self._walked else _MOST_SIMULATED) // (2 * len(self._costs)))
        self._closed = len(self._costs) == 1 or schedule == "gpipe"
        self._grouped = family.virtual and not family.holds_all
        slow = sorted(range(len(self._costs)), key=lambda k: (-self._costs[k], -k))[:3]
        self._slow = tuple((self._costs[k], len(self._costs) - k, sum(self._costs[:k])) for k in slow)

    @cached_property
    def _line(self) -> tuple[int, int]:
        """From which count on the step time is a line, and its slope."""
        if self._closed:
            return 1, 3 * self._busiest
        if not self._walked:
            half = self._most // 2
            return self._most, -((self._at(half) - self._at(self._most)) // (self._most - half))
        count = 2 * self._positions
        while count < self._most and self._at(count) - self._at(count - 1) < 3 * self._busiest:
            count *= 2
        return min(count, self._most), 3 * self._busiest

    @cached_property
    def _saturated(self) -> bool:
        """Whether the slowest position sets the pace: it did from 2p to 3p microbatches, and every further one is the same to it.

        Where microbatches go in groups the order changes with the count, so nothing follows.
        """
        p = self._positions
        return not self._grouped and self._at(3 * p) - self._at(2 * p) == 3 * p * self._busiest

    def _at(self, count: int) -> int:
        if count not in self._known:
            self._known[count] = makespan(self._schedule, self._positions, self._costs, count)
        return self._known[count]

    def time(self, count: int) -> int:
        """The step time for a count of microbatches, at least 1."""
        if count <= 2 * self._positions:
            return self._at(count)
        simulated = not self._walked and not self._closed
        if simulated and count > 3 * self._positions and self._saturated:
            return self._at(3 * self._positions) + 3 * (count - 3 * self._positions) * self._busiest
        if (simulated and count <= self._most) or count <= self._line[0]:
            return self._at(count)
        steady, slope = self._line
        return self._at(steady) + (count - steady) * slope

    def most(self, deadline: int, limit: int) -> int:
        """The most microbatches, up to `limit`, whose step time is within the deadline; 0 if not even one is."""
        high = min(limit, self.bound(deadline)) + 1  # too many
        low, step = high - 1, 1
        while low > 0 and self.time(low) > deadline:  # the bound is nearly always right, or next to it
            high, low, step = low, max(0, low - step), 2 * step
        while high - low > 1 and self.time(high - 1) > deadline:
            middle = (low + high) // 2
            low, high = (middle, high) if self.time(middle) <= deadline else (low, middle)
        return high - 1

    def least(self, count: int) -> int:
        """A step time below which no run of so many microbatches ends; the inverse of `bound`."""
        if not self._walked:
            return max(self._one, *(before + 3 * work * count for before, work in self._work))
        total = self._one
        return max(
            max(total + 3 * (count - 1) * cost - (min(count, after) - 1) * cost, 3 * before + 3 * count * cost)
            for cost, after, before in self._slow
        )

    def bound(self, deadline: int) -> int:
        """A count of microbatches that no run by the deadline exceeds, without a walk.

        Position k of p, with f FLOPs, waits from its first forward until the first gradient has come back through all stages after it, and by then has
        run at most p - k forwards; what is left of its work follows. It also begins only after the stages before it, and its
        last gradient goes back through them.
        """
        total = self._one
        if deadline < total:
            return 0
        if not self._walked:
            return min((deadline - before) // (3 * work) for before, work in self._work)
        found = []
        for cost, after, before in self._slow:
            filled = (deadline - total + (2 + after) * cost) // (3 * cost)
            few = min(after, 1 + (deadline - total) // (2 * cost))
            found.append(min(max(filled, few), (deadline - 3 * before) // (3 * cost)))
        return min(found)
