"""Which part of a parameter a rank holds where a role has several axes, who holds the same, and who sums gradients with whom."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from attrs import evolve

from pdsl.lowering.boxes import box
from pdsl.lowering.holdings import demand, plan_holdings, state_tensors
from pdsl.lowering.ownership import holders, local_bytes, summed_over
from pdsl.lowering.parts import digits, named_axes, part, parts, same_on
from pdsl.lowering.places import MeshAxis
from pdsl.lowering.plan import ParameterLayout, Plan
from pdsl.lowering.transition import transition
from pdsl.lowering.transition_check import check_transition
from tests.moving import apply, index_tensors, local, placed
from tests.moving import part as piece
from tests.plans import facts, rectangular

A, B, C = MeshAxis("a", 2, "tensor"), MeshAxis("b", 3, "tensor"), MeshAxis("c", 2, "tensor")


def test_all_axes_in_their_order_are_named_by_nothing() -> None:
    assert named_axes((A, B), ("a", "b")) == ()
    assert named_axes((A, B), ("b", "a")) == ("b", "a")
    assert named_axes((A, B), ("a", "nothing")) == ("a",)


def test_the_first_named_axis_is_major() -> None:
    found = [part((A, B), ("b", "a"), c, 6) for c in range(6)]
    assert found == [(0, 6), (2, 6), (4, 6), (1, 6), (3, 6), (5, 6)]
    assert [part((A, B), ("b",), c, 6) for c in range(6)] == [(0, 3), (1, 3), (2, 3)] * 2
    assert [part((A, B), (), c, 6) for c in range(6)] == [(c, 6) for c in range(6)]
    assert digits((A, B, C), 7) == {"a": 1, "b": 0, "c": 1}


def test_those_that_agree_on_some_axes_differ_on_the_others() -> None:
    assert same_on((A, B), ("b",), 1, 6) == (1, 4)
    assert same_on((A, B), ("a", "b"), 1, 6) == (1,)
    assert parts((A, B), ("a",), 6) == 2
    assert parts((A, B), (), 6) == 6


# --- plans ----------------------------------------------------------------------------------------------------------------------------


def plan(*layouts: ParameterLayout, shard: tuple[int, ...] = (2, 2), tensor: tuple[int, ...] = (2, 2)) -> Plan:
    """Two pipelines over axes s0, s1 and t0, t1, of which the first weight of the model is laid out as asked for."""
    size_s, size_t = shard[0] * shard[1], tensor[0] * tensor[1]
    base = rectangular(replicas=2, positions=1, shard=size_s, tensor=size_t, microbatches=2, batch=32, model=facts(2))
    axes = tuple(MeshAxis(f"s{i}", n, "shard") for i, n in enumerate(shard)) + tuple(
        MeshAxis(f"t{i}", n, "tensor") for i, n in enumerate(tensor)
    )
    changed = {layout.name: layout for layout in layouts}
    return evolve(base, axes=axes, layouts=tuple(changed.get(layout.name, layout) for layout in base.layouts))


WEIGHT = next(p for p in facts(2).parameters if len(p.shape) == 2 and p.name.endswith("up.weight"))
FORMS = {
    "part of the shard axes": ParameterLayout(WEIGHT.name, sharded=True, tensor_dim=None, style="fsdp(s1)", line=1, shard_axes=("s1",)),
    "part of the tensor axes": ParameterLayout(WEIGHT.name, sharded=True, tensor_dim=0, style="colwise(t0)", line=1, tensor_axes=("t0",)),
    "two dims": ParameterLayout(
        WEIGHT.name, sharded=False, tensor_dim=0, style="[t1, t0]", line=1, tensor_axes=("t1",), second=(1, ("t0",))
    ),
    "other order": ParameterLayout(WEIGHT.name, sharded=True, tensor_dim=1, style="rowwise(t1, t0)", line=1, tensor_axes=("t1", "t0")),
    "all": ParameterLayout(
        WEIGHT.name,
        sharded=True,
        tensor_dim=0,
        style="[t1, t0] + fsdp(s0)",
        line=1,
        shard_axes=("s0",),
        tensor_axes=("t1",),
        second=(1, ("t0",)),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_boxes_cover_a_parameter_and_those_of_holders_are_equal(form: str) -> None:
    made = plan(FORMS[form])
    boxes = {(s, t): box(made, WEIGHT, s, t) for s, t in product(range(4), range(4))}
    cells = {(i, j) for b in boxes.values() for i in range(*b[0]) for j in range(*b[1])}
    assert len(cells) == WEIGHT.numel
    assert sum((b[0][1] - b[0][0]) * (b[1][1] - b[1][0]) for b in set(boxes.values())) == WEIGHT.numel
    for rank in made.ranks:
        at = made.coordinate(rank)
        mine = box(made, WEIGHT, at.shard, at.tensor)
        same = tuple(r for r in made.ranks if box(made, WEIGHT, made.coordinate(r).shard, made.coordinate(r).tensor) == mine)
        assert holders(made, WEIGHT, rank) == same
    assert local_bytes(made, WEIGHT) == max((b[0][1] - b[0][0]) * (b[1][1] - b[1][0]) * 4 for b in boxes.values())


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_summed_over_those_that_saw_other_samples(form: str) -> None:
    """FSDP2 sums over the ranks among which it shards; what is left is every shard coordinate with the same part, in all pipelines."""
    made = plan(FORMS[form])
    layout = made.layout(WEIGHT.name)
    for rank in made.ranks:
        ranks = summed_over(made, WEIGHT, rank)
        assert rank in ranks
        assert {made.coordinate(r).tensor for r in ranks} == {made.coordinate(rank).tensor}
        among = 1 if not layout.sharded else 2 if layout.shard_axes else 4
        assert len(ranks) == 2 * 4 // among


def test_a_gradient_that_is_a_part_on_each_tensor_rank_is_summed_over_them() -> None:
    whole = ParameterLayout(WEIGHT.name, sharded=False, tensor_dim=None, style="replicate()", line=1, summed=("t1",))
    made = plan(whole)
    for rank in made.ranks:
        at = made.coordinate(rank)
        ranks = summed_over(made, WEIGHT, rank)
        assert {made.coordinate(r).tensor for r in ranks} == {at.tensor // 2 * 2, at.tensor // 2 * 2 + 1}
        assert len(ranks) == 2 * 4 * 2
        assert len(holders(made, WEIGHT, rank)) == made.world_size


@pytest.mark.parametrize(("old", "new"), [(a, b) for a in FORMS for b in FORMS if a != b])
def test_state_moves_between_any_two_layouts(old: str, new: str) -> None:
    before, after, kinds = plan(FORMS[old]), plan(FORMS[new]), ("weight", "exp_avg")
    tensors = state_tensors(before, kinds)
    rows, needs = plan_holdings(before, 5, kinds), demand(after, kinds)
    found = transition(rows, needs, tensors, node_of=after.node)
    assert check_transition(found, rows, needs) == ()
    wholes = index_tensors(tensors)
    moved = apply(found, placed(wholes, rows), needs)
    for n in needs:
        assert torch.equal(local(moved, n.owner, n.tensor, n.box), piece(wholes[n.tensor], n.box))
