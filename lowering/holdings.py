"""Holdings: who has which box of which tensor, at which committed step. Input and output of every transition.

A node that is lost takes its rows away, a node that joins has none, a checkpoint is an owner whose rows are files, and a transition that was
interrupted leaves just another table of rows. The state of one parameter is one tensor for each kind: `weight/<parameter>` and what the
optimizer keeps for it (`exp_avg/<parameter>`). A state that does not exist yet has no tensor: absent is not zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from attrs import evolve, frozen

from pdsl.lowering.boxes import Box, box
from pdsl.lowering.cells import volume
from pdsl.lowering.facts import BufferFacts, ParameterFacts
from pdsl.lowering.ownership import islands_using
from pdsl.lowering.plan import Plan

__all__ = [
    "SCALARS",
    "STORAGE",
    "BufferFacts",
    "Holding",
    "Kinds",
    "LogicalTensor",
    "Need",
    "at_version",
    "demand",
    "kinds_of",
    "plan_holdings",
    "state_tensors",
    "without",
]

STORAGE = -1
"""The owner of the first storage; every owner below zero is one."""

SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""Kinds of state of torch's optimizers that are one number for each parameter, whatever its shape; every rank with a box holds it."""

Kinds = Sequence[str] | Mapping[str, Sequence[str]]
"""Kinds of state: the same ones for every trainable parameter (frozen ones have their weight alone), or those of each parameter by its name
(a parameter that is not named has its weight alone)."""


@frozen
class Holding:
    """A row: `owner` has `box` of `tensor` as it was after `version` committed steps. An owner of 0 and above is a rank, below a storage."""

    owner: int
    tensor: str
    box: Box
    version: int


@frozen
class Need:
    """A row of what a plan wants: `owner` is to have `box` of `tensor`."""

    owner: int
    tensor: str
    box: Box


@frozen
class LogicalTensor:
    """A tensor as if one process had all of it: shape without padding, bytes of an element. Tensors of one `group` (a parameter and what
    the optimizer keeps for it) travel together.
    """

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    group: str

    @property
    def bytes(self) -> int:
        return volume(tuple((0, size) for size in self.shape)) * self.item_bytes


def kinds_of(kinds: Kinds, parameter: ParameterFacts) -> tuple[str, ...]:
    """The kinds of state that exist for a parameter, in the order given; the weight is always there."""
    if isinstance(kinds, Mapping):
        named: Sequence[str] = kinds.get(parameter.name, ("weight",))
    else:
        named = kinds if parameter.trainable else ("weight",)
    return tuple(dict.fromkeys(("weight", *named) if "weight" not in named else named))


def state_tensors(plan: Plan, kinds: Kinds, buffers: Sequence[BufferFacts] | None = None) -> tuple[LogicalTensor, ...]:
    """All tensors of the state: for every parameter in the order of the model its kinds, then the buffers.

    Optimizer state has the dtype of its parameter (as torch's optimizers keep it), a scalar kind is one fp32 number.
    """
    found = []
    for p in plan.facts.parameters:
        item = p.bytes // max(1, p.numel) or 4
        for kind in kinds_of(kinds, p):
            scalar = kind in SCALARS
            found.append(LogicalTensor(f"{kind}/{p.name}", () if scalar else p.shape, 4 if scalar else item, p.name))
    found += [LogicalTensor(f"buffer/{b.name}", b.shape, b.item_bytes, f"buffer/{b.name}") for b in _known(plan, buffers)]
    return tuple(found)


def demand(plan: Plan, kinds: Kinds, buffers: Sequence[BufferFacts] | None = None) -> tuple[Need, ...]:
    """What every rank of a plan is to hold. Empty boxes (the last shards of an uneven split) have no row, nor has a lost island."""
    return tuple(Need(rank, tensor, where) for rank, tensor, where in _rows(plan, kinds, _known(plan, buffers)))


def plan_holdings(plan: Plan, version: int, kinds: Kinds, buffers: Sequence[BufferFacts] | None = None) -> tuple[Holding, ...]:
    """What every rank of a plan holds after `version` committed steps, if all that the plan wants is in place."""
    return tuple(Holding(rank, tensor, where, version) for rank, tensor, where in _rows(plan, kinds, _known(plan, buffers)))


def without(holdings: Iterable[Holding], lost: Collection[int]) -> tuple[Holding, ...]:
    """The rows that are left when owners are lost."""
    gone = frozenset(lost)
    return tuple(h for h in holdings if h.owner not in gone)


def at_version(holdings: Iterable[Holding], version: int) -> tuple[Holding, ...]:
    """The same rows after another number of committed steps."""
    return tuple(evolve(h, version=version) for h in holdings)


def _known(plan: Plan, buffers: Sequence[BufferFacts] | None) -> Sequence[BufferFacts]:
    return plan.facts.updated if buffers is None else buffers


def _rows(plan: Plan, kinds: Kinds, buffers: Sequence[BufferFacts]) -> Iterator[tuple[int, str, Box]]:
    boxes: dict[object, tuple[Box, ...]] = {}
    for p in plan.facts.parameters:
        layout = plan.layout(p.name)
        key = (p.shape, layout.geometry)
        if key not in boxes:
            boxes[key] = tuple(box(plan, p, s, t) for s in range(plan.shard_size) for t in range(plan.tensor_size))
        tensors = [(f"{kind}/{p.name}", kind in SCALARS) for kind in kinds_of(kinds, p)]
        for island in islands_using(plan, p):
            for rank, where in zip(island, boxes[key], strict=True):
                if volume(where):
                    yield from ((rank, tensor, () if scalar else where) for tensor, scalar in tensors)
    for b in buffers:
        whole = tuple((0, size) for size in b.shape)
        ranks = {r for index in range(len(plan.pipelines)) for island in _running(plan, index, b.layers) for r in island}
        yield from ((rank, f"buffer/{b.name}", whole) for rank in sorted(ranks) if volume(whole))


def _running(plan: Plan, pipeline: int, layers: tuple[int, ...]) -> list[tuple[int, ...]]:
    stages = plan.template(pipeline).stages
    return [plan.pipelines[pipeline].islands[s.position] for s in stages if any(s.start <= layer < s.stop for layer in layers)]
