"""Rules on the fault budget: PDL5. What they find is the part of its promise that a spec cannot keep, with a loss that shows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import evolve

from pdsl.grammar.diagnostics import Diagnostic, Severity
from pdsl.lowering.mesh import PIPELINE
from pdsl.lowering.promise import in_words
from pdsl.lowering.rules.base import Context, Rule, plural
from pdsl.lowering.rules.budget_counts import (
    LOSE,
    gap_of,
    labels_of,
    lose,
    more_pipelines,
    named,
    outline_of_spec,
    why_not_whole,
    would_do,
)
from pdsl.lowering.spec import CallValue

__all__ = ["CopiesTooFew", "DomainHoldsAll", "DomainUnknown", "MemoryAfterLoss", "NoMajority", "NodesIdle", "PipelinesShareNodes"]


class CopiesTooFew(Rule):
    """What it does
        Checks that there are more pipelines than nodes may be lost: each has one copy of every layer, however many ranks share it in shards.

    Why it is bad
        A loss that takes a node from every pipeline takes the last copy of some layer along. The run would have to go back to a checkpoint, which
        is what the budget promises not to happen.

    Example (bad)
        cluster { nodes = 3; ranks_per_node = 2 }
        mesh { axis dp = rest; axis pp = 2 to 3; axis fsdp = 2 }
        fault_budget { lose = 1 }      # one pipeline only

    Better
        cluster { nodes = 4; ranks_per_node = 2 }
        mesh { axis dp = rest; axis pp = 2 to 3; axis fsdp = 2 }
        fault_budget { lose = 1 }

    Fix
        Take more nodes, shorter pipelines or a smaller budget; the message names what would do.
    """

    code = "PDL501"
    name = "copies-too-few"
    needs = frozenset({"mesh", "cluster", "shard", "pipeline", "fault_budget", "train"})
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        outline, mesh = outline_of_spec(context), context.mesh
        if outline is None or mesh is None:
            return
        wanted = outline.lose + 1
        if outline.survives and mesh.pipelines >= wanted:
            return
        message = f"lose = {outline.lose} needs {outline.needed} nodes, {wanted} pipelines of at least {outline.least}, and there are {outline.nodes}"
        if outline.microbatches < wanted:
            has = plural(outline.microbatches, "microbatch").replace("hs", "hes")
            message = f"lose = {outline.lose} needs {wanted} pipelines with a microbatch each, and a step has {has}"
        elif outline.nodes >= outline.needed:
            message = f"lose = {outline.lose} needs {wanted} pipelines, and the mesh has {mesh.pipelines}"
        gap = gap_of(context, "state")
        notes = (f"losing {named(gap.nodes)} leaves no copy of {gap.layer}",) if gap is not None else ()
        yield self.report(
            message,
            context.place(LOSE, "fault_budget"),
            f"{outline.lose}{context.by(LOSE)}",
            labels=labels_of(context, outline),
            help=more_pipelines(context, wanted) if outline.survives else would_do(context, outline),
            notes=notes,
        )


class NodesIdle(Rule):
    """What it does
        Checks for every count of nodes that a loss within the budget may leave that pipelines of the given lengths add up to it.

    Why it is bad
        Nodes that are left over wait and do nothing until others are lost as well, or too few are left for any pipeline. The budget promises to use
        every surviving node.

    Example (bad)
        mesh { axis dp = rest; axis pp = 2; axis fsdp = 2 }             # 6 nodes are three pipelines, 5 are two and one that idles
        fault_budget { lose = 1 }

    Better
        mesh { axis dp = rest; axis pp = 2 to 3; axis fsdp = 2 }        # 5 = 2 + 3
        fault_budget { lose = 1 }

    Fix
        Widen the range of the pipeline axis as the message says.
    """

    code = "PDL502"
    name = "nodes-idle"
    needs = frozenset({"mesh", "cluster", "shard", "pipeline", "fault_budget", "train"})
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        outline = outline_of_spec(context)
        if outline is None or not outline.survives or outline.idle is None:
            return
        left, used = outline.idle
        lost = outline.nodes - left
        sizes = f"{outline.least}" if outline.count == 1 else f"{outline.least} to {outline.largest}"
        leaves = f"losing {plural(lost, 'node')} of {outline.nodes} leaves {left}"
        message = f"{leaves}, and pipelines of {sizes} nodes can use {used} of them: {left - used} would idle"
        if not used:
            message = f"{leaves}, and a pipeline needs {outline.least}"
        yield self.report(
            message,
            context.place(LOSE, "fault_budget"),
            f"{outline.lose}{context.by(LOSE)}",
            labels=labels_of(context, outline),
            help=would_do(context, outline),
        )


class PipelinesShareNodes(Rule):
    """What it does
        Checks that every pipeline takes whole nodes, and that the ranks that share one stage are on one node.

    Why it is bad
        The ranks of a node die together. If they belong to several pipelines, or are a part of an island, one loss breaks more than one copy, and
        the copies that were counted on are not there.

    Example (bad)
        cluster { nodes = 4; ranks_per_node = 2 }
        mesh { axis dp = rest; axis pp = 2; axis fsdp = 4 }             # an island of 4 ranks lies on two nodes
        fault_budget { lose = 1 }

    Better
        cluster { nodes = 4; ranks_per_node = 4 }
        mesh { axis dp = rest; axis pp = 1 to 2; axis fsdp = 4 }
        fault_budget { lose = 1 }

    Fix
        Let the shard and tensor axes divide the ranks of a node, and the positions of a pipeline be a multiple of the islands of a node. Write
        shard and tensor axes after the others.
    """

    code = "PDL503"
    name = "pipelines-share-nodes"
    needs = frozenset({"mesh", "cluster", "shard", "pipeline", "fault_budget"})
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        mesh = context.mesh
        if mesh is None or not lose(context):
            return
        reason = why_not_whole(context, mesh)
        if reason is None:
            return
        island = mesh.shard_size * mesh.tensor_size
        per_node = context.spec.cluster.ranks_per_node or island
        if per_node % island:
            help_ = f"shard and tensor axes whose product divides {per_node} would do, or ranks_per_node = {island}"
        elif mesh.positions % (per_node // island):
            fits = per_node // island
            axis = next((a.name for a in mesh.axes if a.role == PIPELINE), None)
            longer = f"{axis} = {fits}" if axis is not None else f"a pipeline over {fits} positions"
            help_ = f"ranks_per_node = {island * mesh.positions}, {longer} or a larger shard axis would do"
        else:
            help_ = "write the replica axis first, then the pipeline axis, then the shard and tensor axes"
        yield self.report(
            f"lose = {lose(context)} needs pipelines that take whole nodes: {reason}",
            context.place(LOSE, "fault_budget"),
            f"{lose(context)}{context.by(LOSE)}",
            labels=context.label("cluster.ranks_per_node", plural(per_node, "rank")),
            help=(help_,),
        )


class MemoryAfterLoss(Rule):
    """What it does
        Checks that what each rank holds fits into its device, now and in every plan that a loss within the budget may lead to.

    Why it is bad
        After a loss pipelines may be shorter, so that each rank holds more layers, or fewer, so that each runs more microbatches. A run that recovers
        into a lack of memory has not recovered.

    Example (bad)
        cluster { nodes = 4; ranks_per_node = 1; memory = 1MiB }
        fault_budget { lose = 1 }

    Better
        cluster { nodes = 4; ranks_per_node = 1; memory = 1GiB }
        fault_budget { lose = 1 }

    Fix
        Take longer pipelines, more shards, or smaller microbatches.
    """

    code = "PDL504"
    name = "memory-after-loss"
    needs = frozenset({"mesh", "cluster", "shard", "pipeline", "fault_budget", "train", "model"})
    needs_mesh = True
    needs_facts = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        memory = context.spec.cluster.memory
        if memory is None or context.mesh is None or not lose(context) or why_not_whole(context, context.mesh) is not None:
            return
        outline = outline_of_spec(context)
        gap = gap_of(context, "memory") if outline is not None else None
        if outline is not None and gap is None:
            return
        why = gap.why if gap is not None else f"no pipeline of these lengths fits in the {in_words(memory)} of a device"
        yield self.report(
            f"after a loss within the budget {why}" if gap is not None and gap.nodes else why,
            context.place("cluster.memory", LOSE, "fault_budget"),
            f"{in_words(memory)}{context.by('cluster.memory')}",
            labels=context.label(LOSE, f"lose = {lose(context)}"),
            help=("longer pipelines, more shards or more microbatches take less",),
        )


class DomainHoldsAll(Rule):
    """What it does
        Checks, where nodes fail together in racks or other domains, that every layer has copies in more domains than may be lost.

    Why it is bad
        Copies on different nodes of one rack are lost together when its power or its switch fails.

    Example (bad)
        cluster { nodes = 4; ranks_per_node = 2; domain = rack(nodes = 4) }
        fault_budget { unit = domain; lose = 1 }      # all of it is in one rack

    Better
        cluster { nodes = 4; ranks_per_node = 2; domain = rack(nodes = 2) }
        fault_budget { unit = domain; lose = 1 }

    Fix
        Take more or smaller domains, or longer pipelines, whose copies lie farther apart.
    """

    code = "PDL505"
    name = "domain-holds-all"
    needs = frozenset({"mesh", "cluster", "shard", "pipeline", "fault_budget", "train", "model"})
    needs_mesh = True
    needs_facts = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        outline, domain = outline_of_spec(context), context.spec.cluster.domain
        if outline is None or domain is None or not outline.survives:
            return
        if outline.spread == 1:
            yield from self._beyond(context, domain)
            return
        gap = gap_of(context, "domain")
        if gap is None:
            return
        yield self.report(
            f"{gap.why}, and lose = {outline.lose} may take them at once",
            context.place("cluster.domain", LOSE, "fault_budget"),
            f"{outline.spread} nodes{context.by('cluster.domain')}",
            labels=context.label(LOSE, f"lose = {outline.lose}"),
            notes=(f"losing {named(gap.nodes)} leaves no copy of {gap.layer}",),
            help=("smaller domains or longer pipelines would do",),
        )

    def _beyond(self, context: Context, domain: CallValue) -> Iterator[Diagnostic]:
        """What the loss of one whole domain would do to a budget that counts nodes."""
        spec, size = context.spec, domain.get("nodes")
        if spec.fault_budget is None or not isinstance(size, int):
            return
        whole = evolve(context, spec=evolve(spec, fault_budget=evolve(spec.fault_budget, unit="domain", lose=1)))
        gap = gap_of(whole, "domain")
        if gap is None:
            return
        yield self.report(
            f"the budget counts nodes; a whole {domain.name} of {size} lost at once may take the last copy of {gap.layer}",
            context.place("cluster.domain"),
            f"{size} nodes{context.by('cluster.domain')}",
            notes=(f"losing {named(gap.nodes)} leaves no copy of {gap.layer}",),
            help=("unit = domain would check for it",),
            severity=Severity.NOTE,
        )


class DomainUnknown(Rule):
    """What it does
        Finds a budget that counts domains where the cluster does not say what a domain is.

    Why it is bad
        How many nodes are lost at once is then not known, and nothing can be promised.

    Example (bad)
        cluster { nodes = 8; ranks_per_node = 2 }
        fault_budget { unit = domain; lose = 1 }

    Better
        cluster { nodes = 8; ranks_per_node = 2; domain = rack(nodes = 4) }
        fault_budget { unit = domain; lose = 1 }

    Fix
        Write `domain = rack(nodes = N)` in the cluster block, or `unit = node`.
    """

    code = "PDL506"
    name = "domain-unknown"
    needs = frozenset({"cluster", "fault_budget"})

    def check(self, context: Context) -> Iterator[Diagnostic]:
        budget = context.spec.fault_budget
        if budget is None or budget.unit != "domain" or context.spec.cluster.domain is not None:
            return
        yield self.report(
            "the budget counts domains, and the cluster does not say which nodes share one",
            context.place("fault_budget.unit", "fault_budget"),
            f"domain{context.by('fault_budget.unit')}",
            help=("write domain = rack(nodes = N) in the cluster block, or unit = node",),
        )


class NoMajority(Rule):
    """What it does
        Warns if so many nodes may be lost at once that the others are no majority.

    Why it is bad
        A node whose process ends or whose connection closes is proven dead, and any number of others go on. A node that only falls silent may live on
        behind a broken network, so the others go on without it only if they are more than half. Else both halves might train on apart.

    Example (bad)
        cluster { nodes = 4; ranks_per_node = 2 }
        fault_budget { lose = 2 }      # two silent nodes leave two

    Better
        cluster { nodes = 5; ranks_per_node = 2 }
        fault_budget { lose = 2 }

    Fix
        None is needed if losses close their connections. Else take more nodes.
    """

    code = "PDL507"
    name = "no-majority"
    severity = Severity.WARNING
    needs = frozenset({"mesh", "cluster", "shard", "pipeline", "fault_budget", "train"})
    needs_mesh = True

    def check(self, context: Context) -> Iterable[Diagnostic]:
        outline = outline_of_spec(context)
        if outline is None or not outline.holds or 2 * outline.lost < outline.nodes:
            return
        most = (outline.nodes - 1) // 2
        yield self.report(
            f"if {outline.lost} of {outline.nodes} nodes fall silent at once, the other {outline.nodes - outline.lost} are no majority and stop",
            context.place(LOSE, "fault_budget"),
            f"{outline.lose}{context.by(LOSE)}",
            labels=context.label("cluster.nodes", plural(outline.nodes, "node")),
            notes=(f"nodes whose processes end or whose connections close do not count as silent; up to {most} silent ones are survived",),
            help=(f"{2 * outline.lost + 1} nodes would do",),
        )
