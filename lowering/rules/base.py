"""What a rule is, and what it may look at."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen

from pdsl.grammar.diagnostics import Diagnostic, Fix, Label, Severity
from pdsl.grammar.source import Span
from pdsl.lowering.mesh import Mesh
from pdsl.lowering.names import Binding
from pdsl.lowering.schedules import SCHEDULES, SEARCHED
from pdsl.lowering.spec import AxisSpec, Origin, OriginKind, ShardRule, Spec

if TYPE_CHECKING:
    from pdsl.lowering.facts import ModelFacts, ParameterFacts

__all__ = ["STYLED_MODULES", "TENSOR_STYLES", "Context", "Rule", "listed", "plural", "quoted"]

TENSOR_STYLES = ("colwise", "rowwise")
STYLED_MODULES = ("Linear", "Embedding")
"""Classes of modules that a tensor style can split."""


@frozen(slots=False, eq=False)
class Context:
    """What rules look at. `world` is the number of ranks if anybody said it; `mesh` is None if sizes do not fit or stay open; `facts` is
    None where the model was not read. `broken` names the blocks in which something was reported already; `unused` are names without use;
    `places` tells where the file writes a dotted path or a block.
    """

    spec: Spec
    mesh: Mesh | None = None
    facts: ModelFacts | None = None
    world: int | None = None
    broken: frozenset[str] = frozenset()
    unused: tuple[Binding, ...] = ()
    places: dict[str, Span] = field(factory=dict)

    @cached_property
    def origins(self) -> dict[str, Origin]:
        return dict(self.spec.origins)

    def origin(self, path: str) -> Origin:
        return self.origins.get(path) or Origin(OriginKind.DEFAULT)

    def place(self, *paths: str) -> Span | None:
        """Where the first of the dotted paths that has a place is written; for an overridden value, what it replaced."""
        return next((s for path in paths if (s := self.origin(path).span or self.places.get(path)) is not None), None)

    def by(self, path: str) -> str:
        """Who overrode a value, in brackets with a leading space; empty if the file alone decides."""
        origin = self.origin(path)
        if origin.kind is OriginKind.SET:
            return f" (--set {origin.detail})"
        if origin.kind is OriginKind.PROFILE:
            return f" (profile {origin.detail})"
        return f" ({origin.detail})" if origin.detail else ""

    def label(self, path: str, text: str) -> tuple[Label, ...]:
        """A label at the place of a value, with who overrode it; none if it has no place."""
        place = self.place(path)
        return (Label(place, text + self.by(path)),) if place is not None else ()

    def axis(self, name: str) -> AxisSpec | None:
        return self.spec.mesh.axis(name)

    def size(self, axes: Iterable[str]) -> int:
        """The product of the sizes of axes; 1 for those that are not in the mesh."""
        return math.prod(a.size for name in axes if self.mesh is not None and (a := self.mesh.axis(name)) is not None)

    # --- the pipeline -----------------------------------------------------------------------------------------------------------------------

    @cached_property
    def positions(self) -> int:
        """Positions of one pipeline; 1 without a mesh."""
        return self.mesh.positions if self.mesh is not None else 1

    @cached_property
    def stages(self) -> int | None:
        """Stages of one pipeline, at least those if they are searched for; None if the rows of the schedule cannot be read."""
        pipeline = self.spec.pipeline
        if pipeline is None:
            return 1
        if pipeline.schedule.name in SEARCHED:
            return max(self.positions, len(pipeline.stages))
        if pipeline.rows is not None:
            return pipeline.rows.schedule.stages if pipeline.rows.schedule is not None else None
        family = SCHEDULES.get(pipeline.schedule.name)
        return self.positions * family.per_position(pipeline.virtual) if family is not None else None

    @cached_property
    def microbatches(self) -> int:
        """Microbatches of one pipeline in a step, over all its rounds."""
        pipeline, train = self.spec.pipeline, self.spec.train
        return (pipeline.microbatches if pipeline is not None else 1) * (train.accumulate if train is not None else 1)

    @cached_property
    def halves(self) -> str:
        """The schedule as it is called if it runs backwards in halves: a name, or the path of a file with such rows. Empty if it does not."""
        pipeline = self.spec.pipeline
        if pipeline is None:
            return ""
        if pipeline.rows is not None:
            return pipeline.rows.path if pipeline.rows.split else ""
        family = SCHEDULES.get(pipeline.schedule.name)
        return family.name if family is not None and family.split else ""

    # --- parameters and rules ---------------------------------------------------------------------------------------------------------------

    @cached_property
    def matches(self) -> tuple[tuple[ParameterFacts, ...], ...]:
        """For each shard rule the parameters that its patterns match, whether or not an earlier rule took them."""
        parameters = self.facts.parameters if self.facts is not None else ()
        return tuple(tuple(p for p in parameters if rule.matches(p.name)) for rule in self.spec.shard)

    @cached_property
    def decided(self) -> dict[str, int]:
        """Parameter name -> index of the rule that decides its layout; parameters that no rule matches are absent."""
        found: dict[str, int] = {}
        for index, parameters in enumerate(self.matches):
            for p in parameters:
                found.setdefault(p.name, index)
        return found

    def taken(self, index: int) -> tuple[ParameterFacts, ...]:
        """The parameters whose layout a rule decides."""
        return tuple(p for p in self.matches[index] if self.decided[p.name] == index)

    def sharded(self, rule: ShardRule) -> tuple[str, ...]:
        """The axes of `fsdp(...)` in a rule."""
        return tuple(a for t in rule.terms if getattr(t, "name", "") == "fsdp" for a in getattr(t, "axes", ()))

    def is_sharded(self, parameter: str) -> bool:
        """Whether the rule that decides a parameter's layout has `fsdp(...)`."""
        index = self.decided.get(parameter)
        return index is not None and bool(self.sharded(self.spec.shard[index]))


