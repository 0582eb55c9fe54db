"""Tensor and sequence parallel plans compute what one process computes, on models as users write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pdsl
from pdsl.grammar.errors import SpecError
from pdsl.lowering.boxes import box
from pdsl.lowering.cost import cost
from pdsl.lowering.plan import Plan
from pdsl.runtime.rows import step_indices
from pdsl.runtime.session import Session
from pdsl.runtime.tensor_collectives import TensorGroup
from pdsl.runtime.verify import assemble
from tests.batch_models import mixed_rows
from tests.equality import _rank, check_against_one_process, compile_text, spec_text, tensor_rules
from tests.equality import one_process as gpt_in_one_process
from tests.pool import Pool
from tests.tensor_models import llama, llama_rows

SEED, BATCH = 11, 8


def text(axes: dict[str, int], rules: str, *, pipeline: str = "", length: int = 8, clip: float | None = None, **model: Any) -> str:
    mesh = "\n".join(f"axis {name} = {size}" for name, size in axes.items())
    arguments = "; ".join(f"{k} = {_word(v)}" for k, v in model.items())
    return f"""pdsl 1
mesh {{
{mesh}
}}
cluster {{ device = cpu }}
model "tests.tensor_models:llama" {{ {arguments} }}
shard {{
{rules}
}}
{pipeline}
train {{
  data = source("tests.tensor_models:llama_rows", length = {length})
  batch = {BATCH}
  steps = 10
  optimizer = adamw(lr = 1e-3, eps = 1e-4)
  seed = {SEED}
  {f"clip = {clip}" if clip is not None else ""}
}}
"""


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


MATRICES = """
"layers.*.attn.w{q,k,v}.weight" => colwise(tp)
"layers.*.attn.wo.weight" => rowwise(tp)
"layers.*.mlp.w{1,3}.weight" => colwise(tp)
"layers.*.mlp.w2.weight" => rowwise(tp)
"""
REST = '"**" => replicate()\n'
VOCABULARY = '"tok.weight" => [tp, _]\n"head.weight" => [tp, _]\n'
SEQUENCE = '"layers.*.norm*.*" => sequence(tp)\n'
STREAM = SEQUENCE + '"norm.weight" => sequence(tp)\n'


def one_process(length: int = 8, clip: float | None = None, **model: Any) -> dict[str, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        net = llama(**model)
    data = llama_rows(length)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, eps=1e-4)
    found: dict[str, Any] = {"losses": [], "gradients": [], "norms": []}
    for step in range(3):
        rows = data.rows(step_indices(SEED, step, len(data), BATCH))
        optimizer.zero_grad()
        loss = net(**rows)
        loss.backward()
        found["gradients"].append({n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None})
        found["norms"].append(float(torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])))
        if clip is not None:
            assert found["norms"][-1] > clip
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        found["losses"].append(loss.item())
    found["weights"] = {n: p.detach().clone() for n, p in net.named_parameters()}
    return found


def check(
    pool: Pool, axes: dict[str, int], rules: str, *, pipeline: str = "", length: int = 8, clip: float | None = None, **model: Any
) -> Plan:
    plan = pdsl.compile(pdsl.load(text(axes, rules, pipeline=pipeline, length=length, clip=clip, **model)))
    check_against_one_process(pool, plan, one_process(length, clip, **model))
    return plan


# --- tensor parallel ------------------------------------------------------------------------------------------------------------------


def test_grouped_queries_and_gated_mlps(pool: Pool) -> None:
    check(pool, {"tp": 2}, MATRICES + REST)


def test_biases_are_added_once(pool: Pool) -> None:
    check(pool, {"tp": 2}, MATRICES + REST, bias=True)


def test_norms_of_heads_get_the_sum_of_the_gradients_of_all_heads(pool: Pool) -> None:
    plan = check(pool, {"tp": 2}, MATRICES + REST, norm=True)
    assert plan.layout("layers.0.attn.q_norm.weight").summed == ("tp",)
    assert plan.layout("layers.0.norm1.weight").summed == ()


def test_norms_of_heads_that_are_sharded_too(pool: Pool) -> None:
    rules = MATRICES.replace("(tp)", "(tp) + fsdp(fsdp)") + '"**" => fsdp(fsdp)\n'
    check(pool, {"fsdp": 2, "tp": 2}, rules, norm=True, bias=True)


def test_vocabulary_in_parts(pool: Pool) -> None:
    check(pool, {"tp": 2}, VOCABULARY + MATRICES + REST, padding=5)


def test_tied_vocabulary_in_parts(pool: Pool) -> None:
    check(pool, {"tp": 2}, '"tok.weight" => [tp, _]\n' + MATRICES + REST, tie=True)


def test_tied_vocabulary_in_parts_over_stages(pool: Pool) -> None:
    pipeline = "pipeline over pp { schedule = one_f_one_b(microbatches = 2) }"
    check(pool, {"pp": 2, "tp": 2}, '"tok.weight" => [tp, _]\n' + MATRICES + REST, tie=True, pipeline=pipeline)


def test_fused_projection_in_slots(pool: Pool) -> None:
    rules = '"layers.*.attn.wqkv.weight" => [tp, _]\n"layers.*.attn.wo.weight" => [_, tp]\n' + MATRICES.split("\n", 3)[3] + REST
    check(pool, {"tp": 2}, rules, fused=True, bias=True)


# --- sequence parallel ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [SEQUENCE + MATRICES + REST, STREAM + VOCABULARY + MATRICES + REST], ids=["blocks", "stream"])
def test_sequence_in_parts(pool: Pool, rules: str) -> None:
    plan = check(pool, {"tp": 2}, rules, bias=True, norm=True)
    assert plan.layout("layers.1.norm2.bias").summed == ("tp",)
    assert plan.layout("layers.1.mlp.w2.bias").summed == ("tp",)


def test_sequence_in_parts_crosses_stages_in_parts(pool: Pool) -> None:
    pipeline = "pipeline over pp { schedule = one_f_one_b(microbatches = 2) }"
    check(pool, {"pp": 2, "tp": 2}, STREAM + VOCABULARY + MATRICES, pipeline=pipeline, layers=4)


def test_sequence_in_parts_with_sharded_parameters(pool: Pool) -> None:
    rules = (STREAM + VOCABULARY + MATRICES).replace("(tp)\n", "(tp) + fsdp(fsdp)\n").replace("_]\n", "_] + fsdp(fsdp)\n")
    check(pool, {"fsdp": 2, "tp": 2}, rules + '"**" => fsdp(fsdp)\n', bias=True)


def test_sequence_of_the_small_gpt_in_parts(pool: Pool) -> None:
    rules = tensor_rules().replace('  "**" ', '  "**.*_norm.weight" => sequence(tp)\n  "**" ', 1)
    plan = compile_text(spec_text({"pp": 2, "tp": 2}, rules, schedule="one_f_one_b(microbatches = 2)"))
    check_against_one_process(pool, plan, gpt_in_one_process(SEED, 16))


@pytest.mark.parametrize(
    "extra",
    [
        'pipeline over pp { schedule = one_f_one_b(microbatches = 2) }\nmemory { recompute = "layers.*" }',
        "pipeline over pp { schedule = interleaved_zero_bubble(microbatches = 4, virtual = 2) }",
        "pipeline over pp { schedule = zbv(microbatches = 4) }",
    ],
    ids=["recompute", "interleaved zero-bubble", "zbv"],
)
def test_sequence_in_parts_under_recompute_and_split_backwards(pool: Pool, extra: str) -> None:
    check(pool, {"pp": 2, "tp": 2}, STREAM + VOCABULARY + MATRICES + REST, pipeline=extra, layers=4, norm=True)


def test_sequence_in_parts_in_half_precision_is_near_one_process(pool: Pool) -> None:
    plan = pdsl.compile(
        pdsl.load(text({"tp": 2}, STREAM + VOCABULARY + MATRICES + REST, pipeline="precision { params = bf16 }", norm=True))
    )
    ranks = pool.run(_rank, plan.world_size, plan.to_json(), 3)
    ours, theirs = assemble(plan, ranks), one_process(norm=True)
    assert ours.losses == pytest.approx(theirs["losses"], rel=5e-3)
    for name, gradient in theirs["gradients"][0].items():
        assert (ours.gradients[0][name] - gradient).norm() <= 0.05 * gradient.norm(), name


# --- several tensor axes --------------------------------------------------------------------------------------------------------------


def test_two_axes_on_one_dim(pool: Pool) -> None:
    rules = MATRICES.replace("(tp)", "(a, b)")
    check(pool, {"a": 2, "b": 2}, '"tok.weight" => [(a, b), _]\n' + rules + REST, kv_heads=4)


def test_one_parameter_in_two_dims(pool: Pool) -> None:
    check(
        pool, {"a": 2, "b": 2}, '"head.weight" => [a, b]\n"tok.weight" => [a, b]\n"layers.*.mlp.w2.weight" => [b, a]\n"**" => replicate()\n'
    )


def test_each_axis_for_some_of_the_parameters(pool: Pool) -> None:
    rules = MATRICES.replace('attn.w{q,k,v}.weight" => colwise(tp)', 'attn.w{q,k,v}.weight" => colwise(a)')
    rules = rules.replace('attn.wo.weight" => rowwise(tp)', 'attn.wo.weight" => rowwise(a)').replace("(tp)", "(a, b)")
    check(pool, {"a": 2, "b": 2}, rules + REST, norm=True, bias=True)


def test_two_axes_in_another_order_than_the_mesh_has_them(pool: Pool) -> None:
    rules = SEQUENCE.replace("(tp)", "(b, a)") + MATRICES.replace("(tp)", "(b, a)") + '"head.weight" => [(b, a), _]\n' + REST
    plan = check(pool, {"a": 2, "b": 2}, rules, kv_heads=4)
    assert [box(plan, plan.facts.parameter("head.weight"), 0, t)[0] for t in range(4)] == [(0, 12), (24, 36), (12, 24), (36, 48)]


@pytest.mark.parametrize(
    "rules",
    ['"layers.**" => fsdp(a, b)\n"**" => fsdp(a)\n', '"layers.*.mlp.**" => fsdp(b)\n"layers.**" => fsdp(b, a)\n"**" => replicate()\n'],
    ids=["by layer", "in one layer"],
)
def test_sharded_over_some_of_the_axes(pool: Pool, rules: str) -> None:
    plan = check(pool, {"a": 2, "b": 2}, rules, bias=True)
    assert {layout.shard_axes for layout in plan.layouts if layout.sharded} in ({("a",), ()}, {("b",), ()})


def test_shards_of_dims_that_are_smaller_than_the_axis(pool: Pool) -> None:
    check(pool, {"fsdp": 4}, '"**" => fsdp(fsdp)\n', width=6, heads=1, kv_heads=1, bias=True)


# --- cases ----------------------------------------------------------------------------------------------------------------------------


def test_case_58_one_norm_over_split_and_whole_and_sharded_parameters(pool: Pool) -> None:
    """Tensor parallel on the first layer only, the second sharded, the rest whole; clipped, so that a wrong norm shows in the weights too."""
    rules = MATRICES.replace("layers.*", "layers.0") + '"layers.1.**" => fsdp(fsdp)\n' + REST
    check(pool, {"fsdp": 2, "tp": 2}, rules, clip=0.5)


def _first_weights(rank: int, world: int, store: Any, plan: str) -> dict[str, torch.Tensor]:
    with Session(Plan.from_json(plan), rank, store) as session:
        found = {name: weight.clone() for name, weight in session.weights.items()}
        session.step(llama_rows().rows(range(BATCH)))  # no rank leaves before all have come
        return found


@pytest.mark.parametrize(
    ("axes", "rules"),
    [
        ({"dp": 1}, REST),
        ({"fsdp": 2, "tp": 2}, VOCABULARY + MATRICES + '"**" => fsdp(fsdp)\n'),
        ({"a": 2, "b": 2}, '"head.weight" => [b, a]\n' + REST),
    ],
    ids=["one rank", "fsdp x tp", "two dims"],
)
def test_case_76_first_weights_do_not_depend_on_the_mesh(pool: Pool, axes: dict[str, int], rules: str) -> None:
    plan = pdsl.compile(pdsl.load(text(axes, rules, bias=True)))
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        expected = dict(llama(bias=True).named_parameters())
    for rank, weights in enumerate(pool.run(_first_weights, plan.world_size, plan.to_json())):
        at = plan.coordinate(rank)
        for p in plan.facts.parameters:
            here = tuple(slice(a, b) for a, b in box(plan, p, at.shard, at.tensor))
            assert torch.equal(weights[p.name], expected[p.name][here]), p.name


# --- what is sent ---------------------------------------------------------------------------------------------------------------------


def _count_sent(rank: int, world: int, store: Any, plan: str) -> float:
    """Bytes that a rank sends to its tensor ranks in one step, as rings would: from the sizes that the exchanges are called with."""
    made, sent = Plan.from_json(plan), 0.0
    plain = {name: getattr(TensorGroup, name) for name in ("sum", "largest", "gather", "scatter")}

    def counting(name: str, weight: float) -> Any:
        def call(group: TensorGroup, tensor: torch.Tensor, *dim: int) -> torch.Tensor:
            nonlocal sent
            whole = tensor.nbytes * (group.size if name == "gather" else 1)
            sent += weight * whole * (group.size - 1) / group.size
            return plain[name](group, tensor, *dim)

        return call

    try:
        for name, weight in (("sum", 2.0), ("largest", 2.0), ("gather", 1.0), ("scatter", 1.0)):
            setattr(TensorGroup, name, counting(name, weight))
        with Session(made, rank, store) as session:
            session.step(llama_rows().rows(range(BATCH)))
    finally:
        for name, function in plain.items():
            setattr(TensorGroup, name, function)
    return sent


@pytest.mark.parametrize(
    ("axes", "rules", "pipeline"),
    [
        ({"tp": 2}, MATRICES + REST, ""),
        ({"tp": 2}, VOCABULARY + MATRICES + REST, ""),
        ({"tp": 2}, '"head.weight" => colwise(tp)\n' + MATRICES + REST, ""),
        ({"tp": 2}, SEQUENCE + MATRICES + REST, ""),
        ({"pp": 2, "tp": 2}, STREAM + VOCABULARY + MATRICES, "pipeline over pp { schedule = one_f_one_b(microbatches = 2) }"),
        (
            {"a": 2, "b": 2},
            '"head.weight" => [a, b]\n"tok.weight" => [a, b]\n"layers.*.mlp.w2.weight" => [b, a]\n"**" => replicate()\n',
            "",
        ),
    ],
    ids=["pairs", "vocabulary", "split scores", "sequence", "stream over stages", "two dims"],
)
def test_bytes_between_tensor_ranks_are_predicted(pool: Pool, axes: dict[str, int], rules: str, pipeline: str) -> None:
    plan = pdsl.compile(pdsl.load(text(axes, rules, pipeline=pipeline)))
    counted = pool.run(_count_sent, plan.world_size, plan.to_json())
    assert [t.tensor for t in cost(plan).traffic] == counted


# --- what is kept ---------------------------------------------------------------------------------------------------------------------


def _count_kept(rank: int, world: int, store: Any, plan: str) -> int:
    """Bytes that autograd keeps on a rank from a forward of two rows to its backward, each storage once."""
    rows, kept, alive = llama_rows().rows(range(2)), dict[int, int](), list[torch.Tensor]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor.detach())  # storages keep their addresses as long as they live
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with Session(Plan.from_json(plan), rank, store) as session:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            session.model(**rows)
        session.step(llama_rows().rows(range(BATCH)))  # no rank leaves before all have come
        held = (*session.model.parameters(), *session.model.buffers(), *rows.values())
        return sum(kept.values()) - sum(kept.get(t.untyped_storage().data_ptr(), 0) for t in held)


@pytest.mark.parametrize(
    ("axes", "rules", "model"),
    [
        ({"tp": 2}, MATRICES, {}),
        ({"tp": 2}, SEQUENCE + MATRICES, {}),
        ({"tp": 2}, SEQUENCE + MATRICES, {"bias": True, "norm": True}),
        ({"tp": 2}, '"layers.*.attn.wqkv.weight" => [tp, _]\n"layers.*.attn.wo.weight" => [_, tp]\n', {"fused": True, "bias": True}),
        ({"a": 2, "b": 2}, '"head.weight" => [a, b]\n"layers.*.mlp.w2.weight" => [b, a]\n', {}),
    ],
    ids=["pairs", "sequence", "sequence with biases", "slots", "two dims"],
)
def test_bytes_that_a_tensor_rank_keeps_are_predicted(pool: Pool, axes: dict[str, int], rules: str, model: dict[str, Any]) -> None:
    plan = pdsl.compile(pdsl.load(text(axes, rules + REST, **model)))
    assert plan.facts.tensor is not None
    kept = sum(part for part, _ in plan.facts.tensor.saved)
    assert pool.run(_count_kept, plan.world_size, plan.to_json()) == [kept] * plan.world_size


# --- what the check refuses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "rules", "model", "code", "words"),
    [
        ({"tp": 4}, MATRICES + REST, {}, "PDL310", "16 features are seen as 2 x 8, and 2 % 4 = 2"),
        ({"tp": 2}, MATRICES + REST, {"form": "named"}, "PDL311", "view of (2, 8, 32) has (2, 8, 16) on a tensor rank, and fails"),
        ({"tp": 2}, MATRICES + REST, {"form": "length"}, "PDL311", "which is no part of the whole result"),
        ({"tp": 2}, MATRICES + REST, {"inner_norm": True}, "PDL311", "rms_norm"),
        ({"tp": 2}, MATRICES.replace("w{q,k,v}", "wqkv") + REST, {"fused": True}, "PDL311", "chunk of (2, 8, 96) has (2, 8, 48)"),
        ({"tp": 2}, SEQUENCE + MATRICES + REST, {"length": 7}, "PDL313", "7 % 2 = 1"),
        ({"tp": 2}, MATRICES.replace("attn", "attention") + REST, {}, "PDL301", "matches no parameter"),
    ],
    ids=["kv heads", "named heads", "length gives way", "norm over all features", "fused", "odd length", "pattern"],
)
def test_what_a_rank_would_compute_otherwise_is_refused(
    axes: dict[str, int], rules: str, model: dict[str, Any], code: str, words: str
) -> None:
    with pytest.raises(SpecError) as caught:
        pdsl.compile(pdsl.load(text(axes, rules, **model)))
    assert {d.code for d in caught.value.diagnostics if words in d.message} == {code}


def test_rows_that_are_given_decide_in_place_of_those_of_the_spec() -> None:
    spec = pdsl.load(text({"tp": 2}, SEQUENCE + MATRICES + REST))
    pdsl.compile(spec)
    with pytest.raises(SpecError) as caught:
        pdsl.compile(spec, batch=llama_rows(7).rows(range(2)))
    assert [d.code for d in caught.value.diagnostics] == ["PDL313"]


def test_shared_entries_of_rows_that_are_given_stay_whole_for_tensor_ranks() -> None:
    spec = pdsl.load("""pdsl 1
mesh { axis tp = 2 }
model "tests.batch_models:mixed" {}
shard { "**.linear.weight" => [tp, _]; "**" => replicate() }
train { data = source("tests.batch_models:mixed_rows", size = 11); batch = 4; steps = 1; optimizer = sgd(lr = 1.0); shared = ["mask"] }
""")
    plan = pdsl.compile(spec, batch=mixed_rows(11).rows(range(3)))  # the mask is 3 x 3
    assert plan.facts.tensor is not None
    assert plan.facts.tensor.problems == ()
