"""Rows of the schedules whose stages go there and back: position r has stages r and 2p-1-r, so that the last stage is where the first is.

A forward that reaches the end of the pipeline turns into its backward at once on the same position. What is gained is memory: positions are equally
full, where in a loop the first holds most. All of them keep the weight halves of some backwards for times when nothing else can be done.
"""

from __future__ import annotations

from pdsl.lowering.loop_schedules import at_least_one
from pdsl.lowering.schedule import Op, Operation, Schedule, v_placement

__all__ = ["dualpipe_v", "zbv"]

_Row = list[Operation]


class _Position:
    """Writes the row of one position. Chunk 0 is its stage on the way there, chunk 1 the one on the way back; microbatches go in order."""

    def __init__(self, position: int, positions: int) -> None:
        self._stages = (position, 2 * positions - 1 - position)
        self._next = {(forward, chunk): 0 for forward in (True, False) for chunk in (0, 1)}
        self._waiting: list[Operation] = []
        self.row: _Row = []

    def _take(self, op: Op, chunk: int) -> Operation:
        way = op is Op.FORWARD, chunk
        made = Operation(op, self._stages[chunk], self._next[way])
        self._next[way] += 1
        self.row.append(made)
        return made

    def forward(self, chunk: int) -> None:
        self._take(Op.FORWARD, chunk)

    def whole(self, chunk: int) -> None:
        """A backward in one piece."""
        self._take(Op.BACKWARD, chunk)

    def input_half(self, chunk: int) -> None:
        o = self._take(Op.BACKWARD_INPUT, chunk)
        self._waiting.append(Operation(Op.BACKWARD_WEIGHT, o.stage, o.microbatch))

    def weight_half(self, chunk: int | None = None) -> None:
        """The oldest that waits, of one chunk if that is given."""
        at = next(i for i, o in enumerate(self._waiting) if chunk is None or o.stage == self._stages[chunk])
        self.row.append(self._waiting.pop(at))

    def waiting(self, chunk: int) -> int:
        """Weight halves of a chunk that are still to be done."""
        return sum(o.stage == self._stages[chunk] for o in self._waiting)

    def begun(self, chunk: int) -> int:
        """Forwards of a chunk that are written."""
        return self._next[True, chunk]


def _without(rows: list[_Row], microbatches: int) -> tuple[tuple[Operation, ...], ...]:
    """Rows that were made for more microbatches, without the last of them: what is left keeps its order and stays valid."""
    return tuple(tuple(o for o in row if o.microbatch < microbatches) for row in rows)


def _in_v(name: str, positions: int, microbatches: int, rows: list[_Row]) -> Schedule:
    return Schedule(name, 2 * positions, microbatches, v_placement(positions), _without(rows, microbatches))


def zbv(positions: int, microbatches: int) -> Schedule:
    """ZB-V: 2(p-r)-1 forwards there, then one there and one back in turn, then forward, input half and weight half of both.

    With F = I = W and m >= 2p-1 a step takes 6m + p - 1 in times of one stage, and every position holds 2p activations, as much memory as 1F1B
    takes on its first position (Qi et al., 2405.15362). Fewer microbatches are those of 2p-1 without the rest, which wastes some time. The order is torch's.
    """
    at_least_one(positions=positions, microbatches=microbatches)
    rows = [_zbv_row(r, positions, max(microbatches, 2 * positions - 1)) for r in range(positions)]
    return _in_v("zbv", positions, microbatches, rows)


def _zbv_row(position: int, positions: int, microbatches: int) -> _Row:
    at = _Position(position, positions)
    for _ in range(2 * (positions - position) - 1):
        at.forward(0)
    for _ in range(position):
        at.forward(1)
        at.forward(0)
    for _ in range(positions - position):
        at.forward(1)
        at.input_half(1)
        at.weight_half(1)
    while at.begun(1) < microbatches:
        if at.begun(0) < microbatches:
            at.forward(0)
        at.input_half(0)
        at.weight_half(0)
        at.forward(1)
        at.input_half(1)
        at.weight_half(1)
    for _ in range(position):
        at.input_half(0)
        at.input_half(1)
    for _ in range(positions - position):
        at.input_half(0)
        at.weight_half(0)
    for chunk in (1, 0):
        for _ in range(at.waiting(chunk)):
            at.weight_half(chunk)
    return at.row


def dualpipe_v(positions: int, microbatches: int) -> Schedule:
    """DualPipe cut in half: in the steady state forwards of one chunk and backwards of the other alternate, whole backwards, halves only at the ends.

    The two are meant to overlap on a device. One after another, with F = I = W and m >= 2p, a step takes 6m + p - 1 in times of one stage, and a position
    holds up to 2p + 1 activations (DeepSeek-V3, 2412.19437). Fewer microbatches than 2p are those of 2p without the rest, which wastes time.
    """
    at_least_one(positions=positions, microbatches=microbatches)
    rows = [_dualpipe_row(r, positions, max(microbatches, 2 * positions)) for r in range(positions)]
    return _in_v("dualpipe_v", positions, microbatches, rows)


def _dualpipe_row(position: int, positions: int, microbatches: int) -> _Row:
    at = _Position(position, positions)
    after = positions - 1 - position
    for _ in range(2 * after):
        at.forward(0)
    for _ in range(position + 1):
        at.forward(0)
        at.forward(1)
    for _ in range(after):
        at.input_half(1)
        at.weight_half()
        at.forward(1)
    for _ in range(microbatches - 2 * positions + position + 1):
        at.forward(0)
        at.whole(1)
        at.forward(1)
        at.whole(0)
    for _ in range(after):
        at.whole(1)
        at.forward(1)
        at.whole(0)
    _dualpipe_end(at, position)
    for _ in range(after):
        at.weight_half()
        at.input_half(0)
    for _ in range(position + 1):
        at.weight_half()
    return at.row


def _dualpipe_end(at: _Position, position: int) -> None:
    """Backwards of both chunks in turn, position + 1 of each: whole ones first, then in halves, whose weight halves fill the way home."""
    for n in range(2 * (position + 1)):
        backward = at.input_half if n > position else at.whole
        backward(1 - n % 2)
