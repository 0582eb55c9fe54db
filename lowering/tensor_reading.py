"""Facts about the layouts over tensor axes: from the cache, else by running the tensor probe; see `tensor_probe` for what it finds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import evolve

from pdsl.grammar.cache import read_entry, write_entry
from pdsl.lowering.depends import still_so, watching
from pdsl.lowering.factory import plain_arguments
from pdsl.lowering.facts import ModelFacts
from pdsl.lowering.facts_cache import facts_key
from pdsl.lowering.layouts import parameter_layouts
from pdsl.lowering.mesh import TENSOR, Mesh
from pdsl.lowering.parts import role_axes
from pdsl.lowering.places import MeshAxis
from pdsl.lowering.plan import ParameterLayout
from pdsl.lowering.precision import RunAs
from pdsl.lowering.serial import dump, load
from pdsl.lowering.spec import Spec
from pdsl.lowering.styles import is_sequence
from pdsl.lowering.tensor_facts import TensorFacts

__all__ = ["with_tensor_facts"]

_READERS = (
    "probe_tensor.py",
    "probe_tensor_trace.py",
    "probe_tensor_flow.py",
    "tensor_facts.py",
    "probe_placed.py",
    "probe_saved.py",
    "probe_loss.py",
    "styles.py",
)  # as in `facts_cache`


def with_tensor_facts(
    spec: Spec, facts: ModelFacts, mesh: Mesh, *, batch: Callable[[], Any], model: Any = None, cache: bool = True
) -> ModelFacts:
    """The facts, with what the layouts of the spec over the tensor axes of a mesh do to the model; as they are where no layout uses one.

    `batch` gives an example batch, `model` is a function that makes the model in place of the factory of the spec; without `cache` what the spec says
    does not decide about them. Raises ModelError.
    """
    axes = role_axes(mesh.axes, TENSOR)
    layouts = parameter_layouts(facts, spec.shard, shard_size=mesh.shard_size, tensor_size=mesh.tensor_size, axes=mesh.axes)
    split = any(layout.splits or is_sequence(layout) for layout in layouts)
    if not axes or not split or not facts.inputs or facts.tensor is not None:
        return facts
    layouts = tuple(evolve(layout, line=0) for layout in layouts)
    key = _key(spec, layouts, axes) if cache else None
    found = _cached(key) if key is not None else None
    if found is None:
        from pdsl.lowering.probe_tensor import tensor_probe  # loads torch

        assert model is not None or spec.model is not None
        make, arguments = (
            (model, {}) if spec.model is None or model is not None else (spec.model.factory, plain_arguments(spec.model.arguments))
        )
        with watching() as watch:
            found = tensor_probe(
                make,
                arguments,
                batch=batch(),
                facts=facts,
                layouts=layouts,
                axes=axes,
                objective=_objective(spec),
                validates=spec.validate is not None,
                directory=spec.directory,
            )
        read = watch.stamps()
        if key is not None and read is not None:
            write_entry(_entry(key), key, f"{json.dumps(read)}\n{dump(found)}")
    return evolve(facts, tensor=found)


def _objective(spec: Spec) -> str:
    return spec.train.objective if spec.train is not None else "model"


def _key(spec: Spec, layouts: tuple[ParameterLayout, ...], axes: tuple[MeshAxis, ...]) -> str | None:
    assert spec.model is not None
    data, shared = (spec.train.data, spec.train.shared) if spec.train is not None else (None, ())
    as_read = RunAs(shared=shared)  # the probe runs the model in its own formats
    base = facts_key(spec.model.factory, spec.model.arguments, data=data, directory=spec.directory, run_as=as_read)
    if base is None:
        return None
    whole = hashlib.sha256(f"{base} {axes!r} {layouts!r} {_objective(spec)} {spec.validate is not None}".encode())
    for name in _READERS:
        whole.update(Path(__file__).with_name(name).read_bytes())
    return whole.hexdigest()


def _entry(key: str) -> str:
    return f"tensor-{key[:32]}.json"


def _cached(key: str) -> TensorFacts | None:
    files, _, body = (read_entry(_entry(key), key) or "").partition("\n")
    if not still_so(files):
        return None
    try:
        return load(body, TensorFacts)
    except ValueError:
        return None
