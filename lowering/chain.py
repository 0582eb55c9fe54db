"""From what was seen of a model's forward pass to its chain of layers.

The pass is cut into *segments*: 0 lasts until the first block is called, k from the call of the k-th block until the next is called, the last
one from the return of the last block until the end. Two passes with different rows show what grows with the rows, and how.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, field, frozen

from pdsl.lowering.draws import Draw, assemble_draws, draw_warnings
from pdsl.lowering.facts import BoundaryTensor, BufferFacts, LayerFacts, LayerKind, ModelFacts, ParameterFacts

__all__ = ["Crossing", "Observation", "Segment", "Structure", "assemble", "assemble_unrun", "assemble_whole"]


@frozen
class Crossing:
    """A tensor seen at the begin of a segment that an earlier segment made; see `BoundaryTensor`."""

    leaf: int
    shape: tuple[int, ...]
    dtype: str
    differentiable: bool
    mutated: bool


@frozen
class Segment:
    """What was seen in one segment. `modules` are the outermost modules with parameters that were called, but not the block itself; `saved`
    are the bytes that autograd kept; `leak` names what the loss reads from earlier segments past `crossings`, empty if nothing. `again_flops` is what
    the backward computes again, `writes` whether the block writes into what it is given (see `LayerFacts`), `again` the bytes that the largest module of it takes then.
    """

    crossings: tuple[Crossing, ...] = ()
    modules: tuple[str, ...] = ()
    flops: int = 0
    saved: int = 0
    leak: str = ""
    writes: str = ""
    again_flops: int = 0
    again: int = 0


@frozen
class Observation:
    """One forward pass with `rows` samples. `order` names the blocks as they were called; there are len(order) + 2 segments. `used` gives for
    each parameter, by canonical name, the segments with an operation that reads it. `passthrough` is one flag for each block. `outside` are
    parameters that were read while no module that holds them ran, `updated` buffers that were written. `unrepeatable` says which modules that are to
    be computed again cannot be, and why. `output` is the shape of what the model returned, if it is one tensor and no loss.
    """

    rows: int
    order: tuple[str, ...]
    segments: tuple[Segment, ...]
    used: Mapping[str, frozenset[int]]
    passthrough: tuple[bool, ...]
    random: bool
    loss: bool
    outside: frozenset[str] = frozenset()
    updated: tuple[tuple[str, tuple[int, ...], str], ...] = ()  # (name, shape, dtype)
    draws: tuple[Draw, ...] = ()
    unrepeatable: tuple[str, ...] = ()
    output: tuple[int, ...] | None = None


@frozen
class Structure:
    """What is known of a model before it runs. `parameters` have no layers yet."""

    factory: str
    parameters: tuple[ParameterFacts, ...]
    buffers: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    sequential: bool = False
    statistics: tuple[str, ...] = ()
    shares: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    torch: str = field(default="", kw_only=True)


def assemble(structure: Structure, small: Observation, large: Observation) -> ModelFacts:
    """The facts of a model whose blocks were called one after the other, in the same order in both passes."""
    count = len(small.order)
    has_prologue = not structure.sequential and _stands_alone(small, 0)
    has_epilogue = not structure.sequential and _stands_alone(small, count + 1)
    shown = range(0 if has_prologue else 1, count + (2 if has_epilogue else 1))
    layer_of = {s: min(max(s, shown.start), shown.stop - 1) - shown.start for s in range(count + 2)}
    parameters, unused = _placed(structure.parameters, small, layer_of)
    layers = tuple(_layer(s, small, large, layer_of, parameters, first=s == shown.start) for s in shown)
    parameters = tuple(evolve(p, outside=_read_outside(p, layers, small)) for p in parameters)
    return _facts(structure, layers, parameters, (small, large), unused)


def assemble_whole(structure: Structure, small: Observation, large: Observation, reason: str) -> ModelFacts:
    """The facts of a model without a chain: one layer that holds everything, and a warning with the reason."""
    parameters = tuple(evolve(p, layers=(0,)) for p in structure.parameters)
    layer = LayerFacts(
        name="(model)",
        kind=LayerKind.BLOCK,
        modules=small.segments[0].modules,
        parameters=tuple(p.name for p in parameters),
        flops=_per_row(small.segments[0].flops, large.segments[0].flops, small.rows, large.rows),
        activation_bytes=_per_row(small.segments[0].saved, large.segments[0].saved, small.rows, large.rows),
        again_flops=_per_row(small.segments[0].again_flops, large.segments[0].again_flops, small.rows, large.rows),
        again_bytes=_per_row(small.segments[0].again, large.segments[0].again, small.rows, large.rows),
    )
    unused = tuple(p.name for p in structure.parameters if not small.used.get(p.name))
    parameters = tuple(evolve(p, outside=_read_outside(p, (layer,), small)) for p in parameters)
    facts = _facts(structure, (layer,), parameters, (small, large), unused)
    return evolve(facts, warnings=(f"no chain of blocks, so the model can be sharded but not cut into stages: {reason}", *facts.warnings))


def assemble_unrun(structure: Structure, blocks: tuple[str, ...], modules: tuple[str, ...]) -> ModelFacts:
    """Facts from the structure alone: `blocks` in the order of registration, and all outermost other `modules` with parameters, in order too.

    What is registered before the first block counts as prologue, what comes later as epilogue. Nothing is known of boundaries and costs.
    """
    reason = "the model was not run: what its layers compute and what crosses between them is not known"
    if not blocks:
        whole = LayerFacts("(model)", LayerKind.BLOCK, modules, tuple(p.name for p in structure.parameters), 0, 0)
        placed = tuple(evolve(p, layers=(0,)) for p in structure.parameters)
        return ModelFacts(
            structure.factory, (whole,), placed, structure.buffers, warnings=(reason, *structure.warnings), torch=structure.torch
        )
    names = [p.name for p in structure.parameters]
    inside = {n: i for i, block in enumerate(blocks) for p in structure.parameters for n in (p.name, *p.aliases) if _under(n, block)}
    begin = next((k for k, n in enumerate(names) if n in inside), len(names))
    before = {n for k, n in enumerate(names) if k < begin and n not in inside}
    heads = [m for m in modules if not any(_under(m, b) or m == b for b in blocks)]
    first = [m for m in heads if any(_under(n, m) for n in before)]
    last = [m for m in heads if m not in first]
    groups = [("prologue", first)] if before else []
    groups += [("block", [b]) for b in blocks]
    groups += [("epilogue", last)] if any(n not in inside and n not in before for n in names) else []
    offset = 1 if before else 0

    def places(p: ParameterFacts) -> tuple[int, ...]:
        at = {inside[n] + offset for n in (p.name, *p.aliases) if n in inside}
        outside = [n for n in (p.name, *p.aliases) if n not in inside]
        at |= {0 if n in before else len(groups) - 1 for n in outside}
        return tuple(sorted(at))

    placed = tuple(evolve(p, layers=places(p)) for p in structure.parameters)
    layers = tuple(
        LayerFacts(mods[0] if mods else f"({kind})", LayerKind(kind), tuple(mods), tuple(p.name for p in placed if i in p.layers), 0, 0)
        for i, (kind, mods) in enumerate(groups)
    )
    return ModelFacts(
        structure.factory,
        layers,
        placed,
        structure.buffers,
        structure.inputs,
        structure.sequential,
        warnings=(reason, *structure.warnings),
        torch=structure.torch,
    )


# --- parts ------------------------------------------------------------------------------------------------------------------------------


def _read_outside(p: ParameterFacts, layers: tuple[LayerFacts, ...], seen: Observation) -> bool:
    """Whether a parameter of one layer lies in the module of a layer and is read outside of it. What lies in none, or belongs to several layers, is
    gathered with the whole stage.
    """
    modules = [m for layer in layers for m in layer.modules]
    return len(p.layers) == 1 and p.name in seen.outside and any(_under(name, m) for name in (p.name, *p.aliases) for m in modules)


def _under(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def _stands_alone(seen: Observation, segment: int) -> bool:
    """Whether a prologue or epilogue has parameters or matrix products."""
    part = seen.segments[segment]
    return bool(part.modules or part.flops) or any(segment in at for at in seen.used.values())


def _placed(
    parameters: tuple[ParameterFacts, ...], seen: Observation, layer_of: Mapping[int, int]
) -> tuple[tuple[ParameterFacts, ...], tuple[str, ...]]:
    """The parameters with their layers, and the names of those that nothing reads: they go where their block, or else their predecessor, is."""
    placed: list[ParameterFacts] = []
    unused: list[str] = []
    for p in parameters:
        at = tuple(sorted({layer_of[s] for s in seen.used.get(p.name, ())}))
        if not at:
            unused.append(p.name)
            block = next((k for k, name in enumerate(seen.order) if _under(p.name, name)), None)
            fallback = placed[-1].layers[-1] if placed else 0
            at = (layer_of[block + 1] if block is not None else fallback,)
        placed.append(evolve(p, layers=at))
    return tuple(placed), tuple(unused)


def _layer(
    segment: int,
    small: Observation,
    large: Observation,
    layer_of: Mapping[int, int],
    parameters: tuple[ParameterFacts, ...],
    *,
    first: bool,
) -> LayerFacts:
    count = len(small.order)
    index = layer_of[segment]
    merged = [s for s, layer in layer_of.items() if layer == index]
    kind = LayerKind.PROLOGUE if segment == 0 else LayerKind.EPILOGUE if segment == count + 1 else LayerKind.BLOCK
    modules = dict.fromkeys(m for s in merged for m in small.segments[s].modules)
    if kind is LayerKind.BLOCK:
        modules = {small.order[segment - 1]: None} | modules
    inputs, reason = ((), "") if first else _boundary(small.segments[segment], large.segments[segment], small.rows, large.rows)
    rows = (small.rows, large.rows)
    return LayerFacts(
        name=next(iter(modules), f"({kind.value})"),
        kind=kind,
        modules=tuple(modules),
        parameters=tuple(p.name for p in parameters if index in p.layers),
        flops=sum(_per_row(small.segments[s].flops, large.segments[s].flops, *rows) for s in merged),
        activation_bytes=sum(_per_row(small.segments[s].saved, large.segments[s].saved, *rows) for s in merged),
        inputs=inputs,
        cut_before=reason,
        again_flops=sum(_per_row(small.segments[s].again_flops, large.segments[s].again_flops, *rows) for s in merged),
        again_bytes=max(_per_row(small.segments[s].again, large.segments[s].again, *rows) for s in merged),
        writes=next((w for s in merged if (w := small.segments[s].writes or large.segments[s].writes)), ""),
        passthrough=kind is LayerKind.BLOCK and small.passthrough[segment - 1] and large.passthrough[segment - 1],
    )


def _per_row(small: int, large: int, few: int, many: int) -> int:
    """What one more row adds; an equal share where that is nothing, as for work that does not grow with the rows."""
    grown = (large - small) // (many - few)
    return grown if grown > 0 else small // few


def _boundary(small: Segment, large: Segment, few: int, many: int) -> tuple[tuple[BoundaryTensor, ...], str]:
    """What crosses into a segment, and why it must not be cut there (empty if it may)."""
    if [c.leaf for c in small.crossings] != [c.leaf for c in large.crossings]:
        return (), f"other tensors cross it with {few} rows than with {many}"
    tensors = []
    reason = small.leak
    for a, b in zip(small.crossings, large.crossings, strict=True):
        dims = _dims(a.shape, b.shape, few, many)
        if dims is None:
            reason = (
                reason or f"a tensor that crosses it is {a.shape} with {few} rows and {b.shape} with {many}, which is no fixed share a row"
            )
            dims = tuple((n, 0) for n in a.shape)
        tensors.append(BoundaryTensor(a.leaf, dims, a.dtype, a.differentiable, a.mutated or b.mutated))
    if not any(t.differentiable for t in tensors):
        reason = reason or "no tensor that needs a gradient crosses it"
    return tuple(tensors), reason


def _dims(small: tuple[int, ...], large: tuple[int, ...], few: int, many: int) -> tuple[tuple[int, int], ...] | None:
    if len(small) != len(large):
        return None
    dims = []
    for a, b in zip(small, large, strict=True):
        slope, rest = divmod(b - a, many - few)
        if rest or slope < 0 or a - slope * few < 0:
            return None
        dims.append((a - slope * few, slope))
    return tuple(dims)


def _output(small: Observation, large: Observation) -> tuple[tuple[int, int], ...] | None:
    return _dims(small.output, large.output, small.rows, large.rows) if small.output is not None and large.output is not None else None


def _facts(
    structure: Structure,
    layers: tuple[LayerFacts, ...],
    parameters: tuple[ParameterFacts, ...],
    seen: tuple[Observation, Observation],
    unused: tuple[str, ...],
) -> ModelFacts:
    warnings = structure.warnings + tuple(f"parameter {name} is not used by the forward pass, so it gets no gradient" for name in unused)
    told = tuple(w.split(" ")[0] for w in structure.warnings)  # batch statistics have a warning of their own
    warnings += tuple(
        f"buffer {name} is updated by the forward pass: once a microbatch, on each rank by the rows that it sees"
        for name, _, _ in seen[0].updated
        if name.rpartition(".")[0] not in told
    )
    draws = assemble_draws(seen[0].draws, seen[1].draws, seen[0].rows, seen[1].rows)
    return ModelFacts(
        factory=structure.factory,
        layers=layers,
        parameters=parameters,
        buffers=structure.buffers,
        draws=draws,
        statistics=structure.statistics,
        shares=structure.shares,
        updated=tuple(BufferFacts(name, shape, dtype, _running(name, layers)) for name, shape, dtype in seen[0].updated),
        inputs=structure.inputs,
        sequential=structure.sequential,
        random=any(o.random for o in seen),
        loss=seen[0].loss,
        output=_output(*seen),
        warnings=warnings + draw_warnings(draws),
        torch=structure.torch,
    )


def _running(buffer: str, layers: tuple[LayerFacts, ...]) -> tuple[int, ...]:
    """The layers whose modules hold a buffer; all of them for one of the model's own."""
    found = tuple(i for i, layer in enumerate(layers) if buffer.startswith(tuple(f"{m}." for m in layer.modules)))
    return found or tuple(range(len(layers)))
