"""The shortest step of a pipeline, proven: an exhaustive search over all orders, small enough to be trusted beside the product's own.

Microbatches are alike, so each stage takes them in order, and a state is how many forwards, input halves and weight halves each stage has done, with the times
at which results will be there. A state that another one reached no later in every respect is dropped, and so is one whose lower bound is no better
than what was found. Nothing of the product is used, so that the two can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

__all__ = ["Pipeline", "lower_bound", "optimum"]

FORWARD, INPUT, WEIGHT = range(3)


@frozen
class Pipeline:
    """Whole times of each stage; a backward without a weight half is whole. `place` is the position of each stage, `caps` the most activations that each
    position may hold (None: any number): from its forward to the end of the backward.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    weight: tuple[int, ...] | None
    place: tuple[int, ...]
    microbatches: int
    hop: int = 0
    caps: tuple[int, ...] | None = None

    @classmethod
    def equal(
        cls, positions: int, microbatches: int, forward: int = 1, backward: int = 2, weight: int = 0, *, hop: int = 0, cap: int = 0
    ) -> Pipeline:
        """One stage on each position, all alike; `weight` 0 is a whole backward, `cap` 0 is none."""
        p = positions
        caps = (cap,) * p if cap else None
        return cls((forward,) * p, (backward,) * p, (weight,) * p if weight else None, tuple(range(p)), microbatches, hop, caps)

    @property
    def positions(self) -> int:
        return max(self.place) + 1

    def time(self, kind: int, stage: int) -> int:
        return (self.forward, self.backward, self.weight or ())[kind][stage]


def lower_bound(of: Pipeline) -> int:
    """What no order beats: the work of a position after the stages before it, or its forwards and input halves between its way in and its way out."""
    p, m = of.positions, of.microbatches
    heads = [sum(f + _hop(of, s) for s, f in enumerate(of.forward[:stage])) for stage in range(len(of.place))]
    tails = _tails(of)
    found = [_path(of)]
    for at in range(p):
        mine = [s for s, place in enumerate(of.place) if place == at]
        head, tail = min(heads[s] for s in mine), min(tails[s] for s in mine)
        through = m * sum(of.forward[s] + of.backward[s] for s in mine)
        found += [head + through + (m * sum(of.weight[s] for s in mine) if of.weight else 0), head + through + tail]
    return max(found)


def _hop(of: Pipeline, stage: int) -> int:
    """The latency between a stage and the next."""
    return of.hop if of.place[stage] != of.place[stage + 1] else 0


def _tails(of: Pipeline) -> list[int]:
    """What follows the last backward of each stage: those of the stages before it, and a weight half of the first."""
    last = of.weight[0] if of.weight else 0
    return [sum(_hop(of, s) + of.backward[s] for s in range(stage)) + last for stage in range(len(of.place))]


def _path(of: Pipeline) -> int:
    """One microbatch on its way forth and back."""
    hops = sum(_hop(of, s) for s in range(len(of.place) - 1))
    return sum(of.forward) + sum(of.backward) + 2 * hops + (of.weight[0] if of.weight else 0)


@frozen
class _State:
    """`done[kind][stage]` counts, `free` when each position is, `forwards[stage]` and `inputs[stage]` when results that are not used yet were or will be there."""

    done: tuple[tuple[int, ...], ...]
    free: tuple[int, ...]
    forwards: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[int, ...], ...]


