"""A backward in two halves: first the gradients of what a stage received, later those of its weights.

The graph of a forward falls into the nodes from which a received tensor can be reached, the *path*, and the rest, which leads to weights alone.
The input half runs the path and notes, at each node where weights branch off, which gradient came in. The weight half starts from there: each such
node runs once more for its weights only. So neither half does the work of the other, and hooks on weights run once, in the weight half.

Some computations cannot be taken apart: what is computed again in the backward would be so for each half, and compiled graphs free what they
saved. For these the input half is the whole backward, and nothing is left for the other. Where no received tensor needs a gradient it is the
other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["WeightHalf", "backward_input", "is_divisible"]

_INDIVISIBLE = frozenset({"CheckpointFunctionBackward", "CompiledFunctionBackward"})
"""Functions of torch that run the backward of all that is inside them at once."""

_RECOMPUTING = "torch.utils.checkpoint"

_Gradients = tuple[Tensor | None, ...]
_Weights = dict[int, Tensor]  # by id, in order
_Edges = list[tuple[Node | None, int]]


@define(eq=False)
class _Branch:
    """A node on the path from which weights branch off, and what arrived at it: the gradients of its outputs.

    A function written in Python computes all it can whenever it runs. What it computed for its weights is in `sent`, in order of `edges`.
    """

    node: Node
    edges: tuple[tuple[int, GradientEdge], ...]  # those that lead to weights: place among the node's edges, and where to
    weights: _Weights
    arrived: _Gradients = ()
    sent: _Gradients | None = None


@define(eq=False)
class _Group:
    """Branches that share weights, and outputs of the stage that depend on these weights alone. Most groups are one branch."""

    branches: list[_Branch]
    outputs: list[tuple[GradientEdge, Tensor]] = field(factory=list)
    weights: _Weights = field(factory=dict)

    @property
    def crosses(self) -> bool:
        """Whether a gradient on its way to a weight may pass other branches."""
        return len(self.branches) > 1 or bool(self.branches and self.outputs)


@define(eq=False)
class WeightHalf:
    """What is left of a backward for the weights, to be run once. `whole` tells that nothing was done yet."""

    whole: bool = False
    _groups: list[_Group] = field(factory=list)

    def weights(self) -> Iterator[Tensor]:
        """The weights that are still to get a gradient; nothing is known of them if this is the whole backward."""
        for group in self._groups:
            yield from group.weights.values()

    def run(self, done: Callable[[Iterable[Tensor]], None] = lambda weights: None) -> None:
        """Add the gradients to the weights, from the outputs of the stage on. `done` is told of weights whose gradient is complete, and which nothing
        that follows reads.
        """
        # what passes other branches comes first, while all that was saved is there
        groups = sorted(self._groups, key=lambda group: not group.crosses)
        self._groups = []
        groups.reverse()
        complete: list[Tensor] = []
        while groups:
            group = groups.pop()  # so that what it holds is free when it is done
            _run(group, whole=self.whole)
            complete += group.weights.values()
            if groups and groups[-1].crosses:
                continue  # who is told may free weights that the next one passes
            done(complete)
            complete = []


def is_divisible(outputs: Sequence[Tensor]) -> bool:
    """Whether the backward of these outputs, which require a gradient, can be had in halves."""
    order, _ = _walk([get_gradient_edge(t).node for t in outputs])
    return not any(map(_runs_as_a_whole, order))


def backward_input(outputs: Sequence[Tensor], gradients: Sequence[Tensor], received: Sequence[Tensor]) -> tuple[_Gradients, WeightHalf]:
    """The gradients of the received tensors (leaves that require one; None where no output depends on it), and what is left for the weights.

    `outputs` require a gradient, `gradients` are theirs. Without received tensors nothing is computed.
    """
    roots = [get_gradient_edge(t) for t in outputs]
    given = list(zip(roots, gradients, strict=True))
    if not received:
        return (), WeightHalf(whole=True, groups=[_Group([], given)] if given else [])
    order, edges = _walk([root.node for root in roots])
    path = _leading_to({get_gradient_edge(t).node for t in received}, order, edges)
    below = _weights_below(order, edges, path)
    branches = [b for node in reversed(order) if node in path and (b := _branch(node, edges[node], below)) is not None]
    alone = [(root, g) for root, g in given if root.node not in path]
    groups = _grouped(branches, alone, below)
    found: _Gradients = (None,) * len(received)
    if len(alone) < len(given):
        chosen = [i for i, root in enumerate(roots) if root.node in path]
        with _watched(groups):
            found = torch.autograd.grad(
                [outputs[i] for i in chosen], received, [gradients[i] for i in chosen], retain_graph=bool(branches), allow_unused=True
            )
    return found, WeightHalf(groups=groups)


# --- the graph ------------------------------------------------------------------------------------------------------------------------------


def _walk(roots: Iterable[Node]) -> tuple[list[Node], dict[Node, _Edges]]:
    """All nodes, each after those that it leads to, and the edges of each. An edge that leads nowhere has no entry but keeps its place."""
    order: list[Node] = []
    edges: dict[Node, _Edges] = {}
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, left = stack.pop()
        if left:
            order.append(node)
        elif node not in edges:
            edges[node] = following = list(node.next_functions)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in following if child is not None and child not in edges)
    return order, edges


def _leading_to(ends: set[Node], order: list[Node], edges: dict[Node, _Edges]) -> set[Node]:
    path: set[Node] = set()
    for node in order:
        if node in ends or any(child in path for child, _ in edges[node]):
            path.add(node)
    return path


def _weights_below(order: list[Node], edges: dict[Node, _Edges], path: set[Node]) -> dict[Node, _Weights]:
    """For each node off the path the weights that it leads to."""
    below: dict[Node, _Weights] = {}
    for node in order:
        if node in path:
            continue
        following = [child for child, _ in edges[node] if child is not None]
        if not following:
            weight = getattr(node, "variable", None)  # of a node that adds to the gradient of a leaf
            below[node] = {} if weight is None else {id(weight): weight}
        elif len(following) == 1:
            below[node] = below[following[0]]
        else:
            below[node] = {i: w for child in following for i, w in below[child].items()}
    return below


def _branch(node: Node, edges: _Edges, below: dict[Node, _Weights]) -> _Branch | None:
    leading = [(i, child, at) for i, (child, at) in enumerate(edges) if child is not None and below.get(child)]
    if not leading:
        return None
    weights = {i: w for _, child, _ in leading for i, w in below[child].items()}
    return _Branch(node, tuple((i, GradientEdge(child, at)) for i, child, at in leading), weights)


def _grouped(branches: list[_Branch], alone: list[tuple[GradientEdge, Tensor]], below: dict[Node, _Weights]) -> list[_Group]:
    """Groups of what shares weights, in the order of their last branches."""
    groups = [_Group([], alone, {i: w for root, _ in alone for i, w in below[root.node].items()})] if alone else []
    owner = dict.fromkeys(groups[0].weights, groups[0]) if alone else {}
    for branch in branches:
        group = _Group([branch], weights=dict(branch.weights))
        for other in {id(owner[i]): owner[i] for i in branch.weights if i in owner}.values():
            groups.remove(other)
            group = _Group([*other.branches, *group.branches], other.outputs + group.outputs, other.weights | group.weights)
            owner.update(dict.fromkeys(other.weights, group))
        owner.update(dict.fromkeys(group.weights, group))
        groups.append(group)
    return groups


def _in_python(node: object) -> bool:
    return isinstance(node, BackwardCFunction)


def _runs_as_a_whole(node: Node) -> bool:
    kind = type(node)
    if kind.__name__ in _INDIVISIBLE:
        return True
    for name in _saving_names(kind):
        saved = getattr(node, name)
        for one in saved if isinstance(saved, tuple) else (saved,):
            if getattr(getattr(one, "unpack_hook", None), "__module__", "") == _RECOMPUTING:
                return True
    return False


@cache
def _saving_names(kind: type) -> tuple[str, ...]:
    """Under which names nodes of a kind have what the forward saved, as it was packed."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


