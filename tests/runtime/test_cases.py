"""Numbers of public bug reports about scale, norms and losses. Each was silently wrong somewhere; here is the right value.

The small model is four Linear(8, 8) from seed 0 on eight rows from seed 1, targets zero, mean squared error: loss 0.0867.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from torch import nn

import pdsl
from pdsl.lowering.plan import Plan
from pdsl.lowering.programs import program
from pdsl.runtime.local import local_tensor
from pdsl.runtime.session import Session
from pdsl.runtime.verify import assemble, compare, oracle, verify_rank
from tests.pool import Pool
from tests.user_models import four_linears, four_linears_rows, masked_square, two_linears, two_linears_rows

SPEC = """pdsl 1
mesh {{ {axes} }}
cluster {{ device = cpu }}
model "{module}:{model}" {{ {arguments} }}
{blocks}
train {{
  data = source("{module}:{model}_rows")
  objective = {objective}
  batch = {batch}
  steps = 4
  optimizer = sgd(lr = 1e-1)
  seed = 0
  {train}
}}
"""

WEIGHT_NORMS = (0.08546, 0.15083, 0.12890, 0.14651)
MICROBATCH_LOSSES = (0.1016, 0.1004, 0.0548, 0.0901)


def spec(
    axes: str,
    *,
    blocks: str = "",
    train: str = "",
    model: str = "four_linears",
    arguments: str = "",
    objective: str = "mse",
    batch: int = 8,
    module: str = "tests.user_models",
) -> str:
    return SPEC.format(
        axes=axes, blocks=blocks, train=train, model=model, arguments=arguments, objective=objective, batch=batch, module=module
    )


def compiled(axes: str, **options: Any) -> Plan:
    return pdsl.compile(pdsl.load(spec(axes, **options)))


def pipelined(microbatches: int, schedule: str = "gpipe") -> str:
    return f"pipeline over pp {{ schedule = {schedule}(microbatches = {microbatches}) }}"


def _rank(rank: int, world: int, store: Any, plan: str, steps: int) -> dict[str, Any]:
    return verify_rank(Plan.from_json(plan), rank, store, steps=steps)


def reports(pool: Pool, plan: Plan, steps: int = 1) -> list[dict[str, Any]]:
    return pool.run(_rank, plan.world_size, plan.to_json(), steps)


def _given_rows(rank: int, world: int, store: Any, plan: str, x: torch.Tensor) -> dict[str, Any]:
    """One step on the given rows, in their order; what the rank holds of gradients and weights."""
    gradients: dict[str, torch.Tensor] = {}
    with Session(Plan.from_json(plan), rank, store) as session:
        session.on_gradients = lambda found: gradients.update({n: g.clone() for n, g in found.items()})
        result = session.step({"x": x, "target": torch.zeros(len(x))})
        return {"norm": result.grad_norm, "gradients": gradients, "weights": {n: t.clone() for n, t in session.weights.items()}}


def weight_norms(plan: Plan, ranks: list[dict[str, Any]]) -> list[float]:
    gradients = assemble(plan, ranks).gradients[0]
    return [float(gradients[f"{i}.weight"].norm()) for i in range(4)]


def reference(max_norm: float = float("inf")) -> tuple[float, list[float], float]:
    """Loss, norms of the weights' gradients, and the global norm, by plain torch."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = four_linears()
    data = four_linears_rows().rows(range(8))
    loss = nn.functional.mse_loss(model(data["x"]), data["target"])
    loss.backward()
    norms = [float(layer.weight.grad.norm()) for layer in model]  # type: ignore[union-attr,operator]
    return loss.item(), norms, float(nn.utils.clip_grad_norm_(model.parameters(), max_norm))


