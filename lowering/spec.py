"""The Spec: everything a file says, evaluated, with no default left open.

A value's *origin* (line, profile, `--set`, default) is kept beside the values, by dotted path, so that every message and `pdsl plan` can say
where a value came from.
"""

from __future__ import annotations

from enum import Enum
from fractions import Fraction
from typing import TYPE_CHECKING

from attrs import field, frozen

from pdsl.grammar.patterns import Pattern
from pdsl.grammar.source import Span

if TYPE_CHECKING:
    from pdsl.lowering.schedule_rows import RowsFile

__all__ = [
    "REST", "AxisSpec", "CallValue", "CheckpointSpec", "ClusterSpec", "FaultBudgetSpec", "FreezeSpec", "LayoutCall", "LayoutSlots", "LayoutTerm",
    "MemorySpec", "MeshSpec", "ModelSpec", "Origin", "OriginKind", "PipelineSpec", "PrecisionSpec", "Quantity", "Rest", "ShardRule", "SizeRange", "Spec", "StageSpec",
    "TrainSpec", "ValidateSpec", "Value", "term_text",]  # fmt: skip


class OriginKind(Enum):
    """Who decided a value; later ones beat earlier ones."""

    DEFAULT = "default"
    FILE = "file"
    PROFILE = "profile"
    SET = "--set"


@frozen
class Origin:
    """Where a value came from. `span` is the value's place in a text; a default or a `--set` has none. `detail` is the profile's name or
    the text given to `--set`.
    """

    kind: OriginKind
    span: Span | None = None
    detail: str = ""

    def __str__(self) -> str:
        if self.kind is OriginKind.DEFAULT:
            return "default"
        if self.kind is OriginKind.SET:
            return f"--set {self.detail}"
        where = f"line {self.span.begin.line}" if self.span is not None else "file"
        return f"profile {self.detail}, {where}" if self.kind is OriginKind.PROFILE else where


@frozen
class Quantity:
    """A number with a unit's dimension, in base units: seconds, bytes, bytes per second, a plain ratio for `%`, steps or epochs."""

    value: Fraction
    dimension: str


@frozen
class CallValue:
    """A call used as a value: `adamw(lr = 1e-3)`. Names among the arguments are plain strings."""

    name: str
    positional: tuple[Value, ...] = ()
    keywords: tuple[tuple[str, Value], ...] = ()
    span: Span | None = field(default=None, eq=False)

    def get(self, key: str, default: Value = None) -> Value:
        return dict(self.keywords).get(key, default)


Value = None | bool | int | Fraction | str | Quantity | CallValue | tuple["Value", ...]


# --- mesh and cluster -----------------------------------------------------------------------------------------------------------------


class Rest(Enum):
    """`axis dp = rest`: whatever ranks are left."""

    REST = "rest"


REST = Rest.REST


@frozen
class SizeRange:
    """`axis pp = 2 to 4`."""

    low: int
    high: int


@frozen
class AxisSpec:
    """One axis of the mesh, outermost first in `MeshSpec.axes`."""

    name: str
    size: int | Rest | SizeRange
    link: str | None = None
    span: Span | None = field(default=None, eq=False)


@frozen
class MeshSpec:
    """The axes in the order of the text, outermost first."""

    axes: tuple[AxisSpec, ...] = ()
    span: Span | None = field(default=None, eq=False)

    def axis(self, name: str) -> AxisSpec | None:
        return next((a for a in self.axes if a.name == name), None)


@frozen
class ClusterSpec:
    """`memory` in bytes per device, `bandwidth` in bytes/s, `mtbf` in seconds; None where unknown. `domain` is a call such as
    `rack(nodes = 4)`: nodes 0 to 3, 4 to 7 and so on share one.
    """

    nodes: int | None = None
    ranks_per_node: int | None = None
    device: str = "auto"
    memory: int | None = None
    bandwidth: int | None = None
    latency: Fraction | None = None
    mtbf: Fraction | None = None
    domain: CallValue | None = None


@frozen
class ModelSpec:
    """`model "package.module:factory" { arguments }`."""

    factory: str
    arguments: tuple[tuple[str, Value], ...] = ()
    span: Span | None = field(default=None, eq=False)


# --- sharding -------------------------------------------------------------------------------------------------------------------------


@frozen
class LayoutSlots:
    """`[tp, _]`: for each dim the axes that split it, major first."""

    slots: tuple[tuple[str, ...], ...]
    span: Span | None = field(default=None, eq=False)


@frozen
class LayoutCall:
    """`replicate()`, `fsdp(a)`, `colwise(a)`, `rowwise(a)`."""

    name: str
    axes: tuple[str, ...] = ()
    span: Span | None = field(default=None, eq=False)
    axis_spans: tuple[Span, ...] = field(default=(), eq=False)


LayoutTerm = LayoutSlots | LayoutCall


def term_text(term: LayoutTerm) -> str:
    """A term of a layout as the language writes it."""
    if isinstance(term, LayoutCall):
        return f"{term.name}({', '.join(term.axes)})"
    slots = ("_" if not s else s[0] if len(s) == 1 else f"({', '.join(s)})" for s in term.slots)
    return f"[{', '.join(slots)}]"


