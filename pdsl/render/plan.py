"""A plan on one screen: who runs what, how parameters lie, the schedule drawn, memory, traffic, and what is worth knowing.

Rows that say the same are one row, so that a plan of a thousand ranks is as long as one of eight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from attrs import frozen

from pdsl.lowering.boxes import box, box_shape
from pdsl.lowering.cost import CostReport, RankMemory, RankTraffic, cost
from pdsl.lowering.facts import ParameterFacts
from pdsl.lowering.mesh import PIPELINE, REPLICA
from pdsl.lowering.ownership import owned_parameters, stages_using
from pdsl.lowering.plan import ParameterLayout, Plan, Sharding
from pdsl.lowering.programs import template_timeline
from pdsl.lowering.proof import prove
from pdsl.lowering.spec import Spec
from pdsl.render.proof import render_proof
from pdsl.render.schedule import draw_schedule
from pdsl.render.search import render_search
from pdsl.render.terminal import (
    PLAIN,
    Terminal,
    bar,
    binary,
    clip,
    count,
    decimal,
    join_list,
    numbers,
    percent,
    plural,
    ranges,
    table,
    wrapped,
)

__all__ = ["plan_notes", "render_plan"]

_MOST_ROWS = 16
_MEMORY = (
    ("parameters", "P", "P params", "blue"),
    ("gradients", "G", "G grads", "green"),
    ("optimizer", "O", "O optim", "magenta"),
    ("activations", "A", "A activ", "yellow"),
    ("transient", "T", "T gathered", "cyan"),
    ("boundary", "B", "B received", "red"),
)
_TRAFFIC = (
    ("all_gather", "all-gather"),
    ("reduce_scatter", "reduce-scatter"),
    ("gradient_sum", "gradient sum"),
    ("tensor", "tensor"),
    ("point_to_point", "point to point"),
)


def render_plan(plan: Plan, *, spec: Spec | None = None, terminal: Terminal = PLAIN) -> str:
    """The screen of a plan as text that ends with a newline.

    With the spec that it came from, patterns are shown beside their lines, and memory beside what a device has.
    """
    report = cost(plan)
    groups = _groups(plan)
    sections = (
        _header(plan, terminal),
        _ranks(plan, groups, terminal),
        _layouts(plan, spec, terminal),
        _schedules(plan, report, terminal),
        _memory(report, spec, terminal),
        _traffic(report, terminal),
        _proof(plan, spec, terminal),
        _notes(plan, terminal),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


# --- header ---------------------------------------------------------------------------------------------------------------------------------


def _header(plan: Plan, terminal: Terminal) -> list[str]:
    facts, job = plan.facts, plan.job
    nodes = len({plan.node(rank) for rank in plan.ranks})
    unequal = len(plan.templates) > 1
    axes = [f"{a.name} {a.size} ({a.role})" for a in plan.axes if not unequal or a.role not in (REPLICA, PIPELINE)]
    if unequal:
        lengths = [str(plan.template(i).positions) for i in range(len(plan.pipelines))]
        axes.insert(
            0, f"{len(lengths)} pipelines of {join_list(lengths)} stages" if len(lengths) <= 6 else f"{len(lengths)} unequal pipelines"
        )
    mesh = " x ".join(axes) or "one rank"
    return [
        terminal.heading(f"{plan.name}: {plural(plan.world_size, 'rank')} on {plural(nodes, 'node')} ({plan.device})")
        + f"   plan {plan.hash[:16]}",
        f"  mesh   {mesh}",
        f"  model  {facts.factory}, {count(facts.numel)} parameters in {plural(len(facts.layers), 'layer')}",
        f"  step   batch {job.batch} = {plural(plan.microbatches, 'microbatch', 'microbatches')} x {plural(plan.rows_per_microbatch, 'sample')}"
        + (f" ({plan.rows_per_rank} on each shard rank)" if plan.shard_size > 1 else "")
        + f", {job.optimizer.name}, {plural(job.steps, 'step')}",
        *_data(plan),
    ]


def _data(plan: Plan) -> list[str]:
    """What is not so by default: a last batch that is not full, held-out data."""
    told = ["a last batch that is not full is taken as it is"] if plan.job.last == "pad" else []
    asked = plan.validation
    if asked is not None:
        which = "all" if asked.samples is None else f"the first {asked.samples}"
        often = "after each step" if asked.every == 1 else f"every {asked.every} steps and at the end"
        told.append(f"held out: {which} of {asked.data.positional[0]}, {often}")
    return [f"  {'' if i else 'data':5}  {line}" for i, line in enumerate(told)]


# --- ranks ----------------------------------------------------------------------------------------------------------------------------------


@frozen
class _Group:
    """Ranks that are told of in one row."""

    ranks: tuple[int, ...]

    @property
    def first(self) -> int:
        return self.ranks[0]


def _groups(plan: Plan) -> list[_Group]:
    """One row a rank while they are few; then one an island; then one for each position of a template."""
    everyone = plan.ranks
    if plan.world_size <= _MOST_ROWS:
        return [_Group((rank,)) for rank in everyone]
    islands = [_Group(tuple(sorted(island))) for p in plan.pipelines for island in p.islands]
    if len(islands) <= _MOST_ROWS:
        return islands
    return [_Group(ranks) for ranks in _gather(everyone, lambda rank: _role(plan, rank))]


def _role(plan: Plan, rank: int) -> tuple[int, int]:
    at = plan.coordinate(rank)
    return plan.pipelines[at.pipeline].template, at.position


def _gather(ranks: Iterable[int], key: Callable[[int], object]) -> list[tuple[int, ...]]:
    """Ranks with the same key together, in the order in which keys first appear."""
    found: dict[object, list[int]] = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return [tuple(group) for group in found.values()]


def _ranks(plan: Plan, groups: Sequence[_Group], terminal: Terminal) -> list[str]:
    rows = [("rank", "node", "pipeline", "stage", "shard", "tensor", "params", "layers", "samples of a step")]
    for group in groups[:_MOST_ROWS]:
        at = [plan.coordinate(rank) for rank in group.ranks]
        held = {
            sum(_numel(plan, p, a.shard, a.tensor) for p in owned_parameters(plan, rank))
            for rank, a in zip(group.ranks[:64], at, strict=False)
        }
        rows.append(
            (
                ranges(group.ranks, 2),
                ranges((plan.node(rank) for rank in group.ranks), 2),
                ranges((a.pipeline for a in at), 3),
                ranges(plan.stages_of(group.first)),
                ranges((a.shard for a in at), 3) if plan.shard_size > 1 else "",
                ranges((a.tensor for a in at), 3) if plan.tensor_size > 1 else "",
                count(max(held)),
                _layers(plan, group.first),
                _samples(plan, group),
            )
        )
    lines = [terminal.heading("ranks"), *table(rows, align=">>>>>>><<", width=terminal.width, elastic=7)]
    return [*lines, *_rest(len(groups))]


def _rest(rows: int) -> list[str]:
    return [f"  .. {plural(rows - _MOST_ROWS, 'row')} more"] if rows > _MOST_ROWS else []


def _numel(plan: Plan, p: ParameterFacts, shard: int, tensor: int) -> int:
    total = 1
    for size in box_shape(box(plan, p, shard, tensor)):
        total *= size
    return total


def _layers(plan: Plan, rank: int) -> str:
    """The layers of a rank, a run as `first .. last`."""
    layers = plan.facts.layers
    stages = plan.template(plan.coordinate(rank).pipeline).stages
    runs = []
    for index in plan.stages_of(rank):
        names = [layer.name for layer in layers[stages[index].start : stages[index].stop]]
        runs.append(", ".join(names) if len(names) <= 2 else f"{names[0]} .. {names[-1]} ({len(names)})")
    return "; ".join(runs)


def _samples(plan: Plan, group: _Group) -> str:
    """Which samples of the global batch a row computes in one step, numbered from 0 in the order of the data."""
    numbers_: set[int] = set()
    for rank in group.ranks:
        at = plan.coordinate(rank)
        for m in plan.pipelines[at.pipeline].microbatches:
            first = m * plan.rows_per_microbatch + at.shard * plan.rows_per_rank
            numbers_.update(range(first, first + plan.rows_per_rank))
    return f"{len(numbers_)}: {ranges(numbers_, 3)}"


# --- layouts --------------------------------------------------------------------------------------------------------------------------------


def _layouts(plan: Plan, spec: Spec | None, terminal: Terminal) -> list[str]:
    patterns = _patterns(spec)
    found: dict[tuple[int, str], list[ParameterLayout]] = {}
    for layout in plan.layouts:
        found.setdefault((layout.line, layout.style), []).append(layout)
    total = max(1, plan.facts.numel)
    rows = [("line", "pattern", "layout", "tensors", "share", "one of them")]
    for (line, style), layouts in sorted(found.items(), key=lambda item: item[0]):
        parameters = [plan.facts.parameter(layout.name) for layout in layouts]
        largest = max(parameters, key=lambda p: p.numel)
        share = Fraction(sum(p.numel for p in parameters), total)
        rows.append(
            (
                str(line) if line else "-",
                patterns.get(line, ""),
                style,
                str(len(layouts)),
                percent(share),
                f"{_split(plan, largest)} {largest.name}",
            )
        )
    lines = [terminal.heading("layouts"), *table(rows[: _MOST_ROWS + 1], align=">  >>", width=terminal.width, elastic=5)]
    return [*lines, *_rest(len(rows) - 1)]


def _patterns(spec: Spec | None) -> dict[int, str]:
    if spec is None:
        return {}
    return {rule.span.begin.line: clip(", ".join(str(p) for p in rule.patterns), 34) for rule in spec.shard}


def _split(plan: Plan, p: ParameterFacts) -> str:
    local = box_shape(box(plan, p, 0, 0))
    whole = numbers(p.shape)
    return whole if local == p.shape else f"{whole} -> {numbers(local)}"


# --- schedule -------------------------------------------------------------------------------------------------------------------------------


def _schedules(plan: Plan, report: CostReport, terminal: Terminal) -> list[str]:
    lines = [terminal.heading("schedule")]
    for index, template in enumerate(plan.templates):
        schedule = template.schedule
        used = [i for i, p in enumerate(plan.pipelines) if p.template == index]
        where = f"{'pipeline' if len(used) == 1 else 'pipelines'} {ranges(used)}: " if len(plan.pipelines) > 1 else ""
        counts = f"{plural(schedule.positions, 'position')}, {plural(schedule.microbatches, 'microbatch', 'microbatches')}"
        lines.append(f"  {where}{schedule.name}, {counts}, bubble {percent(report.templates[index].bubble)}")
        lines += draw_schedule(schedule, template_timeline(plan, template), terminal)
        lines += render_search(template.search, terminal) if template.search is not None else []
    slower = report.step_time / report.ideal if report.ideal else Fraction(1)
    transfers = "as slow as the schedule says" if any(t.search is not None and t.search.hop for t in plan.templates) else "free"
    waits = f"; all ranks together idle {percent(report.bubble)}" if len(plan.templates) > 1 else ""
    return [
        *lines,
        *wrapped(
            f"modelled step: {decimal(slower)} x the work spread evenly{waits} (backward = 2 x forward, transfers {transfers})",
            terminal.width,
            "  ",
        ),
    ]


# --- memory and traffic ---------------------------------------------------------------------------------------------------------------------


def _memory(report: CostReport, spec: Spec | None, terminal: Terminal) -> list[str]:
    by_rank = {m.rank: m for m in report.memory}
    groups = _gather(by_rank, lambda rank: _figures(by_rank[rank]))
    device = spec.cluster.memory if spec is not None else None
    full = max([m.total for m in report.memory] + ([device] if device else []))
    head = ("rank", "total", *(label for _, _, label, _ in _MEMORY), "")
    rows = [head]
    for ranks in groups[:_MOST_ROWS]:
        m = by_rank[ranks[0]]
        values = [int(getattr(m, name)) for name, *_ in _MEMORY]
        rows.append((ranges(ranks, 2), binary(m.total), *(binary(v) if v else "" for v in values), ""))
    plain = table(rows, align=">>>>>>>>", width=terminal.width)
    room = min(24, terminal.width - max(map(len, plain)) - 2)
    lines = [plain[0]]
    for ranks, line in zip(groups, plain[1:], strict=False):
        m = by_rank[ranks[0]]
        drawn = _painted_bar(m, full, room, terminal) if room >= 8 else ""
        lines.append(f"{line:<{max(map(len, plain))}}  {drawn}".rstrip())
    limit = f" of {binary(device)} on a device" if device else ""
    return [terminal.heading("memory") + f" at the peak of a step{limit}", *lines, *_rest(len(groups))]


def _painted_bar(m: RankMemory, full: int, width: int, terminal: Terminal) -> str:
    text = bar([(int(getattr(m, name)), letter) for name, letter, *_ in _MEMORY], full, width)
    return "".join(terminal.paint(letter * text.count(letter), colour) for _, letter, _, colour in _MEMORY)


def _figures(entry: RankMemory | RankTraffic) -> tuple[int, ...]:
    names = [name for name, *_ in (_MEMORY if isinstance(entry, RankMemory) else _TRAFFIC)]
    return tuple(int(getattr(entry, name)) for name in names)


def _traffic(report: CostReport, terminal: Terminal) -> list[str]:
    by_rank = {t.rank: t for t in report.traffic}
    if not any(t.total for t in report.traffic):
        return [terminal.heading("traffic") + ": none, ranks exchange nothing but the loss"]
    groups = _gather(by_rank, lambda rank: _figures(by_rank[rank]))
    rows = [("rank", "total", *(label for _, label in _TRAFFIC))]
    for ranks in groups[:_MOST_ROWS]:
        t = by_rank[ranks[0]]
        values = [int(getattr(t, name)) for name, _ in _TRAFFIC]
        rows.append((ranges(ranks, 2), binary(t.total), *(binary(v) if v else "" for v in values)))
    lines = [terminal.heading("traffic") + " sent in a step", *table(rows, align=">>>>>>>", width=terminal.width)]
    return [*lines, *_rest(len(groups))]


# --- fault budget ---------------------------------------------------------------------------------------------------------------------------


def _proof(plan: Plan, spec: Spec | None, terminal: Terminal) -> list[str]:
    proof = prove(plan, spec.cluster.memory if spec is not None else None)
    return render_proof(plan, proof, terminal) if proof is not None else []


# --- notes ----------------------------------------------------------------------------------------------------------------------------------


def plan_notes(plan: Plan) -> tuple[str, ...]:
    """What a reader of a plan should know: what is not executed, tied parameters, warnings of the model, lopsided layers."""
    notes = [f"not executed: {text}" for text in plan.pending]
    notes += _gathering(plan)
    notes += [_tied(plan, p) for p in plan.facts.parameters if p.aliases or len(p.layers) > 1]
    notes += [
        f"{layer} holds {percent(share)} of the parameters that are gathered: cutting it finer would lower the peak"
        for layer, share in _heavy(plan)
    ]
    if plan.frozen_layers:
        notes.append(f"the first {plural(plan.frozen_layers, 'layer')} are frozen: no backward pass reaches them")
    notes += plan.facts.warnings
    return tuple(notes)


def _gathering(plan: Plan) -> list[str]:
    """How units are gathered and reduced, where that is not what is done by default."""
    asked, pipelined = plan.sharding, any(t.positions > 1 for t in plan.templates)
    if plan.shard_size == 1 or asked == Sharding(reshard=not pipelined):
        return []
    units = f"units of {asked.group} blocks" if asked.group > 1 else "units"
    when = f"are gathered for each forward and each backward, {asked.prefetch} ahead" if asked.reshard else "stay whole for the step"
    return [f"{units} {when}; gradients are reduced after {'each' if asked.every else 'the last'} microbatch"]


def _tied(plan: Plan, p: ParameterFacts) -> str:
    names = join_list([p.name, *p.aliases]) if p.aliases else p.name
    what = f"{names} are one parameter" if p.aliases else f"{names} is used by {plural(len(p.layers), 'layer')}"
    apart = [i for i in range(len(plan.pipelines)) if len({plan.template(i).stages[s].position for s in stages_using(plan, i, p)}) > 1]
    if not apart:
        return f"{what}, held once on each rank that uses it"
    stages = join_list([str(s) for s in stages_using(plan, apart[0], p)])
    where = "" if len(plan.pipelines) == 1 else f" of pipeline {ranges(apart)}"
    return f"{what} in stages {stages}{where}: each holds a copy, and their gradients are summed"


def _heavy(plan: Plan) -> list[tuple[str, Fraction]]:
    """Layers with more than half of all parameters that are sharded, where there are several."""
    if plan.shard_size == 1 or len(plan.facts.layers) < 3:
        return []
    sizes = {p.name: p.numel for p in plan.facts.parameters if plan.layout(p.name).sharded}
    total = sum(sizes.values())
    if not total:
        return []
    shares = [(layer.name, Fraction(sum(sizes.get(name, 0) for name in layer.parameters), total)) for layer in plan.facts.layers]
    return [(name, share) for name, share in shares if share > Fraction(1, 2)]


def _notes(plan: Plan, terminal: Terminal) -> list[str]:
    notes = plan_notes(plan)
    if not notes:
        return []
    lines = [terminal.heading("notes")]
    for note in notes[:_MOST_ROWS]:
        lines += wrapped(note, terminal.width)
    return [*lines, *_rest(len(notes))]
