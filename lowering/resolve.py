"""From the syntax tree to the Spec: params and overrides put in place, every key evaluated and typed, defaults filled, origins kept."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from attrs import frozen

from pdsl.grammar import syntax
from pdsl.grammar.diagnostics import Diagnostic, DiagnosticSink, Label, Severity
from pdsl.grammar.source import Span
from pdsl.lowering.blocks import KeyInfo, Kind
from pdsl.lowering.coerce import FACTORY, coerce
from pdsl.lowering.evaluate import Evaluator, suggest
from pdsl.lowering.keys import KeyReader
from pdsl.lowering.leaves import Leaf, Leaves, Setting, collect, override, parse_setting
from pdsl.lowering.names import Binding, Loader, Scope, build_scope
from pdsl.lowering.shard_rules import RuleReader
from pdsl.lowering.spec import (
    REST,
    AxisSpec,
    CallValue,
    CheckpointSpec,
    ClusterSpec,
    FaultBudgetSpec,
    FreezeSpec,
    MemorySpec,
    MeshSpec,
    ModelSpec,
    Origin,
    OriginKind,
    PipelineSpec,
    PrecisionSpec,
    Rest,
    SizeRange,
    Spec,
    TrainSpec,
    ValidateSpec,
    Value,
)
from pdsl.lowering.values import UNKNOWN, Evaluated, Unknown, ValueProblem, compare, describe, show

if TYPE_CHECKING:
    from pdsl.lowering.schedule_rows import RowsFile

__all__ = ["Resolution", "resolve", "resolve_file"]

_LINKS = ("intra", "inter")


@frozen(eq=False)
class Resolution:
    """What a file says. Blocks in which something was reported are left out of `spec` and named in `broken`, so that rules can pass over what
    depends on them. `unused` are names that nothing asked for; `places` tells where the file writes a dotted path or a block.
    """

    spec: Spec
    broken: frozenset[str]
    unused: tuple[Binding, ...]
    places: dict[str, Span]


def resolve(
    file: syntax.File, *, overrides: Sequence[str] = (), profile: str | None = None, loader: Loader | None = None, sink: DiagnosticSink
) -> Spec | None:
    """The Spec of a file, or None if the sink then holds an error.

    `overrides` are the texts given to `--set`, in order; they beat the profile, which beats the file. `loader` gives the texts of imported
    files by path (relative paths are joined to the folder of the importing file). Never raises on any tree.
    """
    found = resolve_file(file, overrides=overrides, profile=profile, loader=loader, sink=sink)
    return None if any(d.severity is Severity.ERROR for d in sink.diagnostics) else found.spec


def resolve_file(
    file: syntax.File, *, overrides: Sequence[str] = (), profile: str | None = None, loader: Loader | None = None, sink: DiagnosticSink
) -> Resolution:
    """As `resolve`, but gives what could be resolved in any case."""
    return _Resolver(file, build_scope(file, loader, sink), collect(file, sink), sink, loader).run(overrides, profile)


class _Resolver:
    """One run over one file."""

    def __init__(self, file: syntax.File, scope: Scope, leaves: Leaves, sink: DiagnosticSink, loader: Loader | None) -> None:
        self.file, self.scope, self.leaves, self.sink, self.loader = file, scope, leaves, sink, loader
        self.evaluator = Evaluator(sink, self._leaf_value, lenient=file.damaged)
        self.reader = KeyReader(leaves, scope, self.evaluator, sink, broken=leaves.broken)

    def run(self, overrides: Sequence[str], profile: str | None) -> Resolution:
        override(self.leaves, self.scope, self._profile(profile), self.sink)
        given = (overrides,) if isinstance(overrides, str) else overrides  # one setting, not its letters
        settings = [parse_setting(text, self.sink) for text in given]
        override(self.leaves, self.scope, [s for s in settings if s is not None], self.sink)
        for name, binding in self.scope.bindings.items():  # in the order of the text, so that long chains of names do not nest
            self._settle(name, binding)
        spec = self._spec()
        for item in self.file.items:
            if isinstance(item, syntax.Assert):
                self._assert(item)
        unused = () if self.file.damaged else self.scope.unused()
        return Resolution(spec, frozenset(self.reader.broken), unused, self._places())

    # --- before the values ------------------------------------------------------------------------------------------------------------------

    def _profile(self, wanted: str | None) -> list[Setting]:
        profiles: dict[str, syntax.Profile] = {}
        for item in self.file.items:
            if not isinstance(item, syntax.Profile):
                continue
            first = profiles.setdefault(item.name.text, item)
            if first is not item:
                labels = (Label(first.name.span, "first"),)
                self.sink.add(
                    Diagnostic("PDL107", f"profile {item.name.text} is written twice", item.name.span, caption="second", labels=labels)
                )
        if wanted is None:
            return []
        if wanted not in profiles and self.file.damaged:
            return []
        if wanted not in profiles:
            help_ = suggest(wanted, tuple(profiles)) if profiles else ("this file has no profile",)
            self.sink.add(Diagnostic("PDL101", f"unknown profile {wanted}", help=help_))
            return []
        chosen: dict[str, Setting] = {}
        for one in profiles[wanted].overrides:
            origin = Origin(OriginKind.PROFILE, one.value.span, wanted)
            setting = Setting(tuple(n.text for n in one.path.names), one.value, origin, one.path.span)
            first_span = chosen[setting.path].span if setting.path in chosen else None
            if first_span is not None:
                labels = (Label(first_span, "first"),)
                self.sink.add(Diagnostic("PDL107", f"{setting.path} is written twice", setting.span, caption="second", labels=labels))
                continue
            chosen[setting.path] = setting
        return list(chosen.values())

    # --- blocks -----------------------------------------------------------------------------------------------------------------------------

    def _spec(self) -> Spec:
        mesh, model, train = self._mesh(), self._model(), self._train()
        axes = tuple(p.removeprefix("mesh.") for p in self.leaves.leaves if p.startswith("mesh."))
        mesh_block = self.leaves.blocks.get("mesh")
        open_ = mesh_block.damaged if mesh_block is not None else self.file.damaged or "mesh" in self.leaves.broken
        rules = RuleReader(self.scope, self.evaluator, self.sink, None if open_ else axes)
        shard = rules.rules(self.leaves.blocks["shard"]) if "shard" in self.leaves.blocks else ()
        self._no_label("shard")
        if rules.broken:
            self.reader.broken.add("shard")
        pipeline = self._pipeline(rules)
        cluster, precision, memory = (self._plain(name) for name in ("cluster", "precision", "memory"))
        budget, freeze, checkpoint = (self._plain(name) for name in ("fault_budget", "freeze", "checkpoint"))
        validate = self._plain("validate")
        name = self.file.source.name
        return Spec(
            name=posixpath.basename(name).removesuffix(".pdsl") or name,
            mesh=mesh,
            cluster=ClusterSpec(**cluster) if cluster is not None else ClusterSpec(),
            model=model,
            shard=shard,
            pipeline=pipeline,
            precision=PrecisionSpec(**precision) if precision is not None else PrecisionSpec(),
            memory=MemorySpec(**memory) if memory is not None else MemorySpec(),
            fault_budget=FaultBudgetSpec(**budget) if budget is not None else None,
            freeze=FreezeSpec(**freeze) if freeze is not None else None,
            checkpoint=CheckpointSpec(**checkpoint) if checkpoint is not None else None,
            train=train,
            validate=ValidateSpec(**validate) if validate is not None else None,
            directory=posixpath.dirname(name) or ".",
            origins=tuple(self.reader.origins.items()),
        )

    def _plain(self, name: str) -> dict[str, Any] | None:
        self._no_label(name)
        return self.reader.block(name)

    def _no_label(self, name: str) -> None:
        block = self.leaves.blocks.get(name)
        if block is not None and block.labels:
            self._report("PDL102", f"{name} takes no label", block.labels[0].span)

    def _train(self) -> TrainSpec | None:
        read = self._plain("train")
        if read is None:
            return None
        clip = read["clip"]
        read["clip"] = None if clip is None else Fraction(clip)
        return TrainSpec(**read)

    def _mesh(self) -> MeshSpec:
        self._no_label("mesh")
        block = self.leaves.blocks.get("mesh")
        if block is None:
            return MeshSpec()
        tags = {s.name.text: s.tags for s in reversed(block.statements) if isinstance(s, syntax.Axis)}
        axes = []
        for leaf in [leaf for path, leaf in self.leaves.leaves.items() if path.startswith("mesh.")]:
            name = leaf.path.removeprefix("mesh.")
            size, link = self._size(leaf), self._link(tags.get(name, ()))
            if isinstance(size, Unknown):
                self.reader.broken.add("mesh")
                continue
            axes.append(AxisSpec(name, size, link, leaf.origin.span or leaf.place))
        return MeshSpec(tuple(axes), block.keyword.span)

    def _size(self, leaf: Leaf) -> int | Rest | SizeRange | Unknown:
        self._no_arguments(leaf)
        self.reader.origins[leaf.path] = self.reader.origin(leaf)
        value: Evaluated = self.evaluator.evaluate(leaf.expression, self.scope, ("rest",))
        key = KeyInfo(leaf.path, Kind.INT, "", minimum=1)
        if value == "rest":
            self.reader.values[leaf.path] = UNKNOWN
            return REST
        if isinstance(value, SizeRange) and value.low >= 1:
            self.reader.values[leaf.path] = UNKNOWN
            return value
        size = coerce(value.low if isinstance(value, SizeRange) else value, key, leaf.path, leaf.expression.span, self.sink)
        self.reader.values[leaf.path] = size
        return size if isinstance(size, int) else UNKNOWN

    def _no_arguments(self, leaf: Leaf) -> None:
        for name, _, _, span in leaf.arguments:
            self._report("PDL104", f"there is no {leaf.path}.{name} to override", span)

    def _link(self, tags: tuple[syntax.Name, ...]) -> str | None:
        for tag in tags:
            if tag.text not in _LINKS:
                self._report("PDL101", f"unknown link {tag.text}", tag.span, *suggest(tag.text, _LINKS))
        if len(tags) > 1:
            self._report("PDL107", "an axis runs over one link", tags[1].span)
        return tags[0].text if tags else None

    def _model(self) -> ModelSpec | None:
        block = self.leaves.blocks.get("model")
        if block is None:
            return None
        label = block.labels[0] if len(block.labels) == 1 else None
        if block.damaged:
            self.reader.broken.add("model")
        elif not isinstance(label, syntax.String):
            self._report("PDL102", 'model takes the name of its factory: model "package.module:factory" { ... }', block.keyword.span)
            self.reader.broken.add("model")
        elif not FACTORY.fullmatch(label.text):
            self._report("PDL102", f'"{label.text}" names no factory', label.span, 'the form is "package.module:factory"')
            self.reader.broken.add("model")
        arguments: list[tuple[str, Value]] = []
        for leaf in [leaf for path, leaf in self.leaves.leaves.items() if path.startswith("model.")]:
            name = leaf.path.removeprefix("model.")
            self._no_arguments(leaf)
            self.reader.origins[leaf.path] = self.reader.origin(leaf)
            value = coerce(
                self.evaluator.evaluate(leaf.expression, self.scope),
                KeyInfo(name, Kind.VALUE, ""),
                leaf.path,
                leaf.expression.span,
                self.sink,
            )
            self.reader.values[leaf.path] = value
            if isinstance(value, Unknown):
                self.reader.broken.add("model")
            else:
                arguments.append((name, value))
        if "model" in self.reader.broken or not isinstance(label, syntax.String):
            return None
        return ModelSpec(label.text, tuple(arguments), label.span)

    def _pipeline(self, rules: RuleReader) -> PipelineSpec | None:
        block = self.leaves.blocks.get("pipeline")
        if block is None:
            return None
        axis = self._pipeline_axis(block, rules)
        known = len(rules.broken)
        stages = rules.stages(block)
        if len(rules.broken) > known:
            self.reader.broken.add("pipeline")
        self._stages_key(stages != ())
        read = self.reader.block("pipeline")
        if read is None or axis is None or "pipeline" in self.reader.broken:
            self.reader.broken.add("pipeline")
            return None
        schedule = read["schedule"]
        if not isinstance(schedule, CallValue):
            return None
        return PipelineSpec(axis.text, schedule, stages, block.keyword.span, axis.span, self._rows(schedule))

    def _rows(self, schedule: CallValue) -> RowsFile | None:
        """What the file of a schedule says; its path is relative to the folder of the spec."""
        if schedule.name != "rows" or not schedule.positional or not isinstance(schedule.positional[0], str):
            return None
        from pdsl.lowering.schedule_rows import read_rows  # only such a spec needs it

        path = schedule.positional[0]
        at = posixpath.normpath(posixpath.join(posixpath.dirname(self.file.source.name), path))
        return read_rows(self.loader(at) if self.loader is not None else None, path)

    def _pipeline_axis(self, block: syntax.Block, rules: RuleReader) -> syntax.Name | None:
        match block.labels:
            case (syntax.Name(text="over"), syntax.Name() as axis):
                if rules.axes is None or axis.text in rules.axes:
                    return axis
                self._report("PDL101", f"the mesh has no axis {axis.text}", axis.span, *suggest(axis.text, rules.axes))
            case _ if not block.damaged:
                self._report("PDL102", "pipeline names its axis: pipeline over AXIS { ... }", block.keyword.span)
        return None

    def _stages_key(self, items: bool) -> None:
        leaf = self.leaves.leaves.pop("pipeline.stages", None)
        if leaf is None:
            self.reader.origins["pipeline.stages"] = Origin(OriginKind.FILE if items else OriginKind.DEFAULT)
            return
        self.reader.origins["pipeline.stages"] = leaf.origin
        value = self.evaluator.evaluate(leaf.expression, self.scope, ("balanced",))
        if isinstance(value, Unknown):
            self.reader.broken.add("pipeline")
        elif value != "balanced":
            message = f"pipeline.stages takes balanced, {show(value)} is {describe(value)}"
            self._report("PDL102", message, leaf.expression.span, 'stages are listed as items: stage first { "embed", "layers[0..4]" }')
            self.reader.broken.add("pipeline")
        elif items:
            self._report("PDL107", "stages are written twice: as balanced and as stage items", leaf.place, "delete one of the two")
            self.reader.broken.add("pipeline")

    # --- after the values -------------------------------------------------------------------------------------------------------------------

    def _settle(self, name: str, binding: Binding) -> None:
        """Evaluate a name that nothing asked for, so that what is wrong in it is told. A call is no value of its own: a key reads it."""
        if isinstance(binding, syntax.Let) and isinstance(binding.value, syntax.Call):
            return
        if isinstance(binding, syntax.Import) or name in self.scope.values:
            return
        used = name in self.scope.used
        self.evaluator.name(binding.name, self.scope)
        if not used:
            self.scope.used.discard(name)

    def _leaf_value(self, path: str) -> Evaluated | None:
        return self.reader.values.get(path)

    def _assert(self, item: syntax.Assert) -> None:
        condition = item.condition
        message = item.message.text if item.message is not None else "assertion does not hold"
        if not isinstance(condition, syntax.Comparison):
            value = self.evaluator.evaluate(condition, self.scope)
            if value is False:
                self._report("PDL190", message, condition.span)
            elif not isinstance(value, bool | Unknown):
                self._report("PDL102", f"assert takes a comparison, {show(value)} is {describe(value)}", condition.span)
            return
        left, right = self.evaluator.evaluate(condition.left, self.scope), self.evaluator.evaluate(condition.right, self.scope)
        try:
            holds = compare(condition.operator, left, right)
        except ValueProblem as problem:
            self._report("PDL102", str(problem), condition.span)
            return
        if holds is False:
            numbers = f"{show(left)} {condition.operator} {show(right)}"
            self.sink.add(Diagnostic("PDL190", message, condition.span, caption=f"{numbers} does not hold"))

    def _places(self) -> dict[str, Span]:
        places = {leaf.path: leaf.place for leaf in self.leaves.leaves.values()}
        return places | {name: block.keyword.span for name, block in self.leaves.blocks.items()}

    def _report(self, code: str, message: str, span: Span, *help_: str) -> None:
        self.sink.add(Diagnostic(code, message, span, help=help_))