@frozen
class ShardRule:
    """One rule: the names it takes, and the terms of the layout that hold together."""

    patterns: tuple[Pattern, ...]
    terms: tuple[LayoutTerm, ...]
    span: Span = field(eq=False)

    def matches(self, name: str) -> bool:
        return any(p.matches(name) for p in self.patterns)


# --- pipeline -------------------------------------------------------------------------------------------------------------------------


@frozen
class StageSpec:
    """`stage NAME { patterns over module names }`."""

    name: str
    modules: tuple[Pattern, ...]
    span: Span = field(eq=False)


@frozen
class PipelineSpec:
    """`stages` is empty for `balanced`. `schedule` is a call such as `one_f_one_b(microbatches = 4)`; `rows` is what its file says, if it names one."""

    axis: str
    schedule: CallValue
    stages: tuple[StageSpec, ...] = ()
    span: Span | None = field(default=None, eq=False)
    axis_span: Span | None = field(default=None, eq=False)
    rows: RowsFile | None = None

    @property
    def microbatches(self) -> int:
        if self.rows is not None and self.rows.schedule is not None:
            return self.rows.schedule.microbatches
        value = self.schedule.get("microbatches")
        return value if isinstance(value, int) else 1

    @property
    def virtual(self) -> int:
        value = self.schedule.get("virtual")
        return value if isinstance(value, int) else 1


# --- what comes with the run ----------------------------------------------------------------------------------------------------------


@frozen
class PrecisionSpec:
    """Dtypes by word: `fp32`, `bf16`, `fp16`."""

    params: str = "fp32"
    reduce: str = "fp32"
    output: str = "fp32"


@frozen
class MemorySpec:
    """`recompute` names the layers whose activations are computed again; `offload` what leaves the device. The others are about sharded
    parameters: see `plan.Sharding`; `reshard` is auto, true or false, `sync` is last or every.
    """

    recompute: Pattern | None = None
    offload: str = "none"
    reshard: str = "auto"
    group: int = 1
    prefetch: int = 1
    sync: str = "last"


@frozen
class FaultBudgetSpec:
    """`silence` in seconds. `restarts` is a count per period or None."""

    unit: str = "node"
    lose: int = 0
    recover: tuple[str, ...] = ("reroute", "retemplate", "restore")
    silence: Fraction = Fraction(30)
    spares: int = 0
    restarts: Value = None


@frozen
class FreezeSpec:
    """Which layers stop training, and what follows from it."""

    prefix: Value = None
    keep: int = 1
    repack: Value = None
    cache: Value = None
    guard: Value = None


@frozen
class CheckpointSpec:
    """Where, how often (in steps) and how many are kept."""

    path: str
    every: int = 500
    keep: int = 3
    mode: str = "async"


@frozen
class TrainSpec:
    """`batch` is the global batch in samples; `accumulate` is how many rounds of the schedule make one step; `shared` are entries of the data that have no
    rows and go whole to every microbatch.
    """

    data: CallValue
    batch: int
    steps: int
    optimizer: CallValue
    last: str = "drop"
    accumulate: int = 1
    rate: CallValue = CallValue("constant")
    clip: Fraction | None = None
    loss: CallValue = CallValue("mean", (), (("over", "samples"),))
    objective: str = "model"
    seed: int = 0
    compile: str = "false"
    shared: tuple[str, ...] = ()


@frozen
class ValidateSpec:
    """The loss on held-out data, every so many steps and after the last; `samples` are the first so many, None for all."""

    data: CallValue
    every: int = 100
    samples: int | None = None


@frozen
class Spec:
    """A whole evaluated file. Blocks that were not written are None where they have no meaning by default."""

    name: str
    mesh: MeshSpec = MeshSpec()
    cluster: ClusterSpec = ClusterSpec()
    model: ModelSpec | None = None
    shard: tuple[ShardRule, ...] = ()
    pipeline: PipelineSpec | None = None
    precision: PrecisionSpec = PrecisionSpec()
    memory: MemorySpec = MemorySpec()
    fault_budget: FaultBudgetSpec | None = None
    freeze: FreezeSpec | None = None
    checkpoint: CheckpointSpec | None = None
    train: TrainSpec | None = None
    validate: ValidateSpec | None = None
    directory: str = field(default=".", eq=False)
    origins: tuple[tuple[str, Origin], ...] = field(default=(), eq=False)

    @property
    def reshards(self) -> bool:
        """Whether units give back what they gathered after their forward. Under a pipeline they stay whole for the step by default: each microbatch
        would gather them again.
        """
        return self.pipeline is None if self.memory.reshard == "auto" else self.memory.reshard == "true"

    def origin(self, path: str) -> Origin:
        """Where the value of a dotted path (`train.batch`, `mesh.pp`, `pipeline.schedule.microbatches`) came from."""
        return dict(self.origins).get(path, Origin(OriginKind.DEFAULT))
