"""The way back through what two runs wrote down: which gradients are whole on every tensor rank and which are parts to be summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from pdsl.lowering.probe_placed import axes_of
from pdsl.lowering.probe_tensor_trace import Event, PartRun, ProblemFound
from pdsl.lowering.tensor_facts import TensorProblem

__all__ = ["flow_back"]

_State = frozenset[str]
_FULL: _State = frozenset()


def flow_back(run: PartRun, ends: Sequence[Tensor], names: Mapping[int, str]) -> dict[str, tuple[str, ...]]:
    """The parameters (by the names of their ids) whose gradient is a part, with the tensor axes over which it is to be summed.

    The gradient of a tensor that is whole on all ranks is a part if what was made of it lies split: each rank's loss then depends on it through its own part
    alone. All uses of a tensor must agree, or neither its gradient nor the sum of the parts would be right. A split module sums the
    gradient of its input itself, and expects a whole one of its output. Raises ProblemFound where that does not hold.
    """
    states: dict[int, set[_State]] = {}
    places: dict[int, Event] = {}
    for tensor in ends:
        states.setdefault(id(tensor), set()).add(_FULL)
    for event in reversed(run.events):
        reached = [t for t in event.outputs if id(t) in states]
        for tensor in reached:
            _agree(states[id(tensor)], places.get(id(tensor), event), names.get(id(tensor), ""))
        if not reached:
            continue
        found = {next(iter(states[id(t)])) for t in reached}
        if event.module:
            _check_module(event, found)
            _reach(run, event, states, places, _FULL, frozenset(), outputs=frozenset())
            continue
        _agree(found, event, "")
        split = frozenset().union(*(axes_of(p) for t, p in zip(event.outputs, event.placements, strict=True) if id(t) in states))
        _reach(run, event, states, places, next(iter(found)), split, outputs=frozenset(id(t) for t in event.outputs))
    _check_own_gradients(run, states)
    partial = {}
    for key, name in names.items():
        found = states.get(key, set())
        if len(found) > 1:
            _mixed(places[key], name)
        state = next(iter(found), _FULL)
        if state:
            partial[name] = tuple(a.name for a in run.axes if a.name in state)
    return partial


def _reach(
    run: PartRun,
    event: Event,
    states: dict[int, set[_State]],
    places: dict[int, Event],
    state: _State,
    split: _State,
    outputs: frozenset[int],
) -> None:
    for tensor in event.inputs:
        if id(tensor) in outputs:  # written in place: its earlier uses are those before
            continue
        if not tensor.requires_grad and id(tensor) not in run.silent:
            continue
        mine = axes_of(run.placement(tensor) or ())
        states.setdefault(id(tensor), set()).add(state | (split - mine))
        places.setdefault(id(tensor), event)


def _check_own_gradients(run: PartRun, states: Mapping[int, set[_State]]) -> None:
    """A gradient that the model's own code computes or changes must be a whole one: what it does with a part cannot be seen."""
    for tensor in run.alive:
        made: object = tensor.grad_fn
        own = isinstance(made, BackwardCFunction) and type(made).__name__ not in _RECOMPUTING
        if not own and not tensor._backward_hooks:
            continue
        split = axes_of(run.placement(tensor) or ()) | frozenset().union(*states.get(id(tensor), ()))
        if split:
            who = "a hook" if not own else type(made).__name__.removesuffix("Backward")
            text = f"{who} of the model computes a gradient of its own, for a tensor of which each rank has a part over {', '.join(sorted(split))}"
            raise run.problem("gradient", text, [tensor])


_RECOMPUTING = ("CheckpointFunctionBackward",)
"""Functions of torch whose backward is that of what they ran."""


def _agree(found: set[_State], event: Event, name: str) -> None:
    if len(found) > 1:
        _mixed(event, name)


def _check_module(event: Event, found: set[_State]) -> None:
    if found != {_FULL}:
        over = ", ".join(sorted(frozenset().union(*found)))
        text = f"what {event.name} gives is whole, and is used together with what lies split over {over}: its gradient would be a part on each rank"
        raise ProblemFound(TensorProblem("gradient", event.name, text))


def _mixed(event: Event, name: str) -> None:
    what = name or "a tensor that is whole on every rank"
    text = f"{what} is used by {event.name} together with what lies split, and elsewhere with what is whole: its gradient would be neither whole nor a part"
    raise ProblemFound(TensorProblem("gradient", event.where, text, name))