class Rule:
    """One rule. The docstring has the headings that `explain` prints. `needs` are blocks that must be sound, `needs_facts`, `needs_mesh` and
    `needs_tensor` (what a tensor rank would do) say what must be known; where something is missing the rule is passed over.
    """

    code: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity] = Severity.ERROR
    needs: ClassVar[frozenset[str]] = frozenset()
    needs_facts: ClassVar[bool] = False
    needs_mesh: ClassVar[bool] = False
    needs_tensor: ClassVar[bool] = False

    def check(self, context: Context) -> Iterable[Diagnostic]:
        """The findings. Rules whose findings come from the parser or the resolver find nothing here."""
        return ()

    def applies(self, context: Context) -> bool:
        """Whether all that the rule needs is known and sound."""
        unknown = (self.needs_facts and context.facts is None) or (self.needs_mesh and context.mesh is None)
        unknown = unknown or (self.needs_tensor and (context.facts is None or context.facts.tensor is None))
        return not unknown and not self.needs & context.broken

    def report(
        self,
        message: str,
        span: Span | None,
        caption: str = "",
        *,
        labels: tuple[Label, ...] = (),
        help: tuple[str, ...] = (),  # noqa: A002
        notes: tuple[str, ...] = (),
        fix: Fix | None = None,
        severity: Severity | None = None,
    ) -> Diagnostic:
        """A finding of this rule. Labels at the place of the span itself are dropped."""
        others = tuple(label for label in labels if label.span != span)
        return Diagnostic(self.code, message, span, severity or self.severity, caption, others, help, notes, fix)


def plural(count: int, word: str) -> str:
    """`1 stage`, `2 stages`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def listed(items: Iterable[object], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    words = [str(i) for i in items]
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else "".join(words)


def quoted(names: Iterable[str], most: int = 4) -> str:
    """Names in quotes; after `most` only their number."""
    words = list(names)
    shown = ", ".join(f'"{n}"' for n in words[:most])
    return shown if len(words) <= most else f"{shown} and {len(words) - most} more"
