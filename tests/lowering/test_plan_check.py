"""Plans whose parts do not fit together are refused in words, wherever the change was made."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pdsl.lowering.plan import Plan
from pdsl.lowering.plan_check import check_plan
from tests.plans import facts, heterogeneous, rectangular


@pytest.mark.parametrize(
    "plan",
    [
        heterogeneous(),
        rectangular(),
        rectangular(tensor=2, replicas=2),
        rectangular(schedule="interleaved_1f1b", virtual=2, model=facts(8)),
    ],
)
def test_what_the_planner_makes_is_sound(plan: Plan) -> None:
    assert check_plan(plan) == ()


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "batch": (lambda p: p["job"].update(batch=15), "a batch of 15 is not divided by 4 microbatches x 2 shard ranks = 8"),
    "no batch": (lambda p: p["job"].update(batch=0), "job.batch is 0: it is at least 1"),
    "shards": (lambda p: p.update(shard_size=3), "pipeline 0 has an island that is not of 3 ranks (shard 3 x tensor 1)"),
    "device": (lambda p: p.update(device="tpu"), 'device is "tpu": it is auto, cpu or cuda'),
    "ranks": (lambda p: p["pipelines"][0]["islands"][0].__setitem__(1, 7), "the islands hold ranks [0, 2, 3, 7]: each of 0 to 3"),
    "islands": (lambda p: p["pipelines"][0]["islands"].pop(), "pipeline 0 has 1 islands, and its template 2 positions"),
    "pipelines": (lambda p: p.update(pipelines=[]), "there is no pipeline"),
    "template": (lambda p: p["pipelines"][0].update(template=5), "pipeline 0 follows template 5, and there are 1"),
    "microbatches": (lambda p: p["pipelines"][0]["microbatches"].__setitem__(0, 3), "the pipelines take microbatches [1, 2, 3, 3]"),
    "fewer microbatches": (lambda p: p["pipelines"][0]["microbatches"].pop(), "takes 3 microbatches, and its schedule 4"),
    "stages": (lambda p: p["templates"][0]["stages"][0].update(stop=1), "template 0: its stages hold layers 0 to 1, 3 to 6"),
    "stage": (lambda p: p["templates"][0]["stages"].pop(), "template 0: 1 stages, and its schedule runs 2"),
    "position": (lambda p: p["templates"][0]["stages"][0].update(position=1), "disagree about positions"),
    "schedule": (lambda p: p["templates"][0]["schedule"]["rows"][0].reverse(), "template 0: position 0, action 0: B of stage 0"),
    "parameter": (lambda p: p["facts"]["parameters"].pop(), "which is no parameter"),
    "layers": (lambda p: p["facts"]["parameters"][0].update(layers=[9]), "is used in layers [9]: the model has layers 0 to 5"),
    "layout": (lambda p: p["layouts"].pop(), "the layouts are not those of the parameters of the model"),
    "dim": (lambda p: p["layouts"][0].update(tensor_dim=2), "is split in dim 2, and has 2"),
    "optimizer": (lambda p: p["job"]["optimizer"].update(call="adagrad"), "job.optimizer is adagrad: there are adamw, sgd"),
    "objective": (lambda p: p["job"].update(objective="mes"), 'job.objective is "mes"'),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_by_hand_is_told(name: str) -> None:
    change, message = CHANGES[name]
    written = json.loads(rectangular().to_json())
    change(written["value"])
    with pytest.raises(ValueError) as caught:
        Plan.from_json(json.dumps(written))
    assert message in str(caught.value)
