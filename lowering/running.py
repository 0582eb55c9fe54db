"""Running statistics: which ranks add up what their microbatches give to the buffers of a layer."""

from __future__ import annotations

from pdsl.lowering.plan import Plan

__all__ = ["running_groups"]


def running_groups(plan: Plan, rank: int) -> tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]:
    """(ranks, buffers) for the buffers of modules with batch statistics that a rank holds, in an order that all ranks share.

    The ranks are those at the same place of all living islands that run the layer: the ranks of one island hold the same values.
    """
    place = plan.island(rank).index(rank)
    found: dict[tuple[int, ...], list[str]] = {}
    for buffer in plan.facts.updated:
        if buffer.name.rpartition(".")[0] not in plan.facts.statistics or buffer.name.endswith(".num_batches_tracked"):
            continue
        islands: dict[tuple[int, ...], None] = {}
        for index, pipeline in enumerate(plan.pipelines):
            for stage in plan.template(index).stages:
                if any(stage.start <= layer < stage.stop for layer in buffer.layers):
                    islands.setdefault(pipeline.islands[stage.position])
        ranks = tuple(sorted(island[place] for island in islands if island))
        if rank in ranks:
            found.setdefault(ranks, []).append(buffer.name)
    return tuple((ranks, tuple(names)) for ranks, names in sorted(found.items()))
