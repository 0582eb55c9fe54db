"""The proof of a budget against an enumeration of every set of nodes that may be lost."""

from __future__ import annotations

import itertools

import pytest

from pdsl.grammar.errors import PlanError
from pdsl.grammar.source import Source
from pdsl.lowering.check import check
from pdsl.lowering.cost import cost, peak_memory
from pdsl.lowering.deadlines import deadlines
from pdsl.lowering.instantiate import instantiate
from pdsl.lowering.plan import Plan
from pdsl.lowering.planner import plan
from pdsl.lowering.promise import Outline, Remedy, in_words
from pdsl.lowering.proof import plan_over, prove
from tests.facts import FACTS
from tests.lowering.test_elastic import planned, text


def unchecked(facts=FACTS["gpt"], lose: int = 1, domain: int = 1, **options) -> Plan:
    """A plan without the rules, so that proofs that fail can be seen to fail."""
    from attrs import evolve

    found = check(Source("job.pdsl", text(budget="", **options)), facts=facts)
    assert found.spec is not None, [d.message for d in found.diagnostics]
    made = plan(found.spec, facts, found.mesh)
    assert made.budget is not None
    return evolve(made, budget=evolve(made.budget, lose=lose, domain=domain))


def copies_left(made: Plan, lost: frozenset[int]) -> dict[str, int]:
    """For each parameter how many islands that hold it have lost no rank, counted from the plan alone."""
    found = {}
    for p in made.facts.parameters:
        islands = {
            pipeline.islands[s.position]
            for index, pipeline in enumerate(made.pipelines)
            for s in made.template(index).stages
            if any(s.start <= layer < s.stop for layer in p.layers)
        }
        found[p.name] = sum(not lost & {made.node(r) for r in island} for island in islands)
    return found


def survives(made: Plan, lost: frozenset[int]) -> bool:
    """Whether a loss leaves every parameter somewhere and a plan that uses every node that is left."""
    if min(copies_left(made, lost).values()) == 0:
        return False
    try:
        found = instantiate(made.budget, made.facts, len(made.nodes) - len(lost), made.microbatches)
    except PlanError:
        return False
    return sum(c for _, c in found) == made.microbatches