# --- running it -----------------------------------------------------------------------------------------------------------------------------


@contextmanager
def _watched(groups: Iterable[_Group]) -> Iterator[None]:
    """Within the block a backward tells every branch what arrives at it."""
    with ExitStack() as hooks:
        for group in groups:
            for branch in group.branches:
                if _in_python(branch.node) and not group.crosses:
                    hooks.enter_context(branch.node.register_hook(partial(_note_sent, branch)))
                else:
                    hooks.enter_context(branch.node.register_prehook(partial(_note_arrived, branch)))
        yield


def _note_arrived(branch: _Branch, gradients: _Gradients) -> None:
    branch.arrived = gradients


def _note_sent(branch: _Branch, gradients: _Gradients, _: Any) -> None:
    branch.sent = tuple(gradients[i] for i, _ in branch.edges)


def _run(group: _Group, *, whole: bool) -> None:
    """The gradients of the weights of one group.

    Hooks on what a branch computed have had their turn in the input half. They are called again, and what they return is put back to
    what had arrived then; so is what comes to a branch by way of another one of the group.
    """
    starts: list[tuple[GradientEdge, Tensor | None]] = list(group.outputs)
    again = [b for b in group.branches if b.sent is None]
    for branch in group.branches:
        if branch.sent is None:
            starts += [(GradientEdge(branch.node, i), g) for i, g in enumerate(branch.arrived)]
        else:
            starts += [(edge, g) for (_, edge), g in zip(branch.edges, branch.sent, strict=True)]
    kept = [(edge, g) for edge, g in starts if g is not None]
    if not kept:
        return
    with ExitStack() as hooks:
        for b in again:
            hooks.enter_context(b.node.register_prehook(partial(_put_back, b.arrived)))
        torch.autograd.backward(
            [edge for edge, _ in kept],
            [g for _, g in kept],
            retain_graph=group.crosses,
            inputs=None if whole else list(group.weights.values()),
        )


def _put_back(arrived: _Gradients, _: _Gradients) -> _Gradients:
    return arrived
