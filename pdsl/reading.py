"""From a text to all that is known of it: parsed, resolved, its model read, its rules checked.

The model is read at the end and only if asked for: it runs code of the user. What is wrong with it, or with the data from which the example batch
comes, is a finding like any other.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from pdsl.grammar.diagnostics import Diagnostic, has_errors
from pdsl.grammar.errors import ModelError, PlanError, SpecError
from pdsl.grammar.source import Source
from pdsl.lowering.check import CheckResult, check
from pdsl.lowering.mesh import SHARD, TENSOR, Mesh, axis_uses, build_mesh, declared_world
from pdsl.lowering.precision import RunAs
from pdsl.lowering.rules import run_rules
from pdsl.lowering.rules.base import Context
from pdsl.lowering.spec import Spec

if TYPE_CHECKING:
    from pdsl.lowering.facts import ModelFacts

__all__ = ["check_rules", "check_tensor", "examine", "example_batch", "load_text", "read_facts", "read_model", "read_tensor_facts"]


def examine(
    source: Source,
    *,
    world: int | None = None,
    overrides: Sequence[str] = (),
    profile: str | None = None,
    model: bool = True,
    on_mesh: bool = True,
) -> CheckResult:
    """Everything that is wrong with a text, and what it says if nothing is. `model` reads the model and its data; without `on_mesh` nothing is
    said about the sizes of axes. Never raises on any text.
    """
    data: list[Diagnostic] = []

    def facts(spec: Spec) -> ModelFacts:
        return read_facts(spec, data)

    found = check(
        source,
        world=world,
        overrides=overrides,
        profile=profile,
        facts=facts if model else None,
        loader=load_text,
        on_mesh=on_mesh,
        on_tensor=read_tensor_facts if model else None,
    )
    if not data:
        return found
    everything = tuple(sorted((*found.diagnostics, *data), key=lambda d: d.sort_key))
    return evolve(found, spec=None, diagnostics=everything)


def read_tensor_facts(spec: Spec, facts: ModelFacts, mesh: Mesh, model: Any = None, batch: Any = None) -> ModelFacts:
    """The facts, with what a tensor rank would do under the layouts of a spec; `model` and `batch` as in `read_model`. Raises ModelError."""
    if mesh.tensor_size == 1 or (batch is None and spec.train is None):
        return facts
    from pdsl.lowering.tensor_reading import with_tensor_facts

    return with_tensor_facts(
        spec,
        facts,
        mesh,
        batch=lambda: _rows(spec, batch),
        model=(lambda: copy.deepcopy(model)) if _is_module(model) else model,
        cache=model is None and batch is None,
    )


def check_tensor(spec: Spec, facts: ModelFacts, mesh: Mesh) -> None:
    """Raises SpecError if the rules on what a tensor rank would do find an error."""
    findings, _ = run_rules(Context(spec, mesh, facts), on_tensor=True)
    if has_errors(findings):
        raise SpecError(tuple(sorted(findings, key=lambda d: d.sort_key)))


def check_rules(spec: Spec, facts: ModelFacts, world: int | None, pipelines: Sequence[tuple[int, int]] | None) -> Mesh:
    """The mesh of a spec that was loaded before, once the rules that need the model or the ranks hold too.

    With `pipelines` the replica and pipeline axes count as one, and rules about the mesh are left to the planner. Raises SpecError, or PlanError
    if the sizes of the mesh stay open.
    """
    if pipelines is not None:
        roles = {use.axis: use.role for use in reversed(axis_uses(spec))}
        inside = tuple(a for a in spec.mesh.axes if roles.get(a.name) in {SHARD, TENSOR})
        mesh = build_mesh(evolve(spec, mesh=evolve(spec.mesh, axes=inside)))
        findings, _ = run_rules(Context(spec, None, facts))
    else:
        from pdsl.lowering.budgets import memory_least

        mesh = build_mesh(spec, world, memory_least(spec, facts, world))
        findings, _ = run_rules(Context(spec, mesh, facts, world if world is not None else declared_world(spec)))
    if has_errors(findings):
        raise SpecError(tuple(sorted(findings, key=lambda d: d.sort_key)))
    if mesh is None:
        raise PlanError("the sizes of the mesh stay open: say the number of ranks")
    return mesh


def load_text(path: str) -> str | None:
    """The text of an imported file, or None if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None


