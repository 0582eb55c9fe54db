"""The rules of the `shard` block and the stages of the `pipeline` block, from syntax to Spec."""

from __future__ import annotations

from collections.abc import Collection

from attrs import field, frozen

from pdsl.grammar import syntax
from pdsl.grammar.diagnostics import Diagnostic, DiagnosticSink
from pdsl.grammar.source import Span
from pdsl.lowering.blocks import LAYOUTS
from pdsl.lowering.evaluate import Evaluator, suggest
from pdsl.lowering.names import Scope
from pdsl.lowering.spec import LayoutCall, LayoutSlots, LayoutTerm, ShardRule, StageSpec
from pdsl.lowering.text_patterns import pattern

__all__ = ["RuleReader"]


@frozen(eq=False)
class RuleReader:
    """Reads patterns and layouts. `axes` are the declared axes, for layouts; None if the mesh could
    not be read, so that any name may be one.
    """

    scope: Scope
    evaluator: Evaluator
    sink: DiagnosticSink
    axes: Collection[str] | None
    broken: list[Span] = field(factory=list)

    def rules(self, block: syntax.Block) -> tuple[ShardRule, ...]:
        """All sound rules of a shard block; places of the others land in `broken`."""
        found = (self._rule(s) for s in block.statements if isinstance(s, syntax.Rule))
        return tuple(rule for rule in found if rule is not None)

    def stages(self, block: syntax.Block) -> tuple[StageSpec, ...]:
        """All sound stages of a pipeline block; places of the others land in `broken`."""
        items = [s for s in block.statements if isinstance(s, syntax.StageItem)]
        found = []
        first: dict[str, Span] = {}
        for item in items:
            patterns = [pattern(m, self.evaluator, self.scope) for m in item.modules]
            if item.name.text in first:
                self._fail(
                    "PDL107",
                    f"stage {item.name.text} is written twice",
                    item.name.span,
                    "stages run in the order of the text; their names differ",
                )
            elif not patterns:
                self._fail("PDL102", f"stage {item.name.text} lists no module", item.span)
            elif None in patterns:
                self.broken.append(item.span)
            else:
                found.append(StageSpec(item.name.text, tuple(p for p in patterns if p is not None), item.span))
            first.setdefault(item.name.text, item.name.span)
        return tuple(found)

    def _rule(self, rule: syntax.Rule) -> ShardRule | None:
        patterns = [pattern(p, self.evaluator, self.scope) for p in rule.patterns]
        layout = rule.layout
        terms = (
            []
            if isinstance(layout, syntax.Missing)
            else [self._term(t) for t in (layout.terms if isinstance(layout, syntax.Sum) else (layout,))]
        )
        if None in patterns or None in terms or not terms:
            self.broken.append(rule.span)
            return None
        return ShardRule(tuple(p for p in patterns if p is not None), tuple(t for t in terms if t is not None), rule.span)

    def _term(self, node: syntax.Slots | syntax.Call | syntax.Missing) -> LayoutTerm | None:
        if isinstance(node, syntax.Missing):
            return None
        if isinstance(node, syntax.Slots):
            sound = [self._axis(axis) for slot in node.slots for axis in slot.axes]
            return LayoutSlots(tuple(tuple(a.text for a in slot.axes) for slot in node.slots), node.span) if all(sound) else None
        name = node.callee.text
        if name not in LAYOUTS:
            self._fail("PDL101", f"unknown layout {name}", node.callee.span, *suggest(name, LAYOUTS))
            return None
        axes: list[syntax.Name] = []
        for argument in node.arguments:
            value = argument.value
            if argument.name is not None or not isinstance(value, syntax.Path) or len(value.names) != 1:
                self._fail("PDL102", f"{name} takes names of axes, not {argument.span.text}", argument.span)
                return None
            axes.append(value.names[0])
        if name == "replicate" and axes:
            self._fail("PDL102", "replicate() takes no axis: a parameter is whole along every axis that its rule does not name", node.span)
            return None
        if name != "replicate" and not axes:
            self._fail("PDL102", f"{name}() needs an axis", node.span, f"{name}(AXIS), with AXIS one of {', '.join(self.axes or ())}")
            return None
        sound = [self._axis(a) for a in axes]
        if not all(sound):
            return None
        return LayoutCall(name, tuple(a.text for a in axes), node.span, tuple(a.span for a in axes))

    def _axis(self, name: syntax.Name) -> bool:
        if self.axes is None or name.text in self.axes:
            return True
        self.sink.add(Diagnostic("PDL101", f"the mesh has no axis {name.text}", name.span, help=suggest(name.text, self.axes)))
        return False

    def _fail(self, code: str, message: str, span: Span, *help_: str) -> None:
        self.sink.add(Diagnostic(code, message, span, help=help_))
        self.broken.append(span)
