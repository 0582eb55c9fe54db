"""Batches that are not full, data that ends, entries without rows: what comes out equals one process, or the run says why not.

The numbers of public bug reports stand with their case: each was silently wrong somewhere, or hung.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdsl
from pdsl.grammar.errors import ModelError, RunError
from pdsl.lowering.plan import Plan
from pdsl.runtime.feed import IndexedSamples, StreamSamples, make_samples
from pdsl.runtime.rows import rank_rows, shares, split_batch, step_indices, steps_per_epoch
from pdsl.runtime.session import Session
from pdsl.runtime.train import train_rank
from pdsl.runtime.verify import assemble, verify_rank
from tests import batch_models, equality, user_models
from tests.equality import TENSOR, compile_text, farthest
from tests.pool import Pool

FULL = ""
SHARDED = 'shard { "**" => fsdp(fsdp) }'

SPEC = """pdsl 1
mesh {{ {axes} }}
cluster {{ device = cpu }}
model "{model}" {{ }}
{blocks}
train {{
  data = source("tests.batch_models:{data})
  batch = {batch}
  steps = {steps}
  optimizer = sgd(lr = 1e-1)
  {train}
}}
"""

MODELS = {
    "own loss": ("tests.batch_models:own_loss", ""),
    "mse": ("tests.user_models:four_linears", "objective = mse"),
    "tokens": ("tests.batch_models:words", "objective = cross_entropy; loss = mean(over = tokens)"),
    "mixed": ("tests.batch_models:mixed", ""),
    "documents": ("tests.batch_models:documents", ""),
    "noisy": ("tests.batch_models:noisy", "objective = mse"),
    "own tokens": ("tests.batch_models:own_token_loss", "loss = mean(over = tokens)"),
}


def spec_text(axes: str, model: str, data: str, *, blocks: str = "", batch: int = 8, steps: int = 3, train: str = "") -> str:
    name, objective = MODELS[model]
    return SPEC.format(axes=axes, model=name, blocks=blocks, data=data, batch=batch, steps=steps, train=f"{objective}\n  {train}")


def compiled(axes: str, model: str, data: str, *, more: str = "", **of_spec: Any) -> Plan:
    return pdsl.compile(pdsl.load(spec_text(axes, model, data, **of_spec) + more))


def piped(microbatches: int, schedule: str = "one_f_one_b", more: str = "") -> str:
    return f"pipeline over pp {{ schedule = {schedule}(microbatches = {microbatches}{more}) }}"


def _verified(rank: int, world: int, store: Any, plan: str, steps: int) -> dict[str, Any]:
    return verify_rank(Plan.from_json(plan), rank, store, steps=steps)


def trained(rank: int, world: int, store: Any, plan: str, metrics: str | None = None) -> dict[str, Any]:
    return train_rank(Plan.from_json(plan), rank, store, metrics=metrics, progress=False)


# --- one process, as anybody would write it ---------------------------------------------------------------------------------------------------


def _own(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    return model(**rows)  # type: ignore[no-any-return]


def _mse(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(rows["x"]), rows["target"])


def _tokens(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(rows["x"]).flatten(0, 1), rows["target"].flatten())


LOSSES: dict[str, Callable[[nn.Module, dict[str, Tensor]], Tensor]] = {
    "own loss": _own,
    "mse": _mse,
    "tokens": _tokens,
    "own tokens": _own,
    "mixed": _own,
    "documents": _own,
}


def built(model: str) -> nn.Module:
    """The model with the weights that the seed of a spec gives it where it names none."""
    name = MODELS[model][0].partition(":")[2]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return (getattr(batch_models, name, None) or getattr(user_models, name))()  # type: ignore[no-any-return]


def one_process(model: str, data: user_models.Rows, batches: list[list[int]]) -> dict[str, Any]:
    """Plain descent over the given rows, each batch as it is."""
    net = built(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses, gradients = [], []
    for indices in batches:
        optimizer.zero_grad()
        loss = LOSSES[model](net, data.rows(indices))
        loss.backward()
        gradients.append({n: p.grad.clone() for n, p in net.named_parameters()})
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "gradients": gradients, "weights": {n: p.detach().clone() for n, p in net.named_parameters()}}


def deviation(pool: Pool, plan: Plan, expected: dict[str, Any]) -> tuple[float, str]:
    """What is farthest from one process, in as many steps, and how far: relative, over losses, gradients and the weights at the end."""
    ranks = pool.run(_verified, plan.world_size, plan.to_json(), len(expected["losses"]))
    return farthest(assemble(plan, ranks), expected)


# --- the last batch ---------------------------------------------------------------------------------------------------------------------------


def test_case_18_20_samples_in_batches_of_8_are_2_steps_dropped_and_3_padded() -> None:
    assert steps_per_epoch(20, 8) == 2
    assert steps_per_epoch(20, 8, pad=True) == 3
    taken = [i for step in range(3) for i in step_indices(0, step, 20, 8, pad=True)]
    assert [len(step_indices(0, step, 20, 8, pad=True)) for step in range(4)] == [8, 8, 4, 8]
    assert sorted(taken) == list(range(20))


def test_a_data_set_smaller_than_a_batch_has_one_padded_step_and_no_other() -> None:
    assert steps_per_epoch(3, 8, pad=True) == 1
    with pytest.raises(RunError, match=r"3 samples, fewer than one batch of 8; .*last = pad"):
        steps_per_epoch(3, 8)


def test_places_without_a_sample_are_cut_off_and_stood_in_for() -> None:
    found = shares({0: range(3), 1: range(3, 6), 2: range(6, 9)}, 4, lambda places: {"x": torch.tensor(list(places))})
    assert {m: (s.size, s.counts) for m, s in found.shares.items()} == {0: (3, True), 1: (1, True), 2: (3, False)}
    assert found.shares[1].batch["x"].tolist() == [3]
    assert found.shares[2].batch["x"].tolist() == [3, 3, 3]
    assert found.samples == 4


PLACEMENTS = [
    ("axis dp = 1", FULL, 8),
    ("axis dp = 2", FULL, 8),
    ("axis fsdp = 2", SHARDED, 8),
    ("axis pp = 2", piped(4), 8),
    ("axis pp = 2", piped(2, "interleaved_1f1b", ", virtual = 2"), 8),
    ("axis pp = 2; axis fsdp = 2", f"{SHARDED}\n{piped(2)}", 12),
    ("axis dp = 2; axis pp = 2", piped(2, "gpipe"), 12),
    ("axis dp = 2; axis fsdp = 2", SHARDED, 8),
    ("axis pp = 2; axis fsdp = 2", f"{SHARDED}\n{piped(4, 'zbv')}", 8),
]


@pytest.mark.parametrize(("axes", "blocks", "batch"), PLACEMENTS)
@pytest.mark.parametrize(("model", "size"), [("own loss", 19), ("mse", 20), ("own loss", 17)])
def test_case_18_a_padded_batch_has_the_gradients_of_its_samples_alone(
    pool: Pool, model: str, axes: str, blocks: str, batch: int, size: int
) -> None:
    plan = compiled(axes, model, f'vectors", size = {size}', blocks=blocks, batch=batch, train="last = pad")
    steps = steps_per_epoch(size, batch, pad=True)
    expected = one_process(model, batch_models.vectors(size), [list(step_indices(0, s, size, batch, pad=True)) for s in range(steps)])
    distance, what = deviation(pool, plan, expected)
    assert distance <= 1e-5, what


# --- losses over tokens -----------------------------------------------------------------------------------------------------------------------

TOKEN_PLACEMENTS = [("axis dp = 2", FULL), ("axis fsdp = 2", SHARDED), ("axis pp = 2; axis fsdp = 2", f"{SHARDED}\n{piped(2)}")]


@pytest.mark.parametrize(("axes", "blocks"), TOKEN_PLACEMENTS)
@pytest.mark.parametrize("model", ["tokens", "own tokens"])
@pytest.mark.parametrize("empty", [0, 5])
def test_rows_without_a_token_that_counts_weigh_nothing(pool: Pool, model: str, axes: str, blocks: str, empty: int) -> None:
    """Five rows of 12 have no such token, so some microbatch has none at all: its own mean is 0 / 0."""
    plan = compiled(axes, model, f'words_rows", size = 12, empty = {empty}', blocks=blocks, train="last = pad")
    expected = one_process(model, batch_models.words_rows(12, empty), [list(step_indices(0, s, 12, 8, pad=True)) for s in range(2)])
    distance, what = deviation(pool, plan, expected)
    assert distance <= 1e-5, what


def test_a_batch_without_any_token_has_no_mean(pool: Pool) -> None:
    plan = compiled("axis dp = 2", "tokens", 'words_rows", size = 8, empty = 8')
    with pytest.raises(RunError, match="no token of the batch counts"):
        pool.run(trained, 2, plan.to_json())


# --- data that ends ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("last", "sizes"), [("drop", [8, 8]), ("pad", [8, 8, 5])])
@pytest.mark.parametrize(("axes", "blocks"), [("axis dp = 2", FULL), ("axis fsdp = 2", SHARDED), ("axis pp = 2", piped(2))])
def test_case_20_all_ranks_stop_where_the_data_ends(pool: Pool, axes: str, blocks: str, last: str, sizes: list[int]) -> None:
    plan = compiled(axes, "own loss", 'once", size = 21', blocks=blocks, steps=100, train=f"last = {last}")
    ranks = pool.run(trained, 2, plan.to_json())
    batches = [list(range(8 * i, 8 * i + n)) for i, n in enumerate(sizes)]
    expected = one_process("own loss", batch_models.vectors(21), batches)
    for rank in ranks:
        assert (rank["steps"], rank["samples"]) == (len(sizes), sum(sizes))
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5)


def test_data_that_can_be_iterated_again_has_epochs(pool: Pool) -> None:
    plan = compiled("axis dp = 2", "own loss", 'again", size = 20', steps=5)
    first, second = list(range(8)), list(range(8, 16))
    expected = one_process("own loss", batch_models.vectors(20), [first, second, first, second, first])
    distance, what = deviation(pool, plan, expected)
    assert distance <= 1e-5, what


def test_case_20_ranks_that_see_different_ends_say_so_and_do_not_hang(pool: Pool) -> None:
    plan = compiled("axis dp = 2", "own loss", 'split_by_process", size = 24', steps=100)
    with pytest.raises(RunError, match=r"the data is not the same on all ranks: for step 2 rank 1 reads 0 samples and rank 0 reads 8"):
        pool.run(trained, 2, plan.to_json())


def test_data_that_raises_is_told_with_its_reason(pool: Pool) -> None:
    plan = compiled("axis dp = 2", "own loss", 'failing", size = 24')
    with pytest.raises(ModelError, match="reading the data raised OSError: the disk is gone"):
        pool.run(trained, 2, plan.to_json())


def test_data_that_is_no_batch_is_an_error() -> None:
    with pytest.raises(RunError, match=r"the data ended before the first batch of 8: it gave 5 samples; .*pad"):
        StreamSamples(lambda: batch_models.once(5), batch=8, pad=False)
    assert StreamSamples(lambda: batch_models.once(5), batch=8, pad=True).count(0) == 5
    with pytest.raises(RunError, match="it gave 0 samples"):
        StreamSamples(lambda: batch_models.again(0), batch=8, pad=True)


def test_a_stream_gives_a_step_again_and_goes_back_by_reading_anew() -> None:
    samples = StreamSamples(lambda: batch_models.once(50), batch=8, pad=True)
    whole = {0: range(8)}
    first = samples.take(0, whole).shares[0].batch["x"]
    assert [samples.count(s) for s in range(9)] == [8, 8, 8, 8, 8, 8, 2, 0, 0]
    assert samples.ids(6, {0: range(4), 1: range(4, 8)}) == {0: [48, 49], 1: []}
    assert torch.equal(samples.take(0, whole).shares[0].batch["x"], first)
    assert samples.consumed(3) == 24
    assert samples.consumed(20) == 50


@pytest.mark.parametrize(("pad", "consumed"), [(False, [0, 8, 16, 24, 32]), (True, [0, 8, 16, 20, 28])])
def test_samples_consumed_follow_from_the_steps(pad: bool, consumed: list[int]) -> None:
    samples = IndexedSamples(batch_models.vectors(20), seed=0, batch=8, pad=pad)
    assert [samples.consumed(s) for s in range(5)] == consumed
    assert consumed == [sum(samples.count(s) for s in range(n)) for n in range(5)]


# --- entries of a batch -----------------------------------------------------------------------------------------------------------------------

ENTRY_PLACEMENTS = [("axis dp = 2", FULL), ("axis pp = 2", piped(4)), ("axis pp = 2; axis fsdp = 2", f"{SHARDED}\n{piped(2)}")]


@pytest.mark.parametrize(("axes", "blocks"), ENTRY_PLACEMENTS)
@pytest.mark.parametrize(
    ("data", "shared"), [("mixed_rows", 'shared = ["mask"]'), ("mixed_items", 'shared = ["mask"]'), ("mixed_rows by row", "")]
)
def test_case_15_a_mask_is_cut_by_rows_or_shared_as_the_spec_says(pool: Pool, axes: str, blocks: str, data: str, shared: str) -> None:
    name, _, by_row = data.partition(" ")
    source = f'{name}", size = 11' + (", by_row = true" if by_row else "")
    plan = compiled(axes, "mixed", source, blocks=blocks, train=f"last = pad; {shared}")
    rows = [list(step_indices(0, s, 11, 8, pad=True)) for s in range(2)]
    distance, what = deviation(pool, plan, one_process("mixed", batch_models.mixed_rows(11), rows))
    assert distance <= 1e-5, what


@pytest.mark.parametrize(
    ("train", "told"),
    [
        ("", r'rows\(indices\) gave "mask" with shape \(3, 3\) for 2 rows; what all rows share is named in train { shared = \["mask"\] }'),
        ('shared = ["mask", "bias"]', r'train { shared = \["bias"\] } names no entry of the data, which has x, target, mask'),
    ],
)
def test_case_15_an_entry_without_rows_that_nobody_declared_is_refused(train: str, told: str) -> None:
    text = spec_text("axis dp = 2", "mixed", 'mixed_rows", size = 2', train=train)
    (found,) = [d for d in pdsl.check(text) if d.code == "PDL802"]
    assert re.search(told, found.message)


@pytest.mark.parametrize(("axes", "blocks"), ENTRY_PLACEMENTS)
def test_case_16_offsets_of_documents_go_with_their_rows(pool: Pool, axes: str, blocks: str) -> None:
    plan = compiled(axes, "documents", 'documents_rows", size = 8', blocks=blocks)
    order = list(step_indices(0, 0, 8, 8))
    for rank in range(plan.world_size):
        places = rank_rows(plan, rank)
        shares_of = make_samples(plan).take(0, places).shares
        offsets = {m: [[0, 2, 5] if order[i] % 2 else [0, 3, 5] for i in part] for m, part in places.items()}
        assert {m: share.batch["offsets"].tolist() for m, share in shares_of.items()} == offsets
    distance, what = deviation(pool, plan, one_process("documents", batch_models.documents_rows(8), [order]))
    assert distance <= 1e-5, what


def test_case_16_the_second_microbatch_gets_0_2_5_and_not_7_10() -> None:
    batch = {"x": torch.zeros(2, 5), "offsets": torch.tensor([[0, 3, 5], [0, 2, 5]])}
    assert split_batch(batch, range(1, 2))["offsets"].tolist() == [[0, 2, 5]]


def _given(rank: int, world: int, store: Any, plan: str, batch: Any) -> float:
    with Session(Plan.from_json(plan), rank, store) as session:
        return session.step(batch).loss


X = torch.zeros(8, 3, 8)


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"x": X, "mask": None, "target": X}, r'"mask" is a NoneType: expected a tensor with one row per sample$'),
        ({"x": X, "mask": {"a": X}, "target": X}, r'"mask" is a dict: expected a tensor with one row per sample$'),
        ({"x": X, "mask": torch.tensor(1.0), "target": X}, r'"mask" is a tensor without dims.*train { shared = \["mask"\] }'),
        ({"x": X, "mask": torch.zeros(11, 3), "target": X}, r'"mask" has 11 rows, .*for a batch of 8; what all rows share .*"mask"'),
        ({"x": X[:4], "mask": X[:4], "target": X[:4]}, r'"x" has 4 rows, .*for a batch of 8; with train { last = pad } it may have fewer'),
        ([X], "the batch is a list"),
    ],
)
def test_what_a_batch_cannot_hold_is_told_by_its_name(pool: Pool, batch: Any, told: str) -> None:
    plan = compiled("axis dp = 2", "mixed", 'mixed_rows", size = 8, by_row = true')
    with pytest.raises(RunError, match=f"(?m){told}"):  # notes on what the other rank said follow
        pool.run(_given, 2, plan.to_json(), batch)


def test_a_session_takes_a_batch_that_is_not_full_where_the_spec_pads(pool: Pool) -> None:
    plan = compiled("axis dp = 2", "own loss", 'vectors", size = 24', train="last = pad")
    data = batch_models.vectors(24)
    (loss,) = one_process("own loss", data, [[*range(5)]])["losses"]
    assert pool.run(_given, 2, plan.to_json(), data.rows(range(5))) == [pytest.approx(loss, rel=1e-6)] * 2


# --- the rest of the cases --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_case_19_two_rounds_are_one_batch_of_twice_the_size(pool: Pool, accumulate: int) -> None:
    blocks = piped(4 // accumulate)
    plan = compiled("axis pp = 2", "own loss", 'vectors", size = 32', blocks=blocks, batch=16, train=f"accumulate = {accumulate}")
    expected = one_process("own loss", batch_models.vectors(32), [list(step_indices(0, s, 32, 16)) for s in range(2)])
    distance, what = deviation(pool, plan, expected)
    assert distance <= 1e-5, what


def test_case_53_a_last_window_of_one_batch_divides_by_one(pool: Pool) -> None:
    """Five batches of four rows, two of them a step: the third step has one, and weighs its rows by their own number."""
    plan = compiled("axis pp = 2", "own loss", 'vectors", size = 20', blocks=piped(2), train="accumulate = 2; last = pad")
    batches = [list(step_indices(0, s, 20, 8, pad=True)) for s in range(3)]
    assert [len(b) for b in batches] == [8, 8, 4]
    distance, what = deviation(pool, plan, one_process("own loss", batch_models.vectors(20), batches))
    assert distance <= 1e-5, what


def test_case_23_tensor_ranks_see_the_same_samples_and_data_ranks_different_ones() -> None:
    plan = compile_text(equality.spec_text({"dp": 2, "tp": 2}, TENSOR, batch=4))
    seen = [[p for part in rank_rows(plan, rank).values() for p in part] for rank in range(4)]
    assert seen == [[0, 1], [0, 1], [2, 3], [2, 3]]  # places in the batch, whatever the order of samples is


def test_pdl805_data_smaller_than_a_batch_is_found_before_the_run() -> None:
    text = spec_text("axis dp = 1", "own loss", 'vectors", size = 5')
    assert "PDL805" in {d.code for d in pdsl.check(text)}
    assert "PDL805" not in {d.code for d in pdsl.check(text.replace("steps = 3", "steps = 3; last = pad"))}
    assert "PDL805" not in {d.code for d in pdsl.check(text.replace("vectors", "once"))}  # nobody knows how long it is
