"""Two runs of one model side by side: whole, and as a tensor rank with parts of some parameters would run it.

Both runs are written down as events: a call of a torch function, or of a module that is split, which counts as one event. The second run is held against
the first, event by event: its inputs must be parts of those of the first, and so must its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from pdsl.lowering.places import MeshAxis
from pdsl.lowering.probe_loss import CrossEntropy
from pdsl.lowering.probe_placed import Placement, axes_of, find_placements, split_placement, whole
from pdsl.lowering.tensor_facts import SplitLoss, TensorProblem

__all__ = ["Event", "PartRun", "ProblemFound", "WholeRun"]


class ProblemFound(BaseException):
    """Ends the second run. No Exception, so that no model swallows it."""

    def __init__(self, problem: TensorProblem) -> None:
        self.problem = problem


@define(eq=False)
class Event:
    """One call. `name` is that of the function, or of the module if `module` says so; `where` the module in whose forward it was made.

    `leaves` are its flattened arguments; `inputs` and `outputs` the tensors among arguments and results. `random` tells that it drew random numbers.
    `placements` are those of the outputs, in the second run.
    """

    name: str
    where: str
    func: Any
    leaves: list[Any]
    spec: Any
    inputs: list[Tensor]
    outputs: list[Tensor]
    random: bool = False
    module: bool = False
    placements: list[Placement] = field(factory=list)


class WholeRun(TorchFunctionMode):
    """The first run: writes down its events. `at` is the stack of modules that run."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.at: list[str] = [""]
        self.silent: set[int] = set()  # ids of tensors made without gradients from ones that need them: inside of an autograd function
        self._muted = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._muted:
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        before, version = torch.get_rng_state(), inputs[0]._version if inputs else 0
        result = self._call(func, args, kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not outputs and inputs and inputs[0]._version != version:
            outputs = [inputs[0]]
        if not torch.is_grad_enabled() and any(t.requires_grad or id(t) in self.silent for t in inputs):
            self.silent.update(map(id, outputs))
        if outputs:
            drew = not torch.equal(before, torch.get_rng_state())
            name = getattr(func, "__name__", str(func))
            self.note(Event(name, self.at[-1], func, leaves, spec, inputs, outputs, random=drew))
        return result

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Within the block nothing is written down."""
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before

    def note(self, event: Event) -> None:
        self.events.append(event)

    def note_module(self, name: str, inputs: list[Tensor], outputs: list[Tensor], placements: list[Placement] | None = None) -> None:
        """A module, or what stands for one, has run as a whole."""
        self.note(Event(name, self.at[-1], None, [], None, inputs, outputs, module=True, placements=placements or []))


class PartRun(WholeRun):
    """The second run, held against the first. Raises ProblemFound where they part."""

    def __init__(self, first: Sequence[Event], axes: Sequence[MeshAxis]) -> None:
        super().__init__()
        self.first = first
        self.axes = axes
        self.alive: list[Tensor] = []  # ids stay unique as long as their objects live
        self.sources: dict[int, str] = {}  # id of a tensor -> the split parameter that it comes from
        self.losses: list[SplitLoss] = []
        self._place: dict[int, Placement] = {}
        self._twin: dict[int, Tensor] = {}
        self._known: dict[object, list[Placement]] = {}

    def start(self, part: Tensor, twin: Tensor, placement: Placement) -> None:
        """Say what a tensor that is there before the run is a part of."""
        self.alive.append(part)
        self._place[id(part)], self._twin[id(part)] = placement, twin

    def placement(self, tensor: Tensor) -> Placement | None:
        """How a tensor of this run is a part of its twin; None if that is not known."""
        return self._place.get(id(tensor))

    @property
    def expected(self) -> Event | None:
        """The event of the first run that comes next."""
        index = len(self.events)
        return self.first[index] if index < len(self.first) else None

    def problem(self, kind: str, text: str, tensors: Sequence[Tensor] = ()) -> ProblemFound:
        """What is wrong here, with the parameter that the tensors come from."""
        source = next((s for t in tensors if (s := self.sources.get(id(t)))), "")
        return ProblemFound(TensorProblem(kind, self.at[-1], text, source))

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if getattr(func, "__name__", "") in _READING:
            read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and axes_of(self.placement(leaf) or ())]
            if read:
                raise self.problem("differs", f"{func.__name__} reads the values of a tensor that lies split", read)
        try:
            loss = self._split_loss(func, args, kwargs)
            return func(*args, **kwargs) if loss is None else loss.of_part()
        except Exception as error:
            expected = self.expected
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if expected is None or not given or expected.name != getattr(func, "__name__", ""):
                raise
            raise self._uneven(expected, given) or self.problem("fails", _failure(expected, given, error), given) from None

    def _split_loss(self, func: Any, args: Any, kwargs: Any) -> CrossEntropy | None:
        """The call, if it is one of a cross entropy whose classes are split. Its scores get a whole gradient of their own classes."""
        if func is not F.cross_entropy:
            return None
        loss = CrossEntropy.of(args, kwargs)
        placed = self.placement(loss.scores)
        if not placed or not placed[loss.dim] or placed != split_placement(len(placed), loss.dim, placed[loss.dim]):
            return None
        if loss.refused:
            raise self.problem("differs", loss.refused, [loss.scores])
        return loss

    def note_loss(self, scores: Tensor, dim: int, targets: int) -> None:
        """A cross entropy of scores whose classes, along a dim, lie split, with so many targets in all rows."""
        placed = self.placement(scores)
        assert placed is not None
        self.losses.append(SplitLoss(self._module_of(scores), placed[dim], targets))

    def _module_of(self, tensor: Tensor) -> str:
        """The split module that a tensor comes from."""
        wanted = id(tensor)
        for event in reversed(self.events):
            if wanted not in map(id, event.outputs):
                continue
            if event.module:
                return event.name
            if wanted not in map(id, event.inputs):  # else it was written into, and was scores before
                wanted = next((id(t) for t in event.inputs if axes_of(self.placement(t) or ())), 0)
        raise self.problem("differs", "scores are written into a tensor that was made without them", [tensor])

    def note(self, event: Event) -> None:
        twin = self.expected
        if twin is None or twin.name != event.name or len(twin.inputs) != len(event.inputs) or len(twin.outputs) != len(event.outputs):
            raise self.problem(
                "differs", f"the model takes another path than with whole parameters: it calls {event.name} here", event.inputs
            )
        loss = self._split_loss(event.func, *tree_unflatten(event.leaves, event.spec)) if event.func is F.cross_entropy else None
        if loss is not None:
            event.module, event.placements = True, [whole(t.dim()) for t in event.outputs]
            self.note_loss(loss.scores, loss.dim, loss.target.numel())
        if not event.placements:
            event.placements = self._placed(event, twin)
        self.events.append(event)
        source = next((s for t in event.inputs if (s := self.sources.get(id(t)))), None)
        for mine, theirs, placement in zip(event.outputs, twin.outputs, event.placements, strict=True):
            self.start(mine, theirs, placement)
            if source is not None and axes_of(placement):
                self.sources.setdefault(id(mine), source)

    def _placed(self, event: Event, twin: Event) -> list[Placement]:
        given = [self._given(mine, theirs) for mine, theirs in zip(event.inputs, twin.inputs, strict=True)]
        if event.random:
            self._check_draw(event, given)
        mine, theirs = _plain(event.leaves), _plain(twin.leaves)
        same = [t.shape for t in event.outputs] == [t.shape for t in twin.outputs]
        if same and mine == theirs and not any(axes_of(p) for p in given):
            return [whole(t.dim()) for t in event.outputs]
        exact = all(t.is_floating_point() for t in twin.inputs)
        shapes = tuple((tuple(t.shape), t.dtype) for t in twin.inputs)
        key = (event.name, event.random, mine, theirs, shapes, tuple(given), tuple(tuple(t.shape) for t in event.outputs))
        if exact and key in self._known:
            return self._known[key]
        found = self._tried(event, twin, given)
        if found is None:
            raise self._uneven(twin, event.inputs) or self.problem("differs", _difference(event, twin), event.inputs)
        self._known[key] = found
        return found

    def _given(self, mine: Tensor, twin: Tensor) -> Placement:
        known = self._place.get(id(mine))
        if known is not None and self._twin[id(mine)] is twin:
            return known
        if known is None and mine.shape == twin.shape and not mine.requires_grad:
            return whole(mine.dim())  # a constant that the model keeps
        raise self.problem("differs", "the model computes with a tensor here of which is not known where it came from", [mine])

    def _check_draw(self, event: Event, given: Sequence[Placement]) -> None:
        """A rank takes its part of the numbers that one process draws by its coordinate on all axes together."""
        everything = tuple(a.name for a in self.axes)
        odd = next((axes for placement in given for axes in placement if axes not in ((), everything)), None)
        if odd is not None:
            over = f"({', '.join(odd)})" if len(odd) > 1 else odd[0]
            text = f"{event.name} draws random numbers for a tensor split over {over}: it can for those over ({', '.join(everything)}), in this order"
            raise self.problem("differs", text, event.inputs)

    def _tried(self, event: Event, twin: Event, given: list[Placement]) -> list[Placement] | None:
        if event.random and event.func is not F.scaled_dot_product_attention:
            if event.name not in _PLACE_BY_PLACE:
                text = f"{event.name} draws random numbers, and is not known to draw them place by place, for a tensor that lies split"
                raise self.problem("differs", text, event.inputs)
            return [given[0]] * len(event.outputs)

        def runner(of: Event) -> Callable[[list[Tensor]], list[Tensor]]:
            return lambda tensors: _run_again(of, tensors)

        shapes = [tuple(t.shape) for t in event.outputs]
        inputs = list(zip(twin.inputs, given, strict=True))
        with self.muted(), torch.no_grad():
            try:
                return find_placements(runner(twin), runner(event), inputs, shapes, self.axes)
            except (RuntimeError, IndexError):
                return None

    def _uneven(self, twin: Event, given: Sequence[Tensor]) -> ProblemFound | None:
        """Features that are split into heads where some rank would have no whole number of them."""
        sizes = {a.name: a.size for a in self.axes}
        for mine in given:
            placement, before = self._place.get(id(mine)), self._twin.get(id(mine))
            if placement is None or before is None or not twin.outputs:
                continue
            for dim, axes in enumerate(placement):
                parts = prod(sizes[name] for name in axes)
                shape = tuple(twin.outputs[0].shape)
                heads = next((h for h, k in zip(shape[dim:], shape[dim + 1 :], strict=False) if h * k == before.shape[dim]), 0)
                if parts > 1 and heads and heads % parts:
                    features = before.shape[dim]
                    text = f"{features} features are seen as {heads} x {features // heads}, and {heads} % {parts} = {heads % parts}"
                    return self.problem("heads", text, [mine])
        return None


_READING = ("numpy", "__array__", "tolist", "__dlpack__")

_PLACE_BY_PLACE = frozenset(
    name + suffix
    for name in ("dropout", "alpha_dropout", "bernoulli", "rand_like", "randn_like", "rrelu", "normal", "uniform", "exponential")
    for suffix in ("", "_")
)
"""Functions that draw a number for each element of their first input: the result lies as that does."""


def _plain(leaves: Sequence[Any]) -> tuple[str, ...]:
    return tuple("tensor" if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)


def _run_again(event: Event, tensors: list[Tensor]) -> list[Tensor]:
    """Call the function of an event with other tensors, without random numbers."""
    fresh: dict[int, Tensor] = {}
    for old, new in zip(event.inputs, tensors, strict=True):
        fresh.setdefault(id(old), new)
    leaves = [fresh[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in event.leaves]
    args, kwargs = tree_unflatten(leaves, event.spec)
    if event.random:
        args, kwargs = (
            (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args,
            kwargs | ({"dropout_p": 0.0} if "dropout_p" in kwargs else {}),
        )
    result = event.func(*args, **kwargs)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return outputs or [fresh[id(event.inputs[0])]]


def _shapes(tensors: Sequence[Tensor]) -> str:
    return " and ".join(str(tuple(t.shape)) for t in tensors)


def _failure(twin: Event, given: Sequence[Tensor], error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{twin.name} of {_shapes(twin.inputs)} has {_shapes(given)} on a tensor rank, and fails: {first}"


def _difference(event: Event, twin: Event) -> str:
    if not event.inputs:
        return f"{event.name} gives {_shapes(event.outputs)} on a tensor rank, which is no part of the whole result {_shapes(twin.outputs)}"
    return (
        f"{event.name} of {_shapes(twin.inputs)} has {_shapes(event.inputs)} on a tensor rank, and gives {_shapes(event.outputs)}, "
        f"which is no part of the whole result {_shapes(twin.outputs)}"
    )