class _Search:
    def __init__(self, of: Pipeline, most_states: int) -> None:
        self.of, self.left = of, most_states
        self.stages = range(len(of.place))
        self.kinds = (FORWARD, INPUT, WEIGHT) if of.weight else (FORWARD, INPUT)
        self.tails = _tails(of)
        self.bound = lower_bound(of)
        self.several = len(of.place) > of.positions
        self.best: int | None = None
        self.known: dict[tuple[tuple[int, ...], ...], list[tuple[int, ...]]] = {}

    # --- what can be done ---------------------------------------------------------------------------------------------------------------

    def options(self, state: _State) -> Iterator[tuple[int, int, int, int]]:
        """(end, start, kind, stage) of every operation whose inputs are computed or under way, and that there is room for."""
        of, m = self.of, self.of.microbatches
        for stage in self.stages:
            at = of.place[stage]
            for kind in self.kinds:
                n = state.done[kind][stage]
                if n == m:
                    continue
                ready = self.ready(state, kind, stage, n)
                if ready is None or (kind == FORWARD and not self.room(state, at)):
                    continue
                start = max(ready, state.free[at])
                yield start + of.time(kind, stage), start, kind, stage

    def ready(self, state: _State, kind: int, stage: int, n: int) -> int | None:
        if kind == WEIGHT:
            return 0 if state.done[INPUT][stage] > n else None
        if kind == FORWARD:
            if stage == 0:
                return 0
            waiting = state.forwards[stage - 1]
            return waiting[0] if waiting else None
        if state.done[FORWARD][stage] <= n:
            return None
        if stage == self.stages[-1]:
            return 0
        waiting = state.inputs[stage + 1]
        return waiting[0] if waiting else None

    def room(self, state: _State, at: int) -> bool:
        if self.of.caps is None:
            return True
        released = state.done[self.kinds[-1]]
        held = sum(state.done[FORWARD][s] - released[s] for s in self.stages if self.of.place[s] == at)
        return held < self.of.caps[at]

    def after(self, state: _State, kind: int, stage: int, end: int) -> _State:
        of = self.of
        done = [list(counts) for counts in state.done]
        done[kind][stage] += 1
        free = list(state.free)
        free[of.place[stage]] = end
        forwards, inputs = list(state.forwards), list(state.inputs)
        if kind == FORWARD:
            if stage:
                forwards[stage - 1] = forwards[stage - 1][1:]
            if stage < self.stages[-1]:
                forwards[stage] = (*forwards[stage], end + _hop(of, stage))
        elif kind == INPUT:
            if stage < self.stages[-1]:
                inputs[stage + 1] = inputs[stage + 1][1:]
            if stage:
                inputs[stage] = (*inputs[stage], end + _hop(of, stage - 1))
        return _State(tuple(map(tuple, done)), tuple(free), tuple(forwards), tuple(inputs))

    # --- what need not be looked at -----------------------------------------------------------------------------------------------------

    def least(self, state: _State) -> int:
        """No completion of the state ends before."""
        of, m = self.of, self.of.microbatches
        found = max(state.free)
        for at in range(of.positions):
            rest = through = 0
            tail: int | None = None
            for s in self.stages:
                if of.place[s] != at:
                    continue
                left = [m - counts[s] for counts in state.done]
                work = left[FORWARD] * of.forward[s] + left[INPUT] * of.backward[s]
                through += work
                rest += work + (left[WEIGHT] * of.weight[s] if of.weight else 0)
                if left[INPUT]:
                    tail = self.tails[s] if tail is None else min(tail, self.tails[s])
            begin = max(state.free[at], self.earliest(state, at))
            found = max(found, begin + rest, begin + through + (tail or 0) if tail is not None else 0)
        return found

    def earliest(self, state: _State, at: int) -> int:
        """When a position can do anything at all: only where just one thing is left that must wait is that more than its own time."""
        times = []
        for s in self.stages:
            if self.of.place[s] != at:
                continue
            for kind in self.kinds:
                if state.done[kind][s] < self.of.microbatches:
                    ready = self.ready(state, kind, s, state.done[kind][s])
                    if ready is None:
                        continue
                    times.append(ready)
        return min(times, default=0)

    def worse(self, state: _State) -> bool:
        """Whether the same was done no later before; remembers the state if not."""
        label = (*state.free, *(t for row in state.forwards for t in row), *(t for row in state.inputs for t in row))
        known = self.known.setdefault(state.done, [])
        if any(all(a <= b for a, b in zip(other, label, strict=True)) for other in known):
            return True
        known[:] = [other for other in known if not all(a >= b for a, b in zip(other, label, strict=True))]
        known.append(label)
        return False

    def run(self, state: _State) -> None:
        options = sorted(self.options(state))
        if not options:
            if all(n == self.of.microbatches for n in state.done[self.kinds[-1]]):
                self.best = max(state.free) if self.best is None else min(self.best, max(state.free))
            return
        if not self.several or self.of.caps is None:
            # the position that could be done first: whatever it does next begins before that, or leaves a gap for nothing
            end, _, _, first = options[0]
            at = self.of.place[first]
            options = [o for o in options if self.of.place[o[3]] == at and o[1] < end]
        for end, _, kind, stage in options:
            if self.best == self.bound:
                return
            following = self.after(state, kind, stage, end)
            if self.best is not None and self.least(following) >= self.best:
                continue
            if self.worse(following):
                continue
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("too many states for a proof")
            self.run(following)


def optimum(of: Pipeline, most_states: int = 200_000) -> int:
    """The shortest step. Raises RuntimeError if a proof needs more states than that, ValueError if the caps allow no order at all."""
    search = _Search(of, most_states)
    stages = len(of.place)
    empty: tuple[tuple[int, ...], ...] = ((),) * stages
    search.run(_State(((0,) * stages,) * len(search.kinds), (0,) * of.positions, empty, empty))
    if search.best is None:
        raise ValueError("the caps allow no order")
    return search.best
