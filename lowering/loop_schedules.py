"""Rows of the schedules whose stages go round in a loop: stage s on position s % p, one stage on each position or several.

All of them are one idea: some forwards to warm up, then forward and backward in turn, then the rest. They differ in the order in which stages take their
turn, in the length of the warm-up, and in whether the weight gradients wait until the next position has its input gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdsl.lowering.schedule import Op, Operation, Schedule, ScheduleError, loop_placement

__all__ = [
    "at_least_one",
    "eager_1f1b",
    "gpipe",
    "groups",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_f_one_b",
    "single",
    "zero_bubble",
    "zero_bubble_2",
]

_Order = Sequence[tuple[int, int]]
"""(chunk, microbatch) in the order in which a position takes them. Chunk c of position r is stage c * p + r."""


def at_least_one(**counts: int) -> None:
    """Raises ScheduleError with the name of the first count that is below 1."""
    for name, value in counts.items():
        if value < 1:
            raise ScheduleError(f"{name} must be at least 1, not {value}")


def _forward(stage: int, microbatch: int) -> Operation:
    return Operation(Op.FORWARD, stage, microbatch)


def _backward(stage: int, microbatch: int) -> Operation:
    return Operation(Op.BACKWARD, stage, microbatch)


def _warm_up(ahead: int, forwards: Sequence[Operation], backwards: Sequence[Operation]) -> tuple[Operation, ...]:
    """`ahead` forwards, then forward and backward in turn, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    row = list(forwards[:ahead])
    for done, backward in enumerate(backwards):
        row.extend(forwards[ahead + done : ahead + done + 1])
        row.append(backward)
    return tuple(row)


def _split(row: Sequence[Operation], waiting: int) -> tuple[Operation, ...]:
    """The same row with each backward in two halves: the weight half of the oldest is done once more than `waiting` of them are pending."""
    made: list[Operation] = []
    pending: list[Operation] = []
    for o in row:
        if o.op is not Op.BACKWARD:
            made.append(o)
            continue
        made.append(Operation(Op.BACKWARD_INPUT, o.stage, o.microbatch))
        pending.append(Operation(Op.BACKWARD_WEIGHT, o.stage, o.microbatch))
        if len(pending) > waiting:
            made.append(pending.pop(0))
    return (*made, *pending)


# --- one stage on each position -------------------------------------------------------------------------------------------------------------


def single(microbatches: int) -> Schedule:
    """One position with one stage: forward and backward of each microbatch in turn, which is gradient accumulation."""
    at_least_one(microbatches=microbatches)
    row = tuple(op for i in range(microbatches) for op in (_forward(0, i), _backward(0, i)))
    return Schedule("single", 1, microbatches, (0,), (row,))


