"""`schedule = auto(...)`: where stages may go, what a search needs to know of them, and templates from what it finds.

One stage on each position, two around in a loop, or two there and back in a V, each with the layers cut evenly for so many stages. Costs are FLOPs, as
everywhere in planning. What a position may hold is the memory of its device less what its layers take for good; without `cluster { memory }` it is
what one round of the schedule would hold at most if there are several, else any amount.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from attrs import frozen

from pdsl.grammar.errors import PlanError
from pdsl.lowering.budgets import stage_memory_of
from pdsl.lowering.cuts import Cut
from pdsl.lowering.facts import ModelFacts
from pdsl.lowering.mesh import Mesh
from pdsl.lowering.plan import ParameterLayout, StageCut, Template
from pdsl.lowering.schedule import loop_placement, v_placement
from pdsl.lowering.search import NothingFits, search
from pdsl.lowering.search_report import ScheduleBasis
from pdsl.lowering.searched import candidate_of, template_from
from pdsl.lowering.spec import PipelineSpec, Spec
from pdsl.lowering.stage_memory import StageMemory
from pdsl.lowering.templates import Fits, balanced_cut, forward_flops

__all__ = ["AutoStages", "auto_stages", "auto_template", "basis_of", "least_memory", "no_room"]

_CUT_BY = (("zero_bubble", 1), ("interleaved_zero_bubble", 2), ("zbv", 2))
"""The schedules whose step time breaks ties between even cuts, for one stage, a loop of two and a V."""


@frozen
class AutoStages:
    """What `auto` plans for: pipelines of `positions` positions. `memory` tells what layers take, or is None if nobody knows the batch; `limit` is what a
    device has, or None. `microbatches` are those of one round.
    """

    facts: ModelFacts
    positions: int
    microbatches: int
    rounds: int = 1
    hop: Fraction = Fraction(0)
    split: bool = True
    memory: StageMemory | None = None
    limit: int | None = None


def auto_stages(
    spec: Spec, facts: ModelFacts, layouts: tuple[ParameterLayout, ...], mesh: Mesh, *, positions: int, microbatches: int, of_step: int
) -> AutoStages:
    """What a spec asks for, in pipelines of `positions` positions with `microbatches` microbatches in a round; `of_step` over all pipelines in a step."""
    assert spec.pipeline is not None
    return AutoStages(
        facts=facts,
        positions=positions,
        microbatches=microbatches,
        rounds=spec.train.accumulate if spec.train is not None else 1,
        hop=_hop(spec.pipeline, facts, positions),
        split=_splits(spec, mesh.shard_size),
        memory=stage_memory_of(spec, facts, layouts, mesh, of_step),
        limit=spec.cluster.memory,
    )


def _hop(pipeline: PipelineSpec, facts: ModelFacts, positions: int) -> Fraction:
    """The latency between two positions in FLOPs of one sample: the argument `hop` is a share of what a position computes in a forward, on average."""
    share = pipeline.schedule.get("hop", 0)
    total = sum(layer.flops for layer in facts.layers)
    return Fraction(share) * Fraction(total, positions) if isinstance(share, int | Fraction) else Fraction(0)


def _splits(spec: Spec, shard_size: int) -> bool:
    """Whether backwards may run in halves: not if the spec says no, not where layers are compiled, not where sharded layers are given back or reduced
    between the halves, and not where activations are computed again, which leaves nothing for the second half.
    """
    if spec.memory.recompute is not None or (spec.train is not None and spec.train.compile != "false"):
        return False
    if spec.pipeline is None or spec.pipeline.schedule.get("split", True) is False:
        return False
    return shard_size == 1 or (spec.memory.reshard != "true" and spec.memory.sync != "every")


# --- stages -------------------------------------------------------------------------------------------------------------------------------


def _places(asked: AutoStages, written: Cut | None = None) -> tuple[tuple[StageCut, ...], ...]:
    """The stages of every placement that the layers allow, each once; only those with as many stages as are `written`, if any are.

    Where memory is known a cut is taken that leaves room for one microbatch, and one with room for what 1F1B holds, beside the most even one.
    """
    p = asked.positions
    placements = (loop_placement(p), loop_placement(p, 2), v_placement(p))
    found: dict[tuple[StageCut, ...], None] = {}
    for placement, (schedule, virtual) in zip(placements, _CUT_BY, strict=True):
        if written is not None and len(written) != len(placement):
            continue
        cuts = [written] if written is not None else _cuts(asked, schedule, virtual)
        for bounds in cuts:
            found[tuple(StageCut(a, b, at) for (a, b), at in zip(bounds, placement, strict=True))] = None
    return tuple(found)


def _cuts(asked: AutoStages, schedule: str, virtual: int) -> list[Cut]:
    tests: list[Fits | None] = [None]
    if asked.limit is not None and asked.memory is not None:
        tests += [
            _room(asked, virtual, lambda stage, stages: min(asked.microbatches, stages - stage)),
            _room(asked, virtual, lambda stage, stages: 1),
        ]
    cuts = (balanced_cut(asked.facts, asked.positions, schedule=schedule, virtual=virtual, fits=test) for test in tests)
    return list(dict.fromkeys(bounds for bounds in cuts if bounds is not None))


def _room(asked: AutoStages, each: int, held: Callable[[int, int], int]) -> Fits:
    memory, limit = asked.memory, asked.limit
    assert memory is not None
    assert limit is not None
    return lambda stage, stages, start, stop: memory.bytes(start, stop, held(stage, stages)) * each <= limit


def basis_of(asked: AutoStages, stages: Sequence[StageCut]) -> ScheduleBasis:
    """What a search needs to know of stages."""
    forward = forward_flops(asked.facts, stages)
    again = tuple(sum(layer.again_flops for layer in asked.facts.layers[s.start : s.stop]) for s in stages)
    if asked.memory is None:
        return ScheduleBasis(forward, asked.hop, (1,) * len(stages), None, asked.split, again)
    memory = asked.memory
    sizes = tuple(memory.bytes(s.start, s.stop, 1) - memory.bytes(s.start, s.stop, 0) for s in stages)
    between = tuple(memory.between(s.start, s.stop) if i else 0 for i, s in enumerate(stages))  # the first stage has no input half
    return ScheduleBasis(forward, asked.hop, sizes, _caps(asked, stages, sizes), asked.split, again, between)


def _caps(asked: AutoStages, stages: Sequence[StageCut], sizes: Sequence[int]) -> tuple[int, ...] | None:
    positions = range(max(s.position for s in stages) + 1)
    memory = asked.memory
    if asked.limit is not None and memory is not None:
        taken = [sum(memory.bytes(s.start, s.stop, 0) for s in stages if s.position == at) for at in positions]
        return tuple(asked.limit - size for size in taken)
    if asked.rounds > 1:
        return tuple(asked.microbatches * sum(size for s, size in zip(stages, sizes, strict=True) if s.position == at) for at in positions)
    return None


def least_memory(asked: AutoStages, written: Cut | None = None) -> int | None:
    """The least bytes of a device with which some placement has room for one microbatch on every position; None if that is not known."""
    memory = asked.memory
    if memory is None:
        return None
    needs = []
    for stages in _places(asked, written):
        each = [0] * asked.positions
        for s in stages:
            each[s.position] += memory.bytes(s.start, s.stop, 1)
        needs.append(max(each))
    return min(needs, default=None)


# --- templates ----------------------------------------------------------------------------------------------------------------------------


def auto_template(asked: AutoStages, written: Cut | None = None) -> Template:
    """The template with the best schedule that the whole search finds. Raises PlanError if the layers allow no placement, or memory no schedule."""
    places = _places(asked, written)
    if not places:
        have = (
            f"{len(written)} stages are written" if written is not None else f"{len(asked.facts.layers)} layers cannot be cut into so many"
        )
        raise PlanError(f"auto has one or two stages on each of {asked.positions} positions, and {have}")
    bases = tuple(basis_of(asked, stages) for stages in places)
    candidates = tuple(candidate_of(stages, basis) for stages, basis in zip(places, bases, strict=True))
    try:
        found = search(candidates, asked.microbatches * asked.rounds, hop=asked.hop, rounds=asked.rounds, split=asked.split)
    except NothingFits:
        raise PlanError(no_room(asked.limit, least_memory(asked, written))) from None
    return template_from(places[found.candidate], found, asked.hop)


def no_room(limit: int | None, least: int | None) -> str:
    """What is told where memory allows no schedule: the bytes that there are, and those that one microbatch takes on its fullest position."""
    return f"no schedule fits in {limit} bytes of memory: with a single microbatch the fullest position takes {least}"
