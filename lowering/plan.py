"""The Plan: who holds what and who does what. Pure data, hashed, equal by value.

A plan is heterogeneous from the start: pipelines may differ in length, cut and count of microbatches. A rectangular mesh is the case in
which all of them use one template. An *island* is the tuple of ranks that run one position of a pipeline, ordered by (shard, tensor)
coordinate, tensor innermost; all islands of a plan have the same shape. Ranks are numbered
node by node and keep their numbers for life, so after a loss there are gaps. A pipeline that lost an island keeps the others, which hold their
layers, take no microbatches, and still sum gradients and step.
"""

from __future__ import annotations

import hashlib
from functools import cached_property

from attrs import field, frozen

from pdsl.lowering.facts import ModelFacts
from pdsl.lowering.parts import role_axes
from pdsl.lowering.places import Coordinate, MeshAxis
from pdsl.lowering.schedule import Schedule
from pdsl.lowering.search_report import ScheduleBasis, SearchReport
from pdsl.lowering.spec import CallValue, PrecisionSpec, Value

__all__ = [
    "DEFAULT_SILENCE",
    "PLAN_VERSION",
    "Budget",
    "Coordinate",
    "Job",
    "MeshAxis",
    "ParameterLayout",
    "Pipeline",
    "Plan",
    "Saving",
    "Sharding",
    "StageCut",
    "Template",
    "Validation",
]

PLAN_VERSION = 2

DEFAULT_SILENCE = 300.0
"""Seconds; for a spec without a fault budget, which says nothing about silence."""


