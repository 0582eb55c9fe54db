"""What a run of layers takes in the memory of one device, before there is a plan: enough to tell how short a pipeline may be.

It follows `cost`, which needs a plan: shards of parameters, gradients and optimizer state, what the step gathers, and for every microbatch that the
schedule holds at once its activations and what crossed the boundary. Where they differ this one is larger (the widest boundary of the model, the first
and largest shard), so a size that fits here fits there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from math import prod

from attrs import frozen

from pdsl.lowering.facts import ModelFacts, ParameterFacts, item_bytes
from pdsl.lowering.parts import parts, role_axes
from pdsl.lowering.places import MeshAxis
from pdsl.lowering.plan import ParameterLayout
from pdsl.lowering.precision import compute_format, sum_format
from pdsl.lowering.schedules import SCHEDULES
from pdsl.lowering.spec import CallValue, PrecisionSpec, Quantity
from pdsl.lowering.templates import Fits
from pdsl.lowering.tensor_traffic import tokens_of

__all__ = ["StageMemory", "features_given", "fits_in", "optimizer_states"]

_FP32 = 4


@frozen
class StageMemory:
    """Bytes of layers on one rank: `state` and `passing` are sums before each layer, the first of what stays, the second per microbatch. `again` are
    (layer, later layer, bytes) of tied parameters, which a stage with both holds once. `boundary` is per microbatch, `recomputed` what the largest module
    that runs again takes while it does. `halves` are sums before each layer of what a microbatch takes more between the halves of a backward: the
    gradients of what weights gave.
    """

    state: tuple[int, ...]
    passing: tuple[int, ...]
    again: tuple[tuple[int, int, int], ...]
    boundary: int
    recomputed: int = 0
    halves: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        facts: ModelFacts,
        layouts: Sequence[ParameterLayout],
        *,
        shard: int,
        tensor: int,
        rows: int,
        states: int,
        gathers: bool = True,
        precision: PrecisionSpec | None = None,
        axes: Sequence[MeshAxis] = (),
    ) -> StageMemory:
        """For `rows` samples of a microbatch on a rank and an optimizer with `states` numbers for each element. `gathers`: the step holds sharded
        parameters and their gradients whole, as in pipelines. Without `precision` layers compute in the formats of the model; `axes` are those of
        the mesh, for layouts that use only some of a role's.
        """
        formats = precision or PrecisionSpec()
        per_layer, halves = [0] * len(facts.layers), [0] * len(facts.layers)
        tokens = [tokens_of(facts, i) for i in range(len(facts.layers))]
        again = []
        for p, layout in zip(facts.parameters, layouts, strict=True):
            items = (item_bytes(p.dtype), item_bytes(compute_format(formats, facts, p)), item_bytes(sum_format(formats, p)))
            cut, shards = _cut(p, layout, shard, tensor, axes)
            size = _parameter_bytes(p, layout, cut, shards, states, gathers, items)
            waits = p.trainable and p.layers
            between = features_given(p, p.shape if layout.sharded else cut) * tokens[p.layers[0]] * rows * items[2] if waits else 0
            for layer in p.layers:
                per_layer[layer] += size
                halves[layer] += between
            again += [(a, b, size) for a, b in pairwise(p.layers)]
        passing = [layer.activation_bytes * rows for layer in facts.layers]
        widest = max((sum(prod(t.shape(rows)) * item_bytes(t.dtype) for t in layer.inputs) for layer in facts.layers), default=0)
        recomputed = max((layer.again_bytes for layer in facts.layers), default=0) * rows
        state, passed = tuple(accumulate(per_layer, initial=0)), tuple(accumulate(passing, initial=0))
        return cls(state, passed, tuple(again), widest, recomputed, tuple(accumulate(halves, initial=0)))

    def bytes(self, start: int, stop: int, held: int) -> int:
        """Bytes of layers [start, stop) with `held` microbatches between their forward and their backward."""
        twice = sum(size for a, b, size in self.again if start <= a and b < stop)
        passing = held * (self.passing[stop] - self.passing[start] + self.boundary)
        return self.state[stop] - self.state[start] - twice + passing + self.boundary + self.recomputed

    def between(self, start: int, stop: int) -> int:
        """Bytes that one microbatch of layers [start, stop) takes more between the halves of its backward."""
        return self.halves[stop] - self.halves[start] if self.halves else 0


def features_given(p: ParameterFacts, shape: Sequence[int]) -> int:
    """Numbers that a weight of this shape gives for one row: as many as a matrix has rows (columns, if it is an embedding), or any other weight
    elements. A bias shares what its matrix gives.
    """
    if p.name.endswith(".bias"):
        return 0
    return shape[-1] if p.module == "Embedding" else shape[0] if len(shape) > 1 else prod(shape)


def optimizer_states(optimizer: CallValue) -> int:
    """Numbers that the optimizer keeps for each element: two moments for adamw, one buffer for sgd with momentum, none without."""
    if optimizer.name != "sgd":
        return 2
    momentum = optimizer.get("momentum", 0)
    return 1 if (momentum.value if isinstance(momentum, Quantity) else momentum) else 0


def _cut(p: ParameterFacts, layout: ParameterLayout, shard: int, tensor: int, axes: Sequence[MeshAxis]) -> tuple[list[int], int]:
    """The largest part of a parameter before it is sharded, and among how many ranks it is."""
    shape = list(p.shape)
    for dim, names in layout.splits:
        shape[dim] = -(-shape[dim] // parts(role_axes(axes, "tensor"), names, tensor))
    return shape, parts(role_axes(axes, "shard"), layout.shard_axes, shard) if layout.sharded else 1


def _parameter_bytes(
    p: ParameterFacts, layout: ParameterLayout, shape: list[int], shards: int, states: int, gathers: bool, items: tuple[int, int, int]
) -> int:
    """`items` are bytes of an element: of the weight, of what layers compute with, of sums of gradients."""
    item, computed, summed = items
    whole = prod(shape)
    if layout.sharded:
        shape = [-(-shape[0] // shards), *shape[1:]]
    own = prod(shape)
    trained = 1 if p.trainable else 0
    gathered = whole * (computed + trained * summed) if layout.sharded and gathers else 0
    copy = own * computed if computed != item and not layout.sharded else 0
    return own * item * (1 + trained) + trained * states * own * _FP32 + gathered + copy


def fits_in(memory: StageMemory, limit: int, schedule: str, virtual: int, microbatches: int) -> Fits:
    """Whether layers fit as a stage, for `cuts_for_sizes`. A position shares the limit among its stages; `microbatches` of a round at most."""
    each = SCHEDULES[schedule].per_position(virtual)
    held = _held(schedule, virtual, microbatches)

    def fits(stage: int, stages: int, start: int, stop: int) -> bool:
        return memory.bytes(start, stop, held(stage, stages)) * each <= limit

    return fits


def _held(schedule: str, virtual: int, microbatches: int) -> Callable[[int, int], int]:
    """(stage, stages) -> the most microbatches that a stage holds at once."""

    @cache
    def held(stage: int, stages: int) -> int:
        if stages == 1:
            return 1
        if schedule == "one_f_one_b":
            return min(microbatches, stages - stage)
        each = SCHEDULES[schedule].per_position(virtual)
        return -(-SCHEDULES[schedule].held(stages // each, microbatches, virtual) // each)

    return held