# --- the model ------------------------------------------------------------------------------------------------------------------------------


def read_facts(spec: Spec, findings: list[Diagnostic]) -> ModelFacts:
    """The facts of the model of a spec: from the cache, else by building and running it without weights on the first rows of the data.

    Data that cannot be read is a finding (PDL802 at `train.data`); the model is then read without being run, so that its names are known at least.
    Raises ModelError if the model cannot be read.
    """
    from pdsl.lowering.depends import watching
    from pdsl.lowering.facts_cache import cached_facts, check_held_out, first_rows, store_facts

    model = spec.model
    assert model is not None
    data = spec.train.data if spec.train is not None else None
    run_as = RunAs.of(spec)
    found = cached_facts(model.factory, model.arguments, data=data, directory=spec.directory, run_as=run_as)
    if found is not None:
        return found
    batch, samples = None, None
    with watching() as watch:
        if data is not None:
            try:
                batch, samples = first_rows(data, run_as.shared, spec.directory)
            except ModelError as error:
                findings.append(Diagnostic("PDL802", f"the data cannot be read: {error}", spec.origin("train.data").span))
        if batch is not None and run_as.held_out is not None:
            try:
                check_held_out(batch, run_as.held_out, run_as.shared, spec.directory)
            except ModelError as error:
                findings.append(Diagnostic("PDL806", str(error), spec.origin("validate.data").span))
        facts = evolve(_probe(spec, batch), samples=samples, entries=tuple(batch or ()))
    if not findings:
        store_facts(facts, model.factory, model.arguments, data=data, directory=spec.directory, read=watch.stamps(), run_as=run_as)
    return facts


def read_model(spec: Spec, model: Any = None, batch: Any = None) -> ModelFacts:
    """The facts of the model of a spec, or of `model` in its place: a module, which is copied, or a callable that takes the arguments of the spec.

    Raises ModelError.
    """
    from pdsl.lowering.factory import plain_arguments
    from pdsl.lowering.facts_cache import read_facts as cached_or_read
    from pdsl.lowering.probe import probe

    data = spec.train.data if spec.train is not None else None
    if model is None and batch is None:
        if spec.model is None:
            raise ModelError("the spec names no model: give one to compile")
        return cached_or_read(spec.model.factory, spec.model.arguments, data=data, directory=spec.directory, run_as=RunAs.of(spec))
    batch = _rows(spec, batch)
    arguments = plain_arguments(spec.model.arguments) if spec.model is not None else {}
    if model is None:
        assert spec.model is not None
        return probe(spec.model.factory, arguments, batch=batch, directory=spec.directory, run_as=RunAs.of(spec))
    if not callable(model):
        raise ModelError(f"model is a {type(model).__name__}: expected a module, or a function that makes one")
    if not _is_module(model):
        return probe(model, arguments, batch=batch, directory=spec.directory, run_as=RunAs.of(spec))

    def duplicate() -> Any:
        return copy.deepcopy(model)

    found = probe(duplicate, {}, batch=batch, directory=spec.directory, run_as=RunAs.of(spec))
    return evolve(found, factory=f"{type(model).__module__}:{type(model).__qualname__}")


def _is_module(model: Any) -> bool:
    """Whether this is a module, and neither a class nor a function that makes one."""
    return not isinstance(model, type) and hasattr(model, "named_parameters")


def _probe(spec: Spec, batch: Any) -> ModelFacts:
    from pdsl.lowering.factory import plain_arguments
    from pdsl.lowering.probe import probe

    assert spec.model is not None
    return probe(spec.model.factory, plain_arguments(spec.model.arguments), batch=batch, directory=spec.directory, run_as=RunAs.of(spec))


def _rows(spec: Spec, batch: Any) -> Any:
    """The batch that is given, with its shared entries marked, or else the first rows of the data; None if there are none."""
    if batch is None:
        return example_batch(spec) if spec.train is not None else None
    if spec.train is None or not spec.train.shared or not isinstance(batch, dict):
        return batch
    from pdsl.lowering.probe_rows import marked

    return marked(batch, spec.train.shared)


def example_batch(spec: Spec) -> Any:
    """The first rows of the data of a spec as a batch. Raises ModelError if the data set cannot be made or gives no dicts of tensors."""
    from pdsl.lowering.facts_cache import first_rows

    assert spec.train is not None
    return first_rows(spec.train.data, spec.train.shared, spec.directory)[0]