def test_the_reference_is_that_of_the_reports() -> None:
    loss, norms, _ = reference()
    assert loss == pytest.approx(0.0867, abs=5e-5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = four_linears()
    rows = four_linears_rows().columns["x"]
    parts = [model(x).square().mean().item() for x in rows.chunk(4)]
    assert parts == pytest.approx(MICROBATCH_LOSSES, abs=5e-5)
    assert loss == pytest.approx(sum(parts) / 4, rel=1e-6)
    assert norms == pytest.approx(WEIGHT_NORMS, abs=5e-6)


def test_case_39_every_rank_reports_the_loss_of_the_last_stage(pool: Pool) -> None:
    plan = compiled("axis pp = 2", blocks=pipelined(4))
    for rank in reports(pool, plan):
        assert rank["losses"] == [pytest.approx(0.0867, abs=5e-5)]
        assert rank["losses"] == [pytest.approx(reference()[0], rel=1e-6)]


def test_case_24_the_schedule_places_the_stages_in_a_loop(pool: Pool) -> None:
    plan = compiled("axis pp = 2", blocks="pipeline over pp { schedule = interleaved_1f1b(microbatches = 4, virtual = 2) }")
    assert [plan.stages_of(rank) for rank in range(2)] == [(0, 2), (1, 3)]
    assert weight_norms(plan, reports(pool, plan)) == pytest.approx(WEIGHT_NORMS, abs=5e-6)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_case_47_rounds_of_accumulation_do_not_scale_what_was_there(pool: Pool, accumulate: int) -> None:
    plan = compiled("axis pp = 2", blocks=pipelined(2), train=f"accumulate = {accumulate}")
    assert weight_norms(plan, reports(pool, plan)) == pytest.approx(WEIGHT_NORMS, abs=5e-6)


@pytest.mark.parametrize(("loss", "scale"), [("sum", 1), ("mean(over = samples)", 8)])
def test_case_47_two_rounds_are_0_1897_and_not_0_1356(pool: Pool, loss: str, scale: int) -> None:
    first, second = 0.07213, 0.11757  # gradients of the two rounds, each over four microbatches of one row
    assert first + second == pytest.approx(0.1897, abs=5e-5)
    assert first / 4 + second == pytest.approx(0.1356, abs=5e-5)  # what comes of dividing all that is there after each round
    rows = torch.tensor([first / 4] * 4 + [second / 4] * 4) * scale
    objective = "column_sum" if loss == "sum" else "column_mean"
    plan = compiled(
        "axis pp = 2",
        blocks=pipelined(4),
        train=f"accumulate = 2; loss = {loss}",
        model="prescribed",
        objective=f'"tests.user_models:{objective}"',
    )
    for rank in pool.run(_given_rows, 2, plan.to_json(), torch.stack([rows, torch.zeros(8)], dim=1)):
        (gradient,) = rank["gradients"].values()
        assert gradient.item() == pytest.approx(0.1897, abs=5e-5)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_case_48_gradients_do_not_depend_on_the_number_of_stages(pool: Pool, stages: int) -> None:
    plan = compiled(f"axis pp = {stages}", blocks=pipelined(4))
    assert plan.world_size == stages
    assert weight_norms(plan, reports(pool, plan)) == pytest.approx(WEIGHT_NORMS, abs=5e-6)


@pytest.mark.parametrize(
    ("axes", "microbatches"), [("axis pp = 1", 4), ("axis pp = 2", 4), ("axis pp = 2", 2), ("axis dp = 2; axis pp = 2", 2)]
)
def test_case_48_a_mean_over_tokens_does_not_depend_on_the_number_of_stages(pool: Pool, axes: str, microbatches: int) -> None:
    objective = '"tests.user_models:masked_square"'
    plan = compiled(
        axes, blocks=pipelined(microbatches), train="loss = mean(over = tokens)", model="two_linears", objective=objective, batch=4
    )
    ours = assemble(plan, reports(pool, plan))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = two_linears()
    data = two_linears_rows().columns
    loss = masked_square(model(data["x"]), data["target"])
    loss.backward()
    assert ours.losses[0] == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours.gradients[0][name], parameter.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("axes", ["axis dp = 2", "axis dp = 1"], ids=["one sequence a rank", "both on one rank"])
def test_case_50_a_mean_over_tokens_is_over_all_tokens(pool: Pool, axes: str) -> None:
    plan = compiled(axes, model="one_linear", objective='"tests.user_models:masked_square"', train="loss = mean(over = tokens)", batch=2)
    gradients = assemble(plan, reports(pool, plan)).gradients[0]
    assert float(gradients["0.weight"].norm()) == pytest.approx(6.69518, abs=1e-5)  # the mean of the ranks' means is 5.15014


def test_case_57_the_norm_is_over_all_stages_and_one_factor_clips_all(pool: Pool) -> None:
    _, _, norm = reference()
    plan = compiled("axis pp = 2", blocks=pipelined(4), train="clip = 0.1")
    ranks = reports(pool, plan)
    assert [r["norms"] for r in ranks] == [[pytest.approx(norm, rel=1e-6)]] * 2
    per_stage = [float(torch.stack([g.norm() for g in r["gradients"][0].values()]).norm()) for r in ranks]
    assert all(own < 0.95 * norm for own in per_stage)  # neither stage knows the norm by itself
    with torch.random.fork_rng():
        torch.manual_seed(0)
        start = dict(four_linears().named_parameters())
    trace = assemble(plan, ranks)
    for name, weight in trace.weights[0].items():
        moved = (start[name].detach() - weight) / 0.1  # plain descent at rate 0.1
        torch.testing.assert_close(moved, trace.gradients[0][name] * (0.1 / norm), rtol=1e-4, atol=1e-6)  # a difference of weights near 0.3


def test_case_57_stages_of_0_140216_and_0_253978_have_the_norm_0_290113_together(pool: Pool) -> None:
    own = (0.140216, 0.253978)
    plan = compiled(
        "axis pp = 2",
        blocks=pipelined(4),
        train="clip = 0.1",
        model="prescribed",
        arguments=f"first = {own[0]}; second = {own[1]}",
        objective='"tests.user_models:column_mean"',
    )
    ranks = pool.run(_given_rows, 2, plan.to_json(), torch.tensor([[1.0, 0.0]]).repeat(8, 1))
    for rank, size in zip(ranks, own, strict=True):
        assert rank["norm"] == pytest.approx(0.290113, abs=5e-7)
        assert [g.item() for g in rank["gradients"].values()] == pytest.approx([size], rel=1e-6)
        # plain descent at rate 0.1 from a weight of zero; each stage's own norm would leave 0.1 of gradient on both
        assert [w.item() for w in rank["weights"].values()] == pytest.approx([-0.1 * size * 0.1 / 0.290113], rel=1e-5)


def _local_shape(rank: int, world: int, store: Any, plan: str) -> tuple[int, ...]:
    with Session(Plan.from_json(plan), rank, store) as session:
        return tuple(local_tensor(session.parameters["0.weight"]).shape)


@pytest.mark.parametrize(
    ("axes", "ranks"),
    [
        ("axis rep = 1; axis sh = 4", 4),
        ("axis sh = 4; axis rep = 1", 4),
        ("axis rep = 2; axis sh = 4", 8),
        ("axis sh = 4; axis rep = 2", 8),
    ],
)
def test_case_6_an_axis_shards_by_its_role_not_by_its_place(pool: Pool, axes: str, ranks: int) -> None:
    plan = compiled(axes, blocks='shard { "**" => fsdp(sh) }')
    assert pool.run(_local_shape, ranks, plan.to_json()) == [(2, 8)] * ranks


def _summing_groups(rank: int, world: int, store: Any, plan: str) -> int:
    with Session(Plan.from_json(plan), rank, store) as session:
        return len(session.groups._made)


def test_case_8_an_axis_of_one_makes_no_group(pool: Pool) -> None:
    with_it, without = (compiled(axes, blocks='shard { "**" => fsdp(sh) }') for axes in ("axis rep = 1; axis sh = 2", "axis sh = 2"))
    assert evolve(with_it, axes=without.axes) == without
    assert [program(with_it, rank) for rank in range(2)] == [program(without, rank) for rank in range(2)]
    assert pool.run(_summing_groups, 2, with_it.to_json()) == [0, 0]


def test_case_62_the_peak_of_one_large_unit_is_told_for_a_model_that_was_read() -> None:
    (one,) = pdsl.check(spec("axis sh = 4", blocks='shard { "**" => fsdp(sh) }', model="wide_head"))
    assert (one.code, one.message) == ("PDL307", "layer 1 is one unit and holds 99 % of the parameters under fsdp(sh)")
    largest = 4 * (8 * 1024 + 1024)
    total = largest + 4 * (64 + 8)
    assert [f"{size / 1024:.1f}" for size in (total, largest, total / 4 + largest)] == ["36.3", "36.0", "45.1"]
    assert one.notes == ("peak for parameters on a rank: 36.3 KiB / 4 + 36.0 KiB = 45.1 KiB; not sharded it is 36.3 KiB",)
    assert pdsl.check(spec("axis sh = 4", blocks='shard { "**" => fsdp(sh) }')) == []


def test_case_66_an_optimizer_made_before_sharding_is_refused() -> None:
    plan = compiled("axis dp = 1")
    early = torch.optim.SGD(four_linears().parameters(), lr=0.1)
    with pytest.raises(pdsl.RunError, match="an optimizer made before the session"), pdsl.session(plan, optimizer=early):  # type: ignore[arg-type]
        pass
    foreign = list(four_linears().parameters())
    with (
        pytest.raises(pdsl.RunError, match="holds 8 parameters that are not the session's"),
        pdsl.session(plan, optimizer=lambda _: torch.optim.SGD(foreign, lr=0.1)),
    ):
        pass


def test_case_66_an_optimizer_of_ones_own_moves_the_weights() -> None:
    plan = compiled("axis dp = 1")
    data = four_linears_rows().rows(range(8))
    with pdsl.session(plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.5)) as session:
        before = {n: t.clone() for n, t in session.weights.items()}
        session.step(data)
        assert all(not torch.equal(before[n], t) for n, t in session.weights.items())
        moved = {n: before[n] - t for n, t in session.weights.items()}
    assert [float(moved[f"{i}.weight"].norm()) / 0.5 for i in range(4)] == pytest.approx(WEIGHT_NORMS, abs=5e-6)


