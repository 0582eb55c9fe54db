"""What the tensor probe found: how a model's own code behaves when some of its parameters are split over tensor axes.

The probe runs the model once whole and once as a single tensor rank would, side by side. What differs is a problem that a rule reports; what is
needed to run exactly (which gradients are parts, where a split sequence is gathered, which tensors cross a boundary split) is kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod

from attrs import frozen

from pdsl.lowering.places import MeshAxis

__all__ = ["SEQUENCE", "SplitInput", "SplitLoss", "TensorFacts", "TensorProblem", "local_dims"]

SEQUENCE = -2
"""The dim of a stream (..., sequence, features) along which it is split."""


@frozen
class TensorProblem:
    """Something that a tensor rank would compute otherwise than one process. `kind` is one of `heads`, `fails`, `differs`, `gradient`, `layout`, `sequence`,
    `module`; `module` is the path of the module in whose forward it shows; `parameter` is the one whose layout is to blame, if one is.
    """

    kind: str
    module: str
    text: str
    parameter: str = ""


@frozen
class SplitInput:
    """Tensor `index` among the inputs of layer `layer` lies split in dim `dim` over `axes` when it crosses into the layer."""

    layer: int
    index: int
    dim: int
    axes: tuple[str, ...]


@frozen
class SplitLoss:
    """A cross entropy is computed from the scores that `module` leaves split over `axes`, with so many `targets` in a row of the batch."""

    module: str
    axes: tuple[str, ...]
    targets: int


@frozen
class TensorFacts:
    """`partial`: parameters whose gradient is a part on each rank of some tensor axes, and is summed over them.

    `sequence`: the axes along which the stream between the layers is split in its sequence, () for none. `enters` are the inputs of the first block that
    are split there, `exits` the (leaf, dim) of what the last block gives that are gathered behind it. `gathers`: modules that are given a whole sequence where theirs lies split, with the leaves of their arguments, `scatters`:
    modules whose output is left split along it, `shares`: modules for whose input nothing is exchanged, since it was for another; `inputs`: tensors that cross into a layer split; `losses`: the cross entropies of scores that lie split. `saved` are for each layer the bytes that autograd keeps of some rows on one tensor
    rank, and in the whole model.
    """

    problems: tuple[TensorProblem, ...] = ()
    partial: tuple[tuple[str, tuple[str, ...]], ...] = ()
    sequence: tuple[str, ...] = ()
    enters: tuple[SplitInput, ...] = ()
    exits: tuple[tuple[int, int], ...] = ()
    gathers: tuple[tuple[str, tuple[int, ...]], ...] = ()
    scatters: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    inputs: tuple[SplitInput, ...] = ()
    losses: tuple[SplitLoss, ...] = ()
    saved: tuple[tuple[int, int], ...] = ()

    @property
    def exchanges(self) -> tuple[object, ...]:
        """Where the stream is split and gathered, and which modules leave scores split."""
        return self.enters, self.exits, self.gathers, self.scatters, self.inputs, {loss.module for loss in self.losses}

    def share(self, layer: int) -> Fraction:
        """The share of what autograd saves in a layer of the whole model that it saves on a tensor rank."""
        part, whole = self.saved[layer] if layer < len(self.saved) else (1, 1)
        return Fraction(part, whole) if whole else Fraction(1)

    def summed(self, parameter: str) -> tuple[str, ...]:
        """The tensor axes over which the gradient of a parameter is to be summed."""
        return dict(self.partial).get(parameter, ())


def local_dims(dims: tuple[tuple[int, int], ...], split: SplitInput | None, axes: Sequence[MeshAxis]) -> tuple[tuple[int, int], ...]:
    """The (constant, per row) sizes of a boundary tensor as one tensor rank has it."""
    if split is None:
        return dims
    parts = prod(a.size for a in axes if a.name in split.axes)
    constant, per_row = dims[split.dim]
    return (*dims[: split.dim], (constant // parts, per_row // parts), *dims[split.dim + 1 :])
