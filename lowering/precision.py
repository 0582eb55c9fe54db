"""Number formats: what a `precision` block says about each parameter.

`params` is the format that layers compute in. The weights themselves keep the format in which the model makes them, are updated in it and saved in
it; layers see a copy in `params`, and floating tensors that go into a layer are cast to it. `fp32`, the default, leaves parameters and inputs as the model
has them. Gradients are added up over microbatches and over ranks in `reduce`. What the last layer and the model give is in `output`, so that the
loss is computed in it.

What a module holds beside statistics that its forward updates (batch normalisation) stays in its own format: torch computes those in fp32 from inputs of
a lower one. Other buffers are never cast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

from pdsl.grammar.patterns import Pattern
from pdsl.lowering.spec import CallValue, PrecisionSpec, Spec

if TYPE_CHECKING:
    from pdsl.lowering.facts import ModelFacts, ParameterFacts  # a check without model starts without it

__all__ = ["AS_MADE", "FORMATS", "LOW", "RunAs", "applies", "compute_format", "input_format", "keeps_format", "output_format", "sum_format"]

FORMATS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Words of the language -> torch's names."""

LOW = frozenset({"bfloat16", "float16"})
_WIDE = frozenset({"float32", "float64"})


@frozen
class RunAs:
    """How a model is going to run, as far as its facts depend on it: in which formats, and which modules are computed again in the backward."""

    precision: PrecisionSpec = field(factory=PrecisionSpec)
    recompute: Pattern | None = None
    shared: tuple[str, ...] = ()  # entries of the data that have no rows
    held_out: CallValue | None = None  # data that must have the same entries

    @classmethod
    def of(cls, spec: Spec) -> RunAs:
        shared = spec.train.shared if spec.train is not None else ()
        return cls(spec.precision, spec.memory.recompute, shared, spec.validate.data if spec.validate is not None else None)

    @property
    def key(self) -> str:
        """The same text for the same thing; empty for the default."""
        return "" if self == AS_MADE else repr((self.precision, self.recompute and self.recompute.alternatives, self.shared, self.held_out))


AS_MADE = RunAs()
"""In the model's own formats, all activations kept."""


def applies(precision: PrecisionSpec, facts: ModelFacts) -> bool:
    """Whether anything is cast at all: a plan in fp32 of a model in fp32 or fp64 runs as torch runs it."""
    return precision != PrecisionSpec() or any(p.dtype in LOW for p in facts.parameters)


def input_format(precision: PrecisionSpec) -> str | None:
    """What floating inputs of layers are cast to; None if they are left as they are."""
    return None if precision.params == "fp32" else FORMATS[precision.params]


def keeps_format(facts: ModelFacts, p: ParameterFacts) -> bool:
    """Whether a parameter stands beside floating statistics that the forward updates, in one module."""
    homes = {name.rpartition(".")[0] for name in (p.name, *p.aliases)}
    return any(b.name.rpartition(".")[0] in homes and b.dtype in _WIDE for b in facts.updated)


def compute_format(precision: PrecisionSpec, facts: ModelFacts, p: ParameterFacts) -> str:
    """The dtype in which layers use a parameter: `params` if that is narrower than its own."""
    target = input_format(precision)
    return p.dtype if target is None or p.dtype not in _WIDE or keeps_format(facts, p) else target


def sum_format(precision: PrecisionSpec, p: ParameterFacts) -> str:
    """The dtype in which gradients of a parameter are added up. `fp32` never narrows a gradient in fp64; what is not floating stays what it is."""
    if p.dtype not in _WIDE | LOW:
        return p.dtype
    if precision.reduce == "fp32":
        return "float64" if p.dtype == "float64" else "float32"
    return FORMATS[precision.reduce]


def output_format(precision: PrecisionSpec) -> str:
    """The dtype of what the model gives. `fp32` widens what is narrower and leaves fp64 alone, the others are cast to."""
    return FORMATS[precision.output]