def test_a_parameter_of_the_model_itself_is_reduced_when_its_last_stage_is(pool: Pool) -> None:
    # it lies in the root's FSDP2 unit, which is reduced at the end; no sum over pipelines may start before
    blocks = 'shard { "**" => fsdp(sh) }\npipeline over pp { schedule = interleaved_1f1b(microbatches = 2, virtual = 2) }'
    plan = compiled("axis dp = 2; axis pp = 2; axis sh = 2", blocks=blocks, model="shared_shift", objective="model", batch=32)
    ours = assemble(plan, reports(pool, plan))
    report = compare(ours, oracle(plan, ours), 1e-5)
    assert report.ok, report.worst


def test_a_parameter_without_gradient_has_none_on_many_ranks_either(pool: Pool) -> None:
    """Zero in place of none would let weight decay and momentum move it. What one row of four reads has a gradient on every rank."""
    plan = compiled("axis dp = 2", model="idle", objective="model", batch=4)
    ours = assemble(plan, reports(pool, plan))
    assert set(ours.gradients[0]) == {"linear.weight", "linear.bias", "rare"}
    report = compare(ours, oracle(plan, ours), 1e-5)
    assert report.ok, report.worst


@pytest.mark.parametrize("train", ["clip = 0.01", "loss = mean(over = tokens); clip = 0.01"])
def test_a_stage_without_anything_to_train_takes_part(pool: Pool, train: str) -> None:
    plan = compiled("axis pp = 2", blocks=pipelined(2), model="frozen_start", train=train)
    ours = assemble(plan, reports(pool, plan, steps=2))
    assert set(ours.gradients[0]) == {f"{i}.{leaf}" for i in (2, 3) for leaf in ("weight", "bias")}
    report = compare(ours, oracle(plan, ours), 1e-5)
    assert report.ok, report.worst