def sets(made: Plan):
    lose, domain = made.budget.lose, made.budget.domain
    if domain > 1:
        racks = sorted({n // domain for n in made.nodes})
        for units in itertools.chain.from_iterable(itertools.combinations(racks, k) for k in range(lose + 1)):
            yield frozenset(n for n in made.nodes if n // domain in units)
        return
    for lost in itertools.chain.from_iterable(itertools.combinations(made.nodes, k) for k in range(lose + 1)):
        yield frozenset(lost)


def test_the_proof_agrees_with_every_set_of_lost_nodes_of_small_clusters():
    counted = {True: 0, False: 0}
    looked_at = 0
    ranges = [(1, 2), (1, 3), (2, 3), (2, 4), (3, 4), (3, 5), (4, 6)]
    for nodes, (low, high), lose in itertools.product(range(2, 13), ranges, range(1, 4)):
        options = {
            "cluster": f"nodes = {nodes}; ranks_per_node = 1",
            "axes": ("dp = rest", f"pp = {low} to {high}"),
            "schedule": "gpipe(microbatches = 4)",
            "batch": 8 * 27720,  # 27720 divides by every count of pipelines
        }
        found = check(Source("job.pdsl", text(budget="", **options)))
        if found.mesh is None or found.mesh.sizing is None:
            continue
        made = unchecked(lose=lose, **options)
        proof = prove(made)
        every = [survives(made, lost) for lost in sets(made)]
        looked_at += len(every)
        assert proof.holds == all(every), (nodes, low, high, lose)
        for gap in proof.gaps:
            assert len(gap.nodes) <= lose
            assert not survives(made, frozenset(gap.nodes)), gap
        counted[proof.holds] += 1
    assert min(counted.values()) > 20
    assert looked_at > 5000
    print(f"\n{looked_at} sets of lost nodes in {sum(counted.values())} clusters")


@pytest.mark.parametrize(("nodes", "domain"), [(6, 3), (8, 2), (8, 4), (9, 3), (5, 4)])
def test_domains_are_lost_whole(nodes, domain):
    made = unchecked(
        domain=domain, cluster=f"nodes = {nodes}; ranks_per_node = 1", axes=("dp = rest", "pp = 1 to 4"), batch=4 * 5 * 7 * 9 * 8
    )
    lost = list(sets(made))
    lost += [frozenset(itertools.islice(made.nodes, k)) for k in range(domain)]  # a part of a domain may be lost too
    assert prove(made).holds == all(survives(made, s) for s in lost)


def test_what_is_said_of_five_nodes():
    made = planned()
    proof = prove(made, 2**30)
    assert (proof.holds, proof.renewed, proof.losses_until_broken, proof.outline.losses_until_stopped, proof.silent) == (
        True,
        True,
        2,
        4,
        2,
    )
    assert [c.what for c in proof.claims] == ["state survives", "no node idles", "same batch", "memory"]
    assert [(b.node, b.pipeline, b.copies_left, b.microbatches) for b in proof.blasts] == [
        (n, int(n >= 2), 1, len(made.pipelines[int(n >= 2)].microbatches)) for n in range(5)
    ]
    assert [run for b in proof.blasts[:2] for run in b.layers] == [(s.start, s.stop) for s in made.budget.cut(2)]


def test_shards_of_a_pipeline_are_one_copy():
    made = unchecked(cluster="nodes = 2; ranks_per_node = 4", axes=("pp = 1 to 2", "fsdp = 4"), batch=16)
    proof = prove(made)
    assert [g.kind for g in proof.gaps] == ["state"]
    assert proof.gaps[0].nodes == (0,)
    assert proof.gaps[0].layer == "tok"


def test_tied_layers_count_on_every_stage_that_holds_them():
    made = unchecked(FACTS["gpt_tied"], cluster="nodes = 4; ranks_per_node = 1", axes=("dp = 2", "pp = 2 to 3"), batch=32)
    held = copies_left(made, frozenset())
    assert (held["tok.weight"], held["layers.0.attn.wq.weight"]) == (4, 2)
    assert prove(made).claims[0].why == "every layer is whole on at least 2 nodes; 2 would do"


def test_memory_of_a_later_plan_is_a_gap_with_the_loss_that_leads_to_it():
    made = unchecked(cluster="nodes = 5; ranks_per_node = 2", axes=("dp = rest", "pp = 2 to 3", "fsdp = 2"), batch=48)
    needs = {n: max(m.total for m in cost(plan_over(made, n)).memory) for n in (5, 4)}
    assert prove(made, max(needs.values())).holds
    gap = prove(made, max(needs.values()) - 1).gaps[0]
    assert gap.kind == "memory"
    assert "a rank needs" in gap.why


def test_the_promise_in_numbers_names_what_would_do():
    outline = Outline(nodes=8, least=3, count=2, lose=2, microbatches=64)
    assert (outline.holds, outline.needed, outline.most_lost) == (False, 9, 1)
    assert list(outline.remedies()) == [Remedy("lose", 1), Remedy("nodes", 9), Remedy("low", 2)]
    gap = Outline(nodes=8, least=4, count=2, lose=1, microbatches=64)
    assert (gap.survives, gap.idle) == (True, (7, 5))
    assert list(gap.remedies()) == [Remedy("nodes", 9), Remedy("low", 3), Remedy("high", 7)]


def test_every_remedy_does_and_nothing_smaller_would():
    from attrs import evolve

    for nodes, least, count, lose in itertools.product(range(2, 14), range(1, 6), range(1, 4), range(1, 4)):
        outline = Outline(nodes, least, count, lose, 64)
        if outline.holds:
            continue

        def changed(what, value, outline=outline):
            if what in ("lose", "nodes"):
                return evolve(outline, **{what: value})
            low, high = (value, outline.largest) if what == "low" else (outline.least, value)
            return evolve(outline, least=low, count=high - low + 1)

        steps = {"lose": -1, "nodes": 1, "low": -1, "high": 1}
        start = {"lose": lose, "nodes": nodes, "low": least, "high": outline.largest}
        for remedy in outline.remedies():
            assert changed(remedy.what, remedy.value).holds
            between = range(start[remedy.what] + steps[remedy.what], remedy.value, steps[remedy.what])
            assert not any(changed(remedy.what, v).holds for v in between)


def test_a_plan_without_a_budget_has_no_proof():
    assert prove(planned(axes=("dp = rest", "pp = 1", "fsdp = 2"), budget="", batch=40)) is None


def test_deadlines_fire_in_one_order_and_scale_with_the_silence():
    for silence in (0.5, 3.0, 30.0, 300.0):
        seconds = [d.seconds for d in deadlines(silence)]
        assert seconds == sorted(seconds)
        assert seconds[1] * 10 == pytest.approx(silence)
        assert seconds[-1] == pytest.approx(3.3 * silence)


def test_bytes_in_words():
    assert [in_words(n) for n in (17, 2048, 3 * 2**20, 5 * 2**40)] == ["17 B", "2.0 KiB", "3.0 MiB", "5.0 TiB"]


@pytest.mark.parametrize("axes", [("dp = rest", "pp = 2 to 3", "fsdp = 2"), ("dp = rest", "pp = 1 to 3", "fsdp = 2")])
def test_the_peak_is_that_of_the_whole_report(axes):
    made = unchecked(FACTS["gpt_tied"], axes=axes, batch=80 if "1 to" in axes[1] else 48)
    assert peak_memory(made) == max(m.total for m in cost(made).memory)
