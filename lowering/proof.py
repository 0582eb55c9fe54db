"""The proof of a fault budget: what is promised for a plan, why it holds, or a set of nodes for which it fails.

The promise: whichever set of at most `lose` nodes (or domains) is lost at once, the run goes on in place, with every surviving node, on the same
batch, reading nothing from disk. Whether it holds for every such set follows from a few counts; the tests compare them with an enumeration of all
sets. It looks at the plan alone, and at the memory of a device if it is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from attrs import evolve, field, frozen

from pdsl.grammar.errors import PlanError
from pdsl.lowering.cost import peak_memory
from pdsl.lowering.deadlines import Deadline, deadlines
from pdsl.lowering.facts import ParameterFacts
from pdsl.lowering.instantiate import instantiate
from pdsl.lowering.ownership import stages_using
from pdsl.lowering.plan import Budget, Pipeline, Plan
from pdsl.lowering.promise import Outline, Remedy, in_words
from pdsl.lowering.templates import template_of

__all__ = ["Blast", "Claim", "Gap", "Proof", "holders_of", "outline_of", "plan_over", "prove"]


@frozen
class Claim:
    """One part of the promise and why it holds."""

    what: str
    why: str


@frozen
class Gap:
    """One part of the promise that does not hold: `kind` is state, idle, stop, memory or domain, `nodes` a set whose loss shows it, `layer` what is then
    missing (or empty), `why` the fact in words, `remedies` single changes that would do.
    """

    kind: str
    nodes: tuple[int, ...]
    layer: str
    why: str
    remedies: tuple[Remedy, ...] = ()


@frozen
class Blast:
    """What the loss of one node takes along: the layers [start, stop) in runs, the pipeline that it breaks, the microbatches that have to run again
    elsewhere, and how many copies are left of the layer that has fewest.
    """

    node: int
    pipeline: int
    layers: tuple[tuple[int, int], ...]
    microbatches: int
    copies_left: int


@frozen(slots=False)
class Proof:
    """What is promised and why. `claims` hold; `gaps` do not. `lose` counts units of `domain` nodes each."""

    lose: int
    domain: int
    nodes: int
    outline: Outline
    claims: tuple[Claim, ...]
    gaps: tuple[Gap, ...]
    blasts: tuple[Blast, ...]
    deadlines: tuple[Deadline, ...] = field(default=())

    @property
    def holds(self) -> bool:
        return not self.gaps

    @cached_property
    def losses_until_broken(self) -> int:
        """Losses one by one, with a new plan after each, until the promise ends."""
        return self.outline.losses_until_broken

    @property
    def renewed(self) -> bool:
        """Whether the promise holds again after any loss that it covers. Of domains that depends on where the next plan puts its copies."""
        return self.holds and self.domain == 1 and self.losses_until_broken > self.outline.lost

    @property
    def silent(self) -> int:
        """How many nodes may fall silent at once, without a closed connection to prove it: the rest must be a majority to go on without them."""
        return (self.nodes - 1) // 2


def prove(plan: Plan, memory: int | None = None) -> Proof | None:
    """The proof for a plan, or None if it has no budget. `memory` are the bytes of one device, if they are known."""
    budget = plan.budget
    if budget is None:
        return None
    outline = outline_of(plan, budget)
    held = _holders(plan)
    findings = (_state(plan, budget, outline, held), _use(plan, outline), _batch(plan, outline), _memory(plan, budget, outline, memory))
    flat = [f for f in findings if f is not None]
    return Proof(
        lose=budget.lose,
        domain=budget.domain,
        nodes=len(plan.nodes),
        outline=outline,
        claims=tuple(f for f in flat if isinstance(f, Claim)),
        gaps=tuple(f for f in flat if isinstance(f, Gap)),
        blasts=_blasts(plan, held),
        deadlines=deadlines(plan.silence),
    )


def outline_of(plan: Plan, budget: Budget) -> Outline:
    """The counts of a plan on which its promise rests."""
    return Outline(len(plan.nodes), budget.least, len(budget.cuts), budget.lose, plan.microbatches, budget.domain)


# --- state ------------------------------------------------------------------------------------------------------------------------------------------

_Holders = tuple[tuple[ParameterFacts, frozenset[int]], ...]


def holders_of(plan: Plan, parameter: ParameterFacts) -> frozenset[int]:
    """Nodes that hold a whole copy of a parameter. The shards of one island are one copy; a tied parameter is held by every stage that uses it."""
    found = set()
    for index, pipeline in enumerate(plan.pipelines):
        stages = plan.template(index).stages
        for s in stages_using(plan, index, parameter):
            island = pipeline.islands[stages[s].position]
            nodes = {plan.node(rank) for rank in island}
            found |= nodes if len(nodes) == 1 else set()  # an island over several nodes is gone with any of them
    return frozenset(found)


def _holders(plan: Plan) -> _Holders:
    alike: dict[tuple[int, ...], frozenset[int]] = {}
    for p in plan.facts.parameters:
        if p.layers not in alike:
            alike[p.layers] = holders_of(plan, p)
    return tuple((p, alike[p.layers]) for p in plan.facts.parameters)


def _state(plan: Plan, budget: Budget, outline: Outline, held: _Holders) -> Claim | Gap | None:
    """Every parameter on more units than may be lost."""
    if not budget.lose or not held:
        return None
    p, nodes = min(held, key=lambda entry: len(_units(entry[1], budget.domain)))
    units = _units(nodes, budget.domain)
    layer = plan.facts.layers[p.layers[0]].name
    if len(units) > budget.lose:
        where = (
            f"on at least {_count(len(units), 'node')}"
            if budget.domain == 1
            else f"in at least {len(units)} domains of {budget.domain} nodes"
        )
        return Claim("state survives", f"every layer is whole {where}; {budget.lose + 1} would do")
    victims = tuple(n for n in plan.nodes if n // budget.domain in units)
    if budget.domain > 1:
        told = f"all copies of {layer} are in {_count(len(units), 'domain')} of {budget.domain} nodes"
        return Gap("domain", victims, layer, told, tuple(outline.remedies()))
    return Gap("state", tuple(sorted(nodes)), layer, f"{layer} is whole on {_count(len(nodes), 'node')} only", tuple(outline.remedies()))


def _units(nodes: Iterable[int], domain: int) -> frozenset[int]:
    return frozenset(n // domain for n in nodes)


# --- use, batch, memory -----------------------------------------------------------------------------------------------------------------------------


def _use(plan: Plan, outline: Outline) -> Claim | Gap:
    idle = outline.idle
    sizes = f"{outline.least}" if outline.count == 1 else f"{outline.least} to {outline.largest}"
    if idle is None:
        totals = [str(n) for n in range(outline.nodes, outline.nodes - outline.lost - 1, -1)]
        return Claim("no node idles", f"{_listed(totals)} nodes are sums of pipelines of {sizes}")
    left, used = idle
    victims = plan.nodes[: outline.nodes - left]
    if not used:
        return Gap("stop", victims, "", f"{_count(left, 'node')} are left, and a pipeline needs {outline.least}", tuple(outline.remedies()))
    return Gap(
        "idle",
        victims,
        "",
        f"of {_count(left, 'node')} only {used} can be used by pipelines of {sizes}: {left - used} would idle",
        tuple(outline.remedies()),
    )


def _batch(plan: Plan, outline: Outline) -> Claim:
    most = min(outline.nodes // outline.least, plan.microbatches)
    return Claim(
        "same batch",
        f"{_count(plan.microbatches, 'microbatch')} of {_count(plan.rows_per_microbatch, 'sample')} are whole for every count of pipelines up to {most}",
    )


def plan_over(plan: Plan, nodes: int) -> Plan:
    """The plan as it would be over the first `nodes` nodes, whoever they are. Raises PlanError if they cannot all be used."""
    budget = plan.budget
    if budget is None:
        raise PlanError(f"{plan.name} has no budget, so there is no other plan")
    size = plan.shard_size * plan.tensor_size
    shapes = instantiate(budget, plan.facts, nodes, plan.microbatches)
    kinds = tuple(dict.fromkeys(shapes))
    pipelines, first, node = [], 0, 0
    for count, microbatches in shapes:
        begin = node * plan.ranks_per_node
        islands = tuple(tuple(range(a, a + size)) for a in range(begin, begin + count * plan.ranks_per_node, size))
        pipelines.append(Pipeline(kinds.index((count, microbatches)), islands, tuple(range(first, first + microbatches))))
        first, node = first + microbatches, node + count
    templates = tuple(template_of(budget, count, microbatches, plan.job.accumulate) for count, microbatches in kinds)
    return evolve(plan, templates=templates, pipelines=tuple(pipelines))


def _memory(plan: Plan, budget: Budget, outline: Outline, memory: int | None) -> Claim | Gap | None:
    """The peak of every plan that the losses may lead to, and of re-routing, where fewer pipelines run all microbatches."""
    if memory is None or outline.idle is not None:
        return None
    worst, at = 0, 0
    for lost in range(outline.lost + 1):
        need = peak_memory(plan_over(plan, outline.nodes - lost))
        if need > worst:
            worst, at = need, lost
    if "reroute" in budget.recover and outline.lost:
        whole = max(1, len(plan.pipelines) - outline.lost)
        need = peak_memory(_crowded(plan, budget, -(-plan.microbatches // whole)))
        worst, at = (need, outline.lost) if need > worst else (worst, at)
    if worst > memory:
        told = f"a rank needs {in_words(worst)}, and a device has {in_words(memory)}"
        return Gap("memory", plan.nodes[:at], "", f"with {_count(outline.nodes - at, 'node')} left {told}" if at else told)
    return Claim("memory", f"no rank needs more than {in_words(worst)} of {in_words(memory)}, whatever is lost")


def _crowded(plan: Plan, budget: Budget, microbatches: int) -> Plan:
    """The plan with every pipeline at the most microbatches that re-routing may give it."""
    sizes = [len(p.islands) // plan.islands_per_node for p in plan.pipelines]
    kinds = tuple(dict.fromkeys(sizes))
    templates = tuple(template_of(budget, nodes, microbatches, plan.job.accumulate) for nodes in kinds)
    crowd = tuple(range(microbatches))
    pipelines = tuple(evolve(p, template=kinds.index(n), microbatches=crowd) for p, n in zip(plan.pipelines, sizes, strict=True))
    return evolve(plan, templates=templates, pipelines=pipelines)


# --- blast radius -----------------------------------------------------------------------------------------------------------------------------------


def _blasts(plan: Plan, held: _Holders) -> tuple[Blast, ...]:
    """One entry a node."""
    copies = [len(plan.pipelines)] * len(plan.facts.layers)
    for p, nodes in held:
        for layer in p.layers:
            copies[layer] = min(copies[layer], len(nodes))
    found = []
    for index, pipeline in enumerate(plan.pipelines):
        runs: dict[int, list[tuple[int, int]]] = {}
        for s in plan.template(index).stages:
            for node in sorted({plan.node(rank) for rank in pipeline.islands[s.position]}):
                runs.setdefault(node, []).append((s.start, s.stop))
        for node, own in runs.items():
            least = min(copies[layer] for start, stop in own for layer in range(start, stop))
            found.append(Blast(node, index, _joined(own), len(pipeline.microbatches), least - 1))
    return tuple(sorted(found, key=lambda b: (b.node, b.pipeline)))


def _joined(runs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


# --- words ------------------------------------------------------------------------------------------------------------------------------------------


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}{'es' if word.endswith('ch') else 's'}"


def _listed(words: list[str]) -> str:
    if len(words) > 6:
        words = [*words[:2], "...", words[-1]]
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
