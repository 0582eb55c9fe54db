"""From a text to everything that is wrong with it: parse, resolve, rules. All errors in one run, none caused by another; torch is never imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from attrs import evolve, frozen

from pdsl.grammar import syntax
from pdsl.grammar.diagnostics import Diagnostic, DiagnosticSink, has_errors
from pdsl.grammar.errors import ModelError
from pdsl.grammar.parser import parse
from pdsl.grammar.source import Source
from pdsl.lowering.mesh import Mesh, build_mesh, declared_world
from pdsl.lowering.names import Loader
from pdsl.lowering.resolve import Resolution, resolve_file
from pdsl.lowering.rules import RULES, run_rules
from pdsl.lowering.rules.base import Context
from pdsl.lowering.spec import Spec
from pdsl.lowering.suppress import suppress

__all__ = ["CheckResult", "Facts", "OnTensor", "check", "check_resolved"]

if TYPE_CHECKING:
    from pdsl.lowering.facts import ModelFacts  # a check without model starts without it

Facts: TypeAlias = "ModelFacts | Callable[[Spec], ModelFacts] | None"
"""The facts of the model, how to get them (may raise ModelError), or None to do without."""

OnTensor: TypeAlias = "Callable[[Spec, ModelFacts, Mesh], ModelFacts] | None"
"""How to find out what a tensor rank would do, as more facts (may raise ModelError), or None to do without."""


@frozen(eq=False)
class CheckResult:
    """`spec` is None if there is an error. `mesh` is None if sizes do not fit or stay open, `facts` if the model was not read."""

    spec: Spec | None
    mesh: Mesh | None
    facts: ModelFacts | None
    diagnostics: tuple[Diagnostic, ...]

    @property
    def sound(self) -> bool:
        return not has_errors(self.diagnostics)


def check(
    source: Source,
    *,
    world: int | None = None,
    overrides: Sequence[str] = (),
    profile: str | None = None,
    facts: Facts = None,
    loader: Loader | None = None,
    on_mesh: bool = True,
    on_tensor: OnTensor = None,
) -> CheckResult:
    """Check a text.

    `world` is the number of ranks (by default what the cluster block declares), `overrides` are the texts of `--set`, `loader` gives the texts
    of imported files. Without `on_mesh` the rules that need the sizes of axes are left for later. `on_tensor` adds what a tensor rank would do. Never raises because of what the text says; findings are in the order of the text.
    """
    sink = DiagnosticSink()
    file = parse(source, sink)
    resolution = resolve_file(file, overrides=overrides, profile=profile, loader=loader, sink=sink)
    return check_resolved(file, resolution, sink, world=world, facts=facts, on_mesh=on_mesh, on_tensor=on_tensor)


def check_resolved(
    file: syntax.File,
    resolution: Resolution,
    sink: DiagnosticSink,
    *,
    world: int | None = None,
    facts: Facts = None,
    on_mesh: bool = True,
    on_tensor: OnTensor = None,
) -> CheckResult:
    """The rules on what a file says, added to the findings that the sink holds already."""
    spec = resolution.spec
    ranks = world if world is not None else None if "cluster" in resolution.broken else declared_world(spec)
    broken = set(resolution.broken)
    known = _facts(spec, resolution, facts, sink, broken)
    mesh = _mesh(spec, ranks, known) if on_mesh and "mesh" not in resolution.broken else None
    context = Context(spec, mesh, known, ranks if on_mesh else None, frozenset(broken), resolution.unused, resolution.places)
    found, skipped = run_rules(context)
    sink.extend(found)
    if on_tensor is not None and mesh is not None and known is not None and not has_errors(sink.diagnostics):
        known = _on_tensor(on_tensor, spec, known, mesh, resolution, sink)
        more, passed_over = run_rules(evolve(context, facts=known), on_tensor=True)
        sink.extend(more)
        skipped = (skipped - {r.code for r in RULES if r.needs_tensor}) | passed_over
    everything = suppress(sink.diagnostics, file.comments, skipped)
    diagnostics = tuple(sorted(everything, key=lambda d: d.sort_key))
    return CheckResult(None if has_errors(diagnostics) else spec, mesh, known, diagnostics)


def _on_tensor(
    read: Callable[[Spec, ModelFacts, Mesh], ModelFacts],
    spec: Spec,
    facts: ModelFacts,
    mesh: Mesh,
    resolution: Resolution,
    sink: DiagnosticSink,
) -> ModelFacts:
    """The facts with what a tensor rank would do."""
    try:
        return read(spec, facts, mesh)
    except ModelError as error:
        span = resolution.places.get("model") if spec.model is None or spec.model.span is None else spec.model.span
        sink.add(Diagnostic("PDL108", str(error), span))
        return facts


def _mesh(spec: Spec, ranks: int | None, facts: ModelFacts | None) -> Mesh | None:
    """The mesh; how long pipelines must be may depend on the memory that the model needs."""
    if facts is None or spec.cluster.memory is None:
        return build_mesh(spec, ranks)
    from pdsl.lowering.budgets import memory_least  # a check without model starts without it

    return build_mesh(spec, ranks, memory_least(spec, facts, ranks))


def _facts(spec: Spec, resolution: Resolution, facts: Facts, sink: DiagnosticSink, broken: set[str]) -> ModelFacts | None:
    if facts is None or spec.model is None or "model" in broken:
        return None
    if not callable(facts):
        return facts
    try:
        return facts(spec)
    except ModelError as error:
        sink.add(Diagnostic("PDL108", str(error), resolution.places.get("model") if spec.model.span is None else spec.model.span))
        broken.add("model")
        return None
