"""The loss on held-out data: over every sample once, the same on every rank, and training goes on as if it had not been taken."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pdsl
from pdsl.grammar.errors import ModelError, RunError
from pdsl.lowering.forward_program import forward_rows
from pdsl.lowering.plan import Plan
from pdsl.lowering.schedule import Operation
from pdsl.lowering.schedules import SCHEDULES
from pdsl.runtime.session import Session
from tests import batch_models
from tests.pool import Pool
from tests.runtime.test_batch_cases import FULL, LOSSES, SHARDED, built, compiled, piped, spec_text, trained


def held_out(data: str, more: str = "") -> str:
    return f'validate {{ data = source("tests.batch_models:{data}); {more} }}\n'


def _validated(rank: int, world: int, store: Any, text: str) -> dict[str, Any]:
    """Validate at the start; the weights of this rank before and after."""
    plan = Plan.from_json(text)
    with Session(plan, rank, store) as session:
        before = {n: t.clone() for n, t in session.weights.items()}
        found = [session.validate(), session.validate()]
        same = all(torch.equal(t, session.weights[n]) for n, t in before.items())
        modes = {m.training for m in session.model.modules()}
    return {"loss": [f.loss for f in found], "samples": found[0].samples, "same": same, "modes": modes}


def one_process(model: str, data: Any, size: int) -> float:
    """The whole data through the whole model at once."""
    with torch.no_grad():
        return LOSSES[model](built(model).eval(), data.rows(range(size))).item()


PLACEMENTS = [
    ("axis dp = 1", FULL),
    ("axis dp = 2", FULL),
    ("axis fsdp = 2", SHARDED),
    ("axis pp = 2", piped(4)),
    ("axis pp = 2", piped(2, "interleaved_1f1b", ", virtual = 2")),
    ("axis pp = 2; axis fsdp = 2", f"{SHARDED}\n{piped(2)}"),
    ("axis dp = 2; axis pp = 2", piped(2, "gpipe")),
]


@pytest.mark.parametrize(("axes", "blocks"), PLACEMENTS)
def test_case_22_21_samples_count_21_times(pool: Pool, axes: str, blocks: str) -> None:
    plan = compiled(axes, "own loss", 'vectors", size = 24', blocks=blocks, more=held_out('vectors", size = 21'))
    for rank in pool.run(_validated, plan.world_size, plan.to_json()):
        assert rank["samples"] == 21
        assert rank["loss"] == [pytest.approx(one_process("own loss", batch_models.vectors(21), 21), rel=1e-5)] * 2
        assert rank["loss"][0] == rank["loss"][1]
        assert rank["same"]
        assert rank["modes"] == {True}


@pytest.mark.parametrize(("axes", "blocks"), [PLACEMENTS[1], PLACEMENTS[2], PLACEMENTS[5]])
@pytest.mark.parametrize("model", ["tokens", "own tokens"])
def test_a_mean_over_tokens_is_over_all_held_out_tokens(pool: Pool, model: str, axes: str, blocks: str) -> None:
    more = held_out('words_rows", size = 13, empty = 5')
    plan = compiled(axes, model, 'words_rows", size = 16', blocks=blocks, more=more)
    expected = one_process(model, batch_models.words_rows(13, 5), 13)
    for rank in pool.run(_validated, plan.world_size, plan.to_json()):
        assert rank["loss"][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("data", "size", "more", "samples"),
    [("once", 21, "", 21), ("again", 16, "", 16), ("again", 40, "samples = 3", 3), ("vectors", 40, "samples = 9", 9)],
)
def test_held_out_data_may_be_iterated_or_cut(pool: Pool, data: str, size: int, more: str, samples: int) -> None:
    plan = compiled("axis dp = 2", "own loss", 'vectors", size = 24', more=held_out(f'{data}", size = {size}', more))
    expected = one_process("own loss", batch_models.vectors(size), samples)
    for rank in pool.run(_validated, 2, plan.to_json()):
        assert rank["samples"] == samples
        assert rank["loss"][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("axes", "blocks"), [("axis dp = 2", FULL), ("axis pp = 2; axis fsdp = 2", f"{SHARDED}\n{piped(2)}")])
def test_training_is_the_same_to_the_bit_with_and_without(pool: Pool, axes: str, blocks: str, tmp_path: Path) -> None:
    """The model drops and normalises: random numbers and running statistics are part of what must not change."""
    metrics = tmp_path / "metrics.jsonl"
    with_it = compiled(axes, "noisy", 'vectors", size = 24', blocks=blocks, steps=5, more=held_out('vectors", size = 11', "every = 2"))
    without = compiled(axes, "noisy", 'vectors", size = 24', blocks=blocks, steps=5)
    ours = pool.run(trained, with_it.world_size, with_it.to_json(), str(metrics))
    theirs = pool.run(trained, without.world_size, without.to_json())
    assert ours[0]["losses"] == theirs[0]["losses"]
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    told = [line for line in lines if "validation_loss" in line]
    assert [line["step"] for line in told] == [1, 3, 4]
    assert {line["validation_samples"] for line in told} == {11}
    assert len({line["validation_loss"] for line in told}) == 3
    assert [line["loss"] for line in lines if "loss" in line] == theirs[0]["losses"]


def test_a_session_without_held_out_data_says_so(pool: Pool) -> None:
    plan = compiled("axis dp = 1", "own loss", 'vectors", size = 24')
    with pytest.raises(RunError, match="no held-out data"):
        pool.run(_validated, 1, plan.to_json())


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ('vectors", size = 0', "the data set is empty"),
        ('words_rows", size = 9', '"x" is float32 with 3 dims, and float32 with 2 dims in the data that is trained on'),
        ('mixed_rows", size = 9, by_row = true', "its rows have x, target, mask, those that are trained on have x, target"),
        ('vectorz", size = 9', "did you mean vectors"),
    ],
)
def test_held_out_data_that_cannot_be_used_is_found_before_the_run(data: str, told: str) -> None:
    text = spec_text("axis dp = 1", "own loss", 'vectors", size = 24')
    (found,) = [d for d in pdsl.check(text + held_out(data)) if d.code != "PDL203"]
    assert (found.code, found.span is not None and found.span.begin.line) == ("PDL806", len(text.splitlines()) + 1)
    assert told in found.message
    with pytest.raises(ModelError, match=re.escape(told)):
        pdsl.compile(pdsl.load(text + held_out(data)))


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved_1f1b", "interleaved_zero_bubble"])
def test_forwards_alone_run_in_the_order_of_the_schedule(name: str) -> None:
    family = SCHEDULES[name]
    schedule = family.accumulate(2, 4, 2 if family.virtual else 1, 1)
    for row, whole in zip(forward_rows(schedule), schedule.rows, strict=True):
        assert [o for o in row if isinstance(o, Operation)] == [o for o in whole if o.op.value == "F"]
