"""What a module does whose weight is split over tensor axes: which of its features lie split, and what it takes and gives.

A Linear weight is (outputs, inputs), an Embedding weight (inputs, outputs). `colwise` and `rowwise` are the two halves of a pair and leave the
tensor between them split; a layout in slots (`[tp, _]`) says only where the weight lies, so its module takes and gives whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen

from pdsl.lowering.facts import ParameterFacts
from pdsl.lowering.places import MeshAxis
from pdsl.lowering.plan import ParameterLayout

__all__ = ["ModuleStyle", "is_sequence", "module_style", "sequence_of", "split_axes", "split_modules"]


@frozen
class ModuleStyle:
    """`outputs`, `inputs`: the axes that split the output and the input features, major first. `takes_whole`, `gives_whole`: whether the module's own
    input and output are whole all the same.
    """

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    takes_whole: bool
    gives_whole: bool


def module_style(layout: ParameterLayout, axes: Sequence[MeshAxis], *, embedding: bool) -> ModuleStyle:
    """The style of a Linear, or of an Embedding, whose weight has a layout. `axes` are the tensor axes, major first."""
    by_dim = {dim: split_axes(names, axes) for dim, names in layout.splits}
    outputs, inputs = by_dim.get(1 if embedding else 0, ()), by_dim.get(0 if embedding else 1, ())
    slots = any(term.startswith("[") for term in _terms(layout))
    return ModuleStyle(outputs, inputs, takes_whole=slots or embedding or not inputs, gives_whole=slots or not outputs)


def split_axes(names: tuple[str, ...], axes: Sequence[MeshAxis]) -> tuple[str, ...]:
    """The axes that a split names; a plan names none where it means all. A role without axes by name counts as one axis."""
    return names or tuple(a.name for a in axes) or ("tensor",)


def split_modules(parameters: Iterable[ParameterFacts], layouts: Iterable[ParameterLayout]) -> tuple[str, ...]:
    """The modules with a parameter that tensor axes split, under all their names, in the order of the model. `layouts` are those of the parameters."""
    split = (p for p, layout in zip(parameters, layouts, strict=True) if layout.splits)
    return tuple(dict.fromkeys(name.rpartition(".")[0] for p in split for name in (p.name, *p.aliases)))


def is_sequence(layout: ParameterLayout) -> bool:
    """Whether the rule of a parameter says that its module works on a part of the sequence."""
    return any(term.startswith("sequence(") for term in _terms(layout))


def _terms(layout: ParameterLayout) -> list[str]:
    return layout.style.split(" + ")


def sequence_of(layouts: Iterable[ParameterLayout], axes: Sequence[MeshAxis]) -> tuple[str, ...]:
    """The axes along which the stream is split in its sequence: those that the first `sequence(...)` names; () if there is none."""
    found = next((term for layout in layouts for term in _terms(layout) if term.startswith("sequence(")), "")
    named = found.partition("(")[2].partition(")")[0]
    return tuple(name for name in (n.strip() for n in named.split(",")) if any(a.name == name for a in axes))