@frozen
class ParameterLayout:
    """How one parameter lies on an island. `sharded`: split over the shard coordinate (dim 0, uneven allowed). `tensor_dim`: the dim that is
    split over the tensor coordinate, or None. `style` is what the rule said, in words of the language; `line` the line that decided (0 if none).

    Where a mesh has several axes of a role, `shard_axes` and `tensor_axes` name those that split, major first; () means all of them. `second` is a second
    dim that is split, and over which tensor axes. `summed` are tensor axes on whose ranks the gradient is a part, although the parameter is whole.
    """

    name: str
    sharded: bool
    tensor_dim: int | None
    style: str
    line: int
    shard_axes: tuple[str, ...] = ()
    tensor_axes: tuple[str, ...] = ()
    second: tuple[int, tuple[str, ...]] | None = None
    summed: tuple[str, ...] = ()

    @property
    def splits(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """The dims that tensor axes split, each with its axes."""
        first = () if self.tensor_dim is None else ((self.tensor_dim, self.tensor_axes),)
        return (*first, self.second) if self.second is not None else first

    @property
    def geometry(self) -> object:
        """Equal for parameters that are cut in the same way."""
        return self.sharded, self.shard_axes, self.splits


@frozen
class StageCut:
    """Layers [start, stop) of the chain, run by the island at `position`."""

    start: int
    stop: int
    position: int


@frozen
class Template:
    """A cut of the layers into stages and the schedule that runs them; it names no rank. `search` is there if the schedule was searched for."""

    stages: tuple[StageCut, ...]
    schedule: Schedule
    search: SearchReport | None = None

    @property
    def positions(self) -> int:
        return self.schedule.positions


@frozen
class Pipeline:
    """One whole copy of the model: a template, its islands by position, and the global ids of its microbatches in local order.

    An island that was lost is the empty tuple; a pipeline that has one is not `whole` and takes no microbatches.
    """

    template: int
    islands: tuple[tuple[int, ...], ...]
    microbatches: tuple[int, ...]

    @property
    def whole(self) -> bool:
        return all(self.islands)


@frozen
class Budget:
    """What a run must survive, with all that is needed to plan anew for fewer or more nodes without the spec.

    `lose` nodes may be lost at once. A pipeline may have `least`, `least + 1`, ... nodes; `cuts` has the stages for each of these sizes in
    turn (nodes times islands per node positions). `schedule` and `virtual` are the family that runs them. `recover` are the answers to a loss
    in the order in which they are tried. `domain` is the number of nodes that share a failure domain (1: none do).
    `bases` has for each of `cuts` what a search for its schedule needs, if the family is `auto`.
    """

    lose: int
    least: int
    cuts: tuple[tuple[StageCut, ...], ...]
    schedule: str
    virtual: int = 1
    recover: tuple[str, ...] = ("reroute", "retemplate", "restore")
    domain: int = 1
    bases: tuple[ScheduleBasis, ...] = ()

    @property
    def sizes(self) -> range:
        """Counts of nodes that a pipeline may have."""
        return range(self.least, self.least + len(self.cuts))

    def cut(self, nodes: int) -> tuple[StageCut, ...]:
        """The stages of a pipeline of that many nodes. Raises IndexError for a size that there is not."""
        if nodes not in self.sizes:
            raise IndexError(f"there is no template for {nodes} nodes, only for {self.sizes.start} to {self.sizes.stop - 1}")
        return self.cuts[nodes - self.least]


@frozen
class Saving:
    """Checkpoints: a folder, every how many steps, how many are kept, and whether training goes on while one is written."""

    path: str
    every: int
    keep: int
    asynchronous: bool = True


@frozen
class Sharding:
    """When sharded parameters are gathered, and when their gradients are reduced.

    `reshard`: what a unit has gathered is given back after its forward and gathered again for its backward; without it, it stays whole for the
    step. `group` consecutive blocks are one unit (the last may be shorter). `prefetch` units are gathered ahead of their use in forward and
    backward, where units reshard. `every`: gradients are reduced after the backward of each microbatch and kept as shards, not added up whole
    until the last.
    """

    reshard: bool = False
    group: int = 1
    prefetch: int = 1
    every: bool = False


@frozen
class Validation:
    """Held-out data and after how many steps its loss is taken; `samples` are the first so many of it, None for all."""

    data: CallValue
    every: int
    samples: int | None = None


@frozen
class Job:
    """What is trained, apart from how it is laid out. `directory` is where user modules are imported from, `shared` are entries of the data without rows."""

    factory: str
    arguments: tuple[tuple[str, Value], ...]
    data: CallValue | None
    batch: int
    steps: int
    accumulate: int
    optimizer: CallValue
    rate: CallValue
    clip: float | None
    loss: CallValue
    objective: str
    last: str
    seed: int
    directory: str = field(default=".", eq=False)
    shared: tuple[str, ...] = ()


@frozen(slots=False)
class Plan:
    """All pipelines, layouts and microbatches of one generation.

    `microbatches` is their count in one step, over all pipelines and whatever the plan; each has `batch / microbatches` samples, of which every
    shard coordinate takes an equal part. `silence` are the seconds after which a rank that says nothing counts as lost. `compile` is the backend of torch.compile
    that layers are compiled with, empty for none. `frozen_layers` is the length of the frozen prefix. `pending` names what the spec asks for and this version does not execute.
    `precision` has the number formats, `offload` what waits in host memory (`optimizer`, `params` or `none`). `budget` is there if the run must survive losses, or may change its size.
    """

    name: str
    axes: tuple[MeshAxis, ...]
    shard_size: int
    tensor_size: int
    ranks_per_node: int
    device: str
    facts: ModelFacts
    layouts: tuple[ParameterLayout, ...]
    templates: tuple[Template, ...]
    pipelines: tuple[Pipeline, ...]
    microbatches: int
    job: Job
    sharding: Sharding = Sharding()
    compile: str = ""
    precision: PrecisionSpec = field(factory=PrecisionSpec)
    offload: str = "none"
    frozen_layers: int = 0
    generation: int = 0
    pending: tuple[str, ...] = ()
    silence: float = DEFAULT_SILENCE
    budget: Budget | None = None
    saving: Saving | None = None
    validation: Validation | None = None
    version: int = PLAN_VERSION

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending. There are gaps where nodes were lost."""
        return tuple(sorted(self._coordinates))

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self._coordinates)

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """All nodes, ascending."""
        return tuple(sorted({self.node(rank) for rank in self.ranks}))

    @property
    def reshard(self) -> bool:
        """Whether units give back after their forward what they have gathered."""
        return self.sharding.reshard

    @property
    def islands_per_node(self) -> int:
        return self.ranks_per_node // (self.shard_size * self.tensor_size)

    @property
    def rows_per_microbatch(self) -> int:
        """Samples of one microbatch, over all shard coordinates."""
        return self.job.batch // self.microbatches

    @property
    def rows_per_rank(self) -> int:
        """Samples of one microbatch on one shard coordinate."""
        return self.rows_per_microbatch // self.shard_size

    @cached_property
    def _coordinates(self) -> dict[int, Coordinate]:
        return {
            rank: Coordinate(p, position, i // self.tensor_size, i % self.tensor_size)
            for p, pipeline in enumerate(self.pipelines)
            for position, island in enumerate(pipeline.islands)
            for i, rank in enumerate(island)
        }

    def coordinate(self, rank: int) -> Coordinate:
        """Where a rank stands. Raises KeyError for a rank outside the plan."""
        return self._coordinates[rank]

    def island(self, rank: int) -> tuple[int, ...]:
        at = self.coordinate(rank)
        return self.pipelines[at.pipeline].islands[at.position]

    def node(self, rank: int) -> int:
        """The node a rank lives on: ranks are numbered node by node."""
        return rank // self.ranks_per_node

    def template(self, pipeline: int) -> Template:
        return self.templates[self.pipelines[pipeline].template]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Indices of the stages that a rank runs, in order."""
        at = self.coordinate(rank)
        return tuple(i for i, s in enumerate(self.template(at.pipeline).stages) if s.position == at.position)

    def layout(self, parameter: str) -> ParameterLayout:
        return self._layouts[parameter]

    @cached_property
    def shard_axes(self) -> tuple[MeshAxis, ...]:
        """The axes that make up the shard coordinate, major first, without those of one rank."""
        return role_axes(self.axes, "shard")

    @cached_property
    def tensor_axes(self) -> tuple[MeshAxis, ...]:
        """The axes that make up the tensor coordinate, major first, without those of one rank."""
        return role_axes(self.axes, "tensor")

    @cached_property
    def _layouts(self) -> dict[str, ParameterLayout]:
        return {layout.name: layout for layout in self.layouts}

    def to_json(self) -> str:
        """A stable JSON text: same plan, same bytes, on every machine."""
        from pdsl.lowering.serial import dump

        return dump(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote. Raises ValueError on another version, a malformed text, or a plan whose parts do not fit together."""
        from pdsl.lowering.plan_check import check_plan
        from pdsl.lowering.serial import load

        found = load(text, cls)
        findings = check_plan(found)
        if findings:
            raise ValueError("; ".join(findings[:3]))
        return found

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the JSON form without the directory, in hex."""
        from pdsl.lowering.serial import dump_for_hash

        return hashlib.sha256(dump_for_hash(self).encode()).hexdigest()
