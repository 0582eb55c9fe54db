"""`pdsl run --resume`: what goes on from a checkpoint, and what says why it cannot."""

from __future__ import annotations

import json
import shutil

import pytest
from attrs import evolve

import pdsl
from pdsl.api import check_resume
from pdsl.cli import main
from pdsl.grammar.errors import NotExecuted, RunError
from pdsl.lowering.plan import Budget, Saving
from tests.plans import facts, rectangular

SPEC = """\
pdsl 1
cluster {{ nodes = {nodes}; ranks_per_node = 1; device = cpu }}
mesh {{ axis dp = rest; axis pp = 1 to 2 }}
model "pdsl.models:gpt" {{ layers = 3; width = 16; heads = 2; context = 8 }}
shard {{ "**" => replicate() }}
pipeline over pp {{ schedule = one_f_one_b(microbatches = 2) }}
fault_budget {{ lose = 1; silence = 20s }}
checkpoint {{ path = "{saved}"; every = 3 }}
train {{
  data = source("{data}", context = 8)
  batch = {batch}; steps = 6; optimizer = adamw(lr = 1e-2); seed = 3
}}
"""


def steps_in(metrics):
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {line["step"]: (line["loss"], line["digest"]) for line in lines if "loss" in line}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("data", ["pdsl.data:python_source", "tests.batch_models:text"])
def test_a_run_goes_on_from_its_checkpoint_on_another_number_of_nodes(tmp_path, capfd, data):
    file, saved, metrics = tmp_path / "x.pdsl", tmp_path / "saved", tmp_path / "metrics.jsonl"
    argv = ["run", str(file), "--resume", "--metrics", str(metrics)]
    file.write_text(SPEC.format(nodes=2, saved=saved, data=data, batch=8))
    assert main(argv) == 0
    out, err = capfd.readouterr()
    assert f"there is no checkpoint in {saved} yet: training begins with the first step" in err
    assert "6 steps, 48 samples in" in out
    whole = steps_in(metrics)

    file.write_text(SPEC.format(nodes=3, saved=saved, data=data, batch=8))
    assert main(argv) == 1
    assert "the checkpoint is of step 6, and the run has 6 steps: none is left to take; more steps would do" in capfd.readouterr().err

    shutil.rmtree(saved / "step-00000006")
    assert main(argv) == 0
    out, err = capfd.readouterr()
    assert "read from a checkpoint: training goes on after 3 steps" in err
    assert "3 steps, 24 samples in" in out
    rest = steps_in(metrics)
    assert list(rest) == [3, 4, 5]
    assert [digest for _, digest in rest.values()] == [whole[s][1] for s in (3, 4, 5)]
    assert [loss for loss, _ in rest.values()] == pytest.approx([whole[s][0] for s in (3, 4, 5)], rel=1e-6)

    file.write_text(SPEC.format(nodes=2, saved=saved, data=data, batch=4))
    assert main(argv) == 1
    told = "the checkpoint of step 6 was written after 48 samples, and 6 steps of this run take 24: samples would be repeated or skipped"
    assert told in capfd.readouterr().err


@pytest.fixture
def plan():
    model = facts(10)
    made = rectangular(replicas=2, positions=2, shard=1, microbatches=4, batch=16, model=model, ranks_per_node=1)
    return evolve(made, budget=Budget(1, 2, (), "one_f_one_b"), saving=Saving("saved", 3, 2))


def test_what_cannot_be_resumed_says_why(plan):
    check_resume(plan)
    for resumed in (check_resume, lambda p: pdsl.run(p, resume=True)):
        with pytest.raises(NotExecuted, match="this plan has no such budget"):
            resumed(evolve(plan, budget=None))
        with pytest.raises(NotExecuted, match="this plan has no such budget"):
            resumed(evolve(plan, budget=evolve(plan.budget, lose=0)))
        with pytest.raises(RunError, match="the spec has no checkpoint block, so no run of it has saved anything"):
            resumed(evolve(plan, saving=None))


def test_the_agent_of_a_node_refuses_it_too(tmp_path, capsys):
    file = tmp_path / "x.pdsl"
    file.write_text(
        "\n".join(
            line
            for line in SPEC.format(nodes=2, saved="saved", data="pdsl.data:python_source", batch=8).splitlines()
            if "checkpoint" not in line
        )
        + "\n"
    )
    assert main(["agent", str(file), "--rendezvous", "127.0.0.1:1", "--resume"]) == 1
    assert "the spec has no checkpoint block" in capsys.readouterr().err
