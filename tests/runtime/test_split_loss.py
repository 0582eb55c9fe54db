"""The loss of scores of which each tensor rank has those of some classes: torch's cross entropy, without gathering them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import pdsl
from pdsl.grammar.errors import RunError, SpecError
from pdsl.lowering.cost import cost
from pdsl.lowering.plan import Plan
from pdsl.runtime.split_loss import mark_split
from pdsl.runtime.tensor_collectives import TensorGroup
from pdsl.runtime.verify import compare, oracle
from tests.equality import compile_text, spec_text, tensor_rules
from tests.pool import Pool
from tests.runtime.test_tensor import MATRICES, REST, STREAM, check, text
from tests.traces import traced

CALLS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed sum": {"label_smoothing": 0.3, "reduction": "sum"},
    "ignored": {"ignore_index": 3},
    "older names": {"size_average": False},
}


def _both(rank: int, world: int, store: Any, call: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    generator = torch.Generator().manual_seed(5)
    scores = (10 * torch.randn(shape, generator=generator)).to(dtype)
    classes = shape[1] if len(shape) > 1 else shape[0]
    target = torch.randint(0, classes, shape[:1] + shape[2:] if len(shape) > 1 else (), generator=generator)
    if "ignore_index" not in call and target.dim():
        target.view(-1)[0] = -100
    group, dim = TensorGroup(dist.group.WORLD, rank, world), 1 if len(shape) > 1 else 0
    whole, part = scores.clone().requires_grad_(), scores.chunk(world, dim)[rank].clone().requires_grad_()
    theirs = F.cross_entropy(whole, target, **call)
    ours = F.cross_entropy(part.as_subclass(mark_split(group)) * 1.0, target, **call)
    factor = torch.randn(theirs.shape, generator=generator).to(dtype)
    (theirs * factor).sum().backward()
    (ours * factor).sum().backward()
    assert type(ours) is torch.Tensor
    return ours.detach(), theirs.detach(), part.grad, whole.grad.chunk(world, dim)[rank].clone()


@pytest.mark.parametrize("shape", [(6, 12), (2, 12, 5), (12,)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_it_is_the_cross_entropy_of_torch(pool: Pool, name: str, shape: tuple[int, ...]) -> None:
    for ours, theirs, gradient, expected in pool.run(_both, 3, CALLS[name], shape, torch.float32):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(gradient, expected, rtol=2e-6, atol=1e-6)


def test_low_precision_is_computed_in_fp32_and_rounded_once(pool: Pool) -> None:
    for ours, theirs, gradient, expected in pool.run(_both, 2, {}, (64, 12), torch.bfloat16):
        assert ours.dtype is gradient.dtype is torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=8e-3, atol=0)
        torch.testing.assert_close(gradient, expected, rtol=8e-3, atol=1e-5)


def _wrong(rank: int, world: int, store: Any, what: str) -> str:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    scores = torch.randn(4, 6).as_subclass(mark_split(TensorGroup(dist.group.WORLD, rank, world)))
    target: Any = {"target": torch.tensor([0, 1, 12, 3]), "weight": torch.arange(4), "chances": torch.rand(4, 12)}[what]
    try:
        F.cross_entropy(scores, target, weight=torch.ones(12) if what == "weight" else None)
    except (IndexError, RunError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [("target", "expected 0 to 11, or -100"), ("weight", "weights of classes"), ("chances", "probabilities")],
)
def test_what_cannot_be_computed_from_parts_is_told(pool: Pool, what: str, words: str) -> None:
    assert all(words in told for told in pool.run(_wrong, 2, what))


HEAD = '"head.weight" => colwise(tp)\n'
PLANS: dict[str, tuple[dict[str, int], str, str]] = {
    "alone": ({"tp": 2}, HEAD + REST, ""),
    "vocabulary at both ends": ({"tp": 2}, '"tok.weight" => rowwise(tp)\n' + HEAD + MATRICES + REST, ""),
    "sequence": ({"tp": 2}, STREAM + HEAD + MATRICES + REST, ""),
    "two axes": ({"a": 2, "b": 2}, '"head.weight" => colwise(a, b)\n"tok.weight" => rowwise(b, a)\n' + REST, ""),
    "one of two axes": ({"a": 2, "b": 2}, '"head.weight" => colwise(b)\n"tok.weight" => rowwise(a)\n' + REST, ""),
    "sharded too": ({"fsdp": 2, "tp": 2}, '"head.weight" => colwise(tp) + fsdp(fsdp)\n' + MATRICES + '"**" => fsdp(fsdp)\n', ""),
    "stages": ({"pp": 2, "tp": 2}, STREAM + HEAD + MATRICES + REST, "pipeline over pp { schedule = one_f_one_b(microbatches = 2) }"),
    "halves": ({"pp": 2, "tp": 2}, HEAD + MATRICES + REST, "pipeline over pp { schedule = zbv(microbatches = 4) }"),
    "computed again": ({"tp": 2}, HEAD + MATRICES + REST, 'memory { recompute = "**" }'),
}


@pytest.mark.parametrize("name", PLANS)
def test_split_scores_train_what_one_process_trains(pool: Pool, name: str) -> None:
    axes, rules, more = PLANS[name]
    plan = check(pool, axes, rules, pipeline=more)
    assert plan.facts.tensor is not None
    (loss,) = plan.facts.tensor.losses
    assert (loss.module, loss.targets) == ("head", 8)
    assert _gathered(pool, plan) == 0


def _count_gathers(rank: int, world: int, store: Any, plan: str) -> int:
    """How many tensors as large as the scores of one rank's classes are gathered in a step."""
    from pdsl.runtime.session import Session
    from tests.tensor_models import VOCABULARY, llama_rows

    plain, found = TensorGroup.gather, 0

    def gather(group: TensorGroup, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        nonlocal found
        found += tensor.shape[-1] * group.size == VOCABULARY
        return plain(group, tensor, dim)

    TensorGroup.gather = gather  # type: ignore[method-assign]
    try:
        with Session(Plan.from_json(plan), rank, store) as session:
            session.step(llama_rows().rows(range(8)))
    finally:
        TensorGroup.gather = plain  # type: ignore[method-assign]
    return found


def _gathered(pool: Pool, plan: Plan) -> int:
    return sum(pool.run(_count_gathers, plan.world_size, plan.to_json()))


def test_in_slots_the_scores_are_gathered(pool: Pool) -> None:
    plan = pdsl.compile(pdsl.load(text({"tp": 2}, '"head.weight" => [tp, _]\n' + REST)))
    assert plan.facts.tensor is not None
    assert plan.facts.tensor.losses == ()
    assert _gathered(pool, plan) == 2
    split = pdsl.compile(pdsl.load(text({"tp": 2}, HEAD + REST)))
    assert sum(t.tensor for t in cost(split).traffic) < sum(t.tensor for t in cost(plan).traffic)


@pytest.mark.parametrize(
    ("train", "more", "tolerance"),
    [("", "", 1e-5), ("", "precision { params = bf16 }", 2e-2), ("compile = true", "", 1e-5)],
    ids=["fp32", "bf16", "compiled"],
)
def test_the_shipped_model(pool: Pool, train: str, more: str, tolerance: float) -> None:
    shard = tensor_rules().replace("{\n", '{\n  "output.weight" => colwise(tp)\n', 1)
    plan = compile_text(spec_text({"pp": 2, "tp": 2}, shard, schedule="one_f_one_b(microbatches = 2)", train=train) + more)
    assert plan.facts.tensor is not None
    assert [loss.module for loss in plan.facts.tensor.losses] == ["output"]
    ours = traced(pool, plan, 2, deadline=110.0)
    report = compare(ours, oracle(plan, ours), tolerance)
    assert report.ok, report.worst


CLASSES = """pdsl 1
mesh {{ axis tp = 2 }}
cluster {{ device = cpu }}
model "tests.tensor_models:{model}" {{ {arguments} }}
shard {{
  "{head}.weight" => colwise(tp)
  "**" => replicate()
}}
train {{
  data = source("tests.tensor_models:class_rows")
  batch = 8
  steps = 3
  optimizer = sgd(lr = 0.1)
  objective = {objective}
}}
"""


def classes_plan(model: str, arguments: str, objective: str) -> Plan:
    head = "2" if model == "classes" else "{head,other}" if "two heads" in arguments else "head"
    return pdsl.compile(pdsl.load(CLASSES.format(model=model, arguments=arguments, head=head, objective=objective)))


@pytest.mark.parametrize(
    ("model", "arguments", "objective", "heads"),
    [
        ("classes", "", "cross_entropy", ["2"]),
        ("classifier", 'loss = "torch"', "model", ["head", "head"]),
        ("classifier", 'loss = "module"', "model", ["head"]),
        ("classifier", 'loss = "two heads"', "model", ["head", "other"]),
    ],
    ids=["an objective", "two losses of one head", "a loss that is a module", "two heads"],
)
def test_losses_of_classes(pool: Pool, model: str, arguments: str, objective: str, heads: list[str]) -> None:
    plan = classes_plan(model, arguments, objective)
    assert plan.facts.tensor is not None
    assert [(loss.module, loss.axes, loss.targets) for loss in plan.facts.tensor.losses] == [(head, ("tp",), 1) for head in heads]
    ours = traced(pool, plan, 3)
    report = compare(ours, oracle(plan, ours), 1e-5)
    assert report.ok, report.worst


@pytest.mark.parametrize(
    ("model", "arguments", "objective", "words"),
    [
        ("classifier", 'loss = "weights"', "model", "cross_entropy with weights of classes takes the scores of all classes"),
        ("classifier", 'loss = "parts"', "model", "log_softmax of (2, 8) has (2, 4) on a tensor rank"),
        ("classifier", 'loss = "view"', "model", "view of (2, 8) has (2, 4) on a tensor rank"),
        ("classifier", 'loss = "written"', "model", "scores are written into a tensor that was made without them"),
        ("classes", "", '"tests.tensor_models:squares"', "what the model returns lies split over tp"),
    ],
    ids=["weights", "made of other functions", "sizes by name", "written", "another objective"],
)
def test_losses_that_take_all_scores_are_refused(model: str, arguments: str, objective: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        classes_plan(model, arguments, objective)
    told = [d for d in caught.value.diagnostics if d.code == "PDL311"]
    assert [d.message for d in told if words in d.message] == [d.message for d in told] != []
    assert "[tp, _]" in told[0].help[0]