def gpipe(positions: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in order of microbatches. Every position holds all m activations at its peak."""
    at_least_one(positions=positions, microbatches=microbatches)
    m = range(microbatches)
    rows = tuple((*(_forward(s, i) for i in m), *(_backward(s, i) for i in m)) for s in range(positions))
    return Schedule("gpipe", positions, microbatches, loop_placement(positions), rows)


def _in_turn(name: str, positions: int, microbatches: int, ahead: Sequence[int], waiting: Sequence[int] | None = None) -> Schedule:
    """Forward and backward in turn after `ahead[r]` forwards on position r; split, with `waiting[r]` weight halves behind, if that is given."""
    m = range(microbatches)
    rows = []
    for s in range(positions):
        row = _warm_up(ahead[s], [_forward(s, i) for i in m], [_backward(s, i) for i in m])
        rows.append(row if waiting is None else _split(row, waiting[s]))
    return Schedule(name, positions, microbatches, loop_placement(positions), tuple(rows))


def one_f_one_b(positions: int, microbatches: int) -> Schedule:
    """min(m, p-1-r) forwards on position r, then forward and backward in turn, then the rest. Position r holds min(m, p-r) activations.

    The rows are valid for every count of microbatches, so that an uneven split of the batch may give a long pipeline few of them. That a
    spec must ask for at least as many as there are stages is a rule of the language: `SCHEDULES["one_f_one_b"].accepts`.
    """
    at_least_one(positions=positions, microbatches=microbatches)
    return _in_turn("one_f_one_b", positions, microbatches, [positions - 1 - r for r in range(positions)])


def eager_1f1b(positions: int, microbatches: int) -> Schedule:
    """1F1B with 2(p-r)-1 microbatches in flight on position r, so that transfers as long as an operation cost no time in the steady state.

    Without latency it takes as long as 1F1B and holds up to twice as many activations.
    """
    at_least_one(positions=positions, microbatches=microbatches)
    return _in_turn("eager_1f1b", positions, microbatches, [2 * (positions - 1 - r) for r in range(positions)])


def zero_bubble(positions: int, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with the backward in halves; position r keeps r weight halves back for the time when it has nothing else to do.

    With F = I = W and m >= p a step takes 3m + p - 1, which no order of the operations can beat, and every position holds p activations
    (Qi et al., Zero Bubble Pipeline Parallelism, 2401.10241). The time stays least for m < p.
    """
    at_least_one(positions=positions, microbatches=microbatches)
    return _in_turn("zero_bubble", positions, microbatches, [positions - 1 - r for r in range(positions)], range(positions))


def zero_bubble_2(positions: int, microbatches: int) -> Schedule:
    """ZB-H2: 2(p-r)-1 microbatches in flight on position r and 2r weight halves behind, 2p-1 activations at most.

    A step that ends with a barrier is no shorter than with ZB-H1 unless transfers take time; then what is in flight hides them.
    """
    at_least_one(positions=positions, microbatches=microbatches)
    ahead = [2 * (positions - 1 - r) for r in range(positions)]
    return _in_turn("zero_bubble_2", positions, microbatches, ahead, [2 * r for r in range(positions)])


# --- several stages on each position --------------------------------------------------------------------------------------------------------


def groups(positions: int, microbatches: int) -> tuple[int, ...]:
    """Sizes of the groups of microbatches that interleaving sends through one chunk before the next: max(1, m // p) groups, as equal as possible.

    A group of fewer than p microbatches would let the first position run dry between two chunks, so all have at least p (or all m, if m < p).
    """
    rounds = max(1, microbatches // positions)
    size, larger = divmod(microbatches, rounds)
    return (size + 1,) * larger + (size,) * (rounds - larger)


def _grouped(sizes: Sequence[int], virtual: int) -> tuple[_Order, _Order]:
    """Forwards and backwards in groups of these sizes: chunk by chunk, the backwards with the chunks reversed."""
    forwards: list[tuple[int, int]] = []
    backwards: list[tuple[int, int]] = []
    first = 0
    for size in sizes:
        group = range(first, first + size)
        forwards += [(chunk, i) for chunk in range(virtual) for i in group]
        backwards += [(chunk, i) for chunk in reversed(range(virtual)) for i in group]
        first += size
    return forwards, backwards


def _looped(
    name: str, positions: int, microbatches: int, virtual: int, sizes: Sequence[int], ahead: Sequence[int], waiting: Sequence[int] | None
) -> Schedule:
    """Several stages per position in groups of these sizes, with `ahead[r]` forwards to warm up and, if split, `waiting[r]` weight halves behind."""
    forwards, backwards = _grouped(sizes, virtual)
    rows = []
    for r in range(positions):
        row = _warm_up(
            ahead[r], [_forward(c * positions + r, i) for c, i in forwards], [_backward(c * positions + r, i) for c, i in backwards]
        )
        rows.append(row if waiting is None else _split(row, waiting[r]))
    placement = loop_placement(positions, virtual)
    return Schedule(name, len(placement), microbatches, placement, tuple(rows))


def interleaved_1f1b(positions: int, microbatches: int, virtual: int) -> Schedule:
    """1F1B over `virtual` stages per position in loop placement, for any count of microbatches.

    Forwards go in groups of k microbatches, chunk by chunk; backwards in the same groups with the chunks reversed. The warm-up on position r is
    (v-1)*k + 2*(p-1-r) forwards, k the largest group. The order is Megatron's where p divides m, and torch's where m // p divides m; elsewhere
    the groups differ by one, which costs memory but no time: with m >= p the bubble is (p-1) / (v*m + p-1) for every m.
    """
    at_least_one(positions=positions, microbatches=microbatches, virtual=virtual)
    sizes = groups(positions, microbatches)
    ahead = [(virtual - 1) * max(sizes) + 2 * (positions - 1 - r) for r in range(positions)]
    return _looped("interleaved_1f1b", positions, microbatches, virtual, sizes, ahead, None)


def interleaved_zero_bubble(positions: int, microbatches: int, virtual: int) -> Schedule:
    """Interleaving with the backward in halves: a warm-up of (v-1)*k + p-1-r forwards on position r, r weight halves behind.

    The order is torch's where torch takes the count. With F = I = W and groups of equal size a step takes 3vm + p - 1.
    """
    at_least_one(positions=positions, microbatches=microbatches, virtual=virtual)
    sizes = groups(positions, microbatches)
    ahead = [(virtual - 1) * max(sizes) + positions - 1 - r for r in range(positions)]
    return _looped("interleaved_zero_bubble", positions, microbatches, virtual, sizes, ahead, range(positions))


def looped_bfs(positions: int, microbatches: int, virtual: int) -> Schedule:
    """All microbatches through one chunk before the next, and back with the chunks reversed, both in order of microbatches.

    The bubble is that of interleaving, (p-1) / (v*m + p-1) for m >= p. Every position holds all v*m activations; in return a position changes its
    stage only 2v-1 times a step, so sharded parameters are gathered seldom (Lamy-Poirier, Breadth-First Pipeline Parallelism, 2211.05953).
    """
    at_least_one(positions=positions, microbatches=microbatches, virtual=virtual)
    everything = [virtual * microbatches] * positions
    return _looped("looped_bfs", positions, microbatches, virtual, (microbatches,), everything, None)
