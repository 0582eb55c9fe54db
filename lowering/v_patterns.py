"""Rows of the V schedules that hold little: one pattern, repeated for every microbatch, then closed up within the memory that it takes.

A pattern says when a microbatch is worked on at each position, in times of one operation, if every microbatch follows the one before by six of them: two
forwards, two input halves, and two free places for weight halves. Its memory is known from the start and the same on all positions (Qi et al.,
Pipeline Parallelism with Controllable Memory, 2405.15362). What it wastes at its ends is won back in two passes: operations of the ends move to earlier
free places, as long as no position holds more than the pattern did, at first around the weight halves, then with these wherever there is room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from pdsl.lowering.loop_schedules import at_least_one
from pdsl.lowering.schedule import Op, Operation, Schedule, v_placement

__all__ = ["v_half", "v_min"]

_THERE, _BACK, _INPUT_BACK, _INPUT_THERE, _WEIGHT = range(5)  # what a position does for a microbatch, in this order
_PERIOD = 6
_ENDS = 4  # with so many more microbatches than positions the ends are apart, and what lies between repeats

_Times = list[list[list[int]]]
"""By position, by kind of operation, by microbatch: the place in time. Weight halves are those of the input halves in the order of time."""

_Offsets = tuple[int, int, int, int]
_Row = tuple[Operation, ...]
_Rows = tuple[_Row, ...]


def v_half(positions: int, microbatches: int) -> Schedule:
    """Half of the memory of 1F1B, p + 2 activations of the 2p stages on each position (one less for odd p), for half of its bubble."""
    at_least_one(positions=positions, microbatches=microbatches)
    p, shift = positions, 0 if positions % 2 else 3
    offsets = tuple((2 * r, 3 * p - 2 - r, 3 * p - 1 + shift + 2 * r, 6 * p - 2 + shift - r) for r in range(p))
    return Schedule("v_half", 2 * p, microbatches, v_placement(p), _rows(offsets, microbatches))


def v_min(positions: int, microbatches: int) -> Schedule:
    """A third of the memory of 1F1B, 2 * ((p + 4) // 3) activations of the 2p stages on each position, for about two thirds of its bubble.

    Forwards and input halves follow each other without a gap, so it suffers where their times differ.
    """
    at_least_one(positions=positions, microbatches=microbatches)
    p, shift = positions, 0 if positions % 3 else 2
    offsets = tuple((r, 2 * p - 1 - r, 2 * p + shift + r, 4 * p - 1 + shift - r) for r in range(p))
    return Schedule("v_min", 2 * p, microbatches, v_placement(p), _rows(offsets, microbatches))


def _rows(offsets: tuple[_Offsets, ...], microbatches: int) -> _Rows:
    """The rows for any count: made from the pattern for few, and beyond that one more period for every further microbatch."""
    few = len(offsets) + _ENDS
    parts = _parts(offsets, few) if microbatches > few else None
    if parts is None:
        return _from_pattern(offsets, microbatches)
    more = microbatches - few
    return tuple(
        (*head, *(_later(o, n) for n in range(more) for o in period), *(_later(o, more) for o in tail)) for head, period, tail in parts
    )


def _later(o: Operation, microbatches: int) -> Operation:
    return Operation(o.op, o.stage, o.microbatch + microbatches)


@lru_cache(maxsize=64)
def _parts(offsets: tuple[_Offsets, ...], few: int) -> tuple[tuple[_Row, _Row, _Row], ...] | None:
    """What comes before the place where a further microbatch puts its operations into each row, these operations, and what comes after; None if the
    rows for one more microbatch are not so.
    """
    found = []
    for row, longer in zip(_from_pattern(offsets, few), _from_pattern(offsets, few + 1), strict=True):
        at = next((i for i, (a, b) in enumerate(zip(row, longer, strict=False)) if a != b), len(row))
        head, period, tail = row[:at], longer[at : at + _PERIOD], row[at:]
        if longer[at + _PERIOD :] != tuple(_later(o, 1) for o in tail):
            return None
        found.append((head, period, tail))
    return tuple(found)


@lru_cache(maxsize=64)
def _from_pattern(offsets: tuple[_Offsets, ...], microbatches: int) -> _Rows:
    times: _Times = [[[offset + _PERIOD * i for i in range(microbatches)] for offset in mine] for mine in offsets]
    times = [[*row, _weights(row)] for row in times]
    _close_up(times)
    times = [row[:_WEIGHT] for row in _squeezed(times)]
    _close_up(times)
    return tuple(_row(row, position, len(offsets)) for position, row in enumerate(times))


# --- weight halves ------------------------------------------------------------------------------------------------------------------------------


def _weights(row: Sequence[Sequence[int]]) -> list[int]:
    """The places of the weight halves: each free one after an input half, then on beyond the end."""
    taken = {time: kind for kind, places in enumerate(row) for time in places}
    found: list[int] = []
    waiting, time, end = 0, 0, max(taken)
    while time <= end or waiting:
        kind = taken.get(time)
        if kind in (_INPUT_BACK, _INPUT_THERE):
            waiting += 1
        elif kind is None and waiting:
            waiting -= 1
            found.append(time)
        time += 1
    return found


def _row(row: Sequence[Sequence[int]], position: int, positions: int) -> _Row:
    """The operations of a position in the order of their places; of two weight halves that wait the one on the way back goes first."""
    there, back = position, 2 * positions - 1 - position
    shape = ((Op.FORWARD, there), (Op.FORWARD, back), (Op.BACKWARD_INPUT, back), (Op.BACKWARD_INPUT, there))
    taken = {time: Operation(*shape[kind], i) for kind, places in enumerate(row) for i, time in enumerate(places)}
    waiting: dict[int, list[Operation]] = {back: [], there: []}
    made: list[Operation] = []
    for time in sorted({*taken, *_weights(row)}):
        o = taken.get(time)
        if o is None:
            made.append(next(queue for queue in waiting.values() if queue).pop(0))
            continue
        made.append(o)
        if o.op is Op.BACKWARD_INPUT:
            waiting[o.stage].append(Operation(Op.BACKWARD_WEIGHT, o.stage, o.microbatch))
    return tuple(made)


# --- closing up ---------------------------------------------------------------------------------------------------------------------------------


def _by_time(times: _Times) -> list[tuple[int, int, int, int]]:
    """(time, position, kind, microbatch) of all operations in the order of time."""
    return sorted((time, p, kind, i) for p, row in enumerate(times) for kind, places in enumerate(row) for i, time in enumerate(places))


def _squeezed(times: _Times) -> _Times:
    """Every operation as early as its inputs and the one before it in its row allow; the order of the rows stays."""
    new: _Times = [[list(places) for places in row] for row in times]
    free = [0] * len(times)
    for _, p, kind, i in _by_time(times):
        new[p][kind][i] = free[p] = max(free[p], *(time + 1 for time in _inputs(new, p, kind, i)))
        free[p] += 1
    return new


def _inputs(times: _Times, p: int, kind: int, i: int) -> Iterator[int]:
    """When what an operation reads is worked on, and the same operation of the microbatch before; -1 stands for the beginning."""
    yield times[p][kind][i - 1] if i else -1
    if kind == _WEIGHT:
        return
    if kind in (_THERE, _INPUT_BACK):
        yield times[p - 1][kind][i] if p else -1
    else:
        yield times[p + 1][kind][i] if p + 1 < len(times) else -1
    if kind:
        yield times[p][kind - 1][i]


def _close_up(times: _Times) -> None:
    """Moves operations of both ends to earlier free places; between them, where the pattern repeats, nothing can be won.

    The first end is over when the first microbatch is back where it began, the second begins with the last forward there. Without places of
    their own weight halves are done where nothing else is, so that forwards of the first end would only take their room: those stay.
    """
    explicit = len(times[0]) > _WEIGHT
    visits = _by_time(times)
    last = len(times[0][_THERE]) - 1
    begin = next(n for n, (_, p, kind, _) in enumerate(visits) if kind == _INPUT_THERE and p == 0)
    end = next((n for n, (_, _, kind, i) in enumerate(visits) if n > begin and kind == _THERE and i == last), begin)
    rooms = [_Room(row, explicit) for row in times]
    most = max(room.most for room in rooms)
    ends = [sorted(row[_INPUT_BACK] + row[_INPUT_THERE]) for row in times]
    for n, (time, p, kind, i) in enumerate(visits):
        if begin <= n <= end or (n < begin and not explicit):
            continue
        after = max(-1, *_inputs(times, p, kind, i), ends[p][i] if kind == _WEIGHT else -1)
        place = rooms[p].move(kind, time, after + 1, most)
        if place == time:
            continue
        times[p][kind][i] = place
        if kind in (_INPUT_BACK, _INPUT_THERE):
            ends[p] = sorted(times[p][_INPUT_BACK] + times[p][_INPUT_THERE])


class _Room:
    """What a position does at which time, and how many activations it holds after each.

    Where weight halves have no places of their own, one that waits is done at every free time.
    """

    def __init__(self, row: Sequence[Sequence[int]], explicit: bool) -> None:
        self._explicit = explicit
        self._kinds: list[int | None] = [None] * (1 + max(time for places in row for time in places))
        for kind, places in enumerate(row):
            for time in places:
                self._kinds[time] = kind
        self._held = [0] * len(self._kinds)
        self._waiting = [0] * len(self._kinds)  # weight halves, after each time
        self._walk(0, len(self._kinds))
        self.most = max(self._held)

    def _walk(self, start: int, most: int) -> bool:
        """Counts anew from a time to the end, or to where more than `most` are held; returns whether there is no such time."""
        explicit, holds, waits = self._explicit, self._held, self._waiting
        held, waiting = (holds[start - 1], waits[start - 1]) if start else (0, 0)
        for at in range(start, len(self._kinds)):
            kind = self._kinds[at]
            if kind is None:
                if waiting and not explicit:
                    held -= 1
                    waiting -= 1
            elif kind <= _BACK:
                held += 1
                if held > most:
                    return False
            elif kind == _WEIGHT:
                held -= 1
                waiting -= 1
            else:
                waiting += 1
            holds[at], waits[at] = held, waiting
        return True

    def move(self, kind: int, time: int, earliest: int, most: int) -> int:
        """Moves an operation to the first free time from `earliest` on at which no more than `most` activations are held, and says which; it may stay."""
        for place in range(earliest, time):
            if self._kinds[place] is None and self._try(kind, time, place, most):
                return place
        return time

    def _try(self, kind: int, time: int, place: int, most: int) -> bool:
        if self._explicit:
            return self._shift({_THERE: 1, _BACK: 1, _WEIGHT: -1}.get(kind, 0), kind, time, place, most)
        before = self._held[place:], self._waiting[place:]
        self._kinds[time], self._kinds[place] = None, kind
        if self._walk(place, most):
            return True
        self._kinds[time], self._kinds[place] = kind, None
        self._held[place:], self._waiting[place:] = before
        return False

    def _shift(self, change: int, kind: int, time: int, place: int, most: int) -> bool:
        """What an operation does to the count it now does from `place` on, instead of from `time` on."""
        if change > 0 and max(self._held[place:time]) + change > most:
            return False
        self._held[place:time] = [held + change for held in self._held[place:time]]
        self._kinds[time], self._kinds[place] = None, kind
        return True
