"""The proof of a budget on the screen of a plan and in its JSON form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import evolve

import pdsl
from pdsl.lowering.proof import prove
from pdsl.render.plan import render_plan
from pdsl.render.plan_json import render_plan_json
from pdsl.render.proof import render_proof
from pdsl.render.terminal import PLAIN
from tests.face.snapshot import matches_snapshot
from tests.facts import gpt_facts
from tests.lowering.test_elastic import planned

EXAMPLES = Path(pdsl.__file__).parent / "examples"
SEVEN = {"cluster": "nodes = 7; ranks_per_node = 1", "axes": ("dp = rest", "pp = 2 to 3")}

PLANS = {
    "one_loss": planned(),
    "two_losses": planned(budget="fault_budget { lose = 2; silence = 3s }", **SEVEN),
    "no_loss": planned(budget=""),
    "racks": planned(
        budget="fault_budget { unit = domain; lose = 1 }",
        cluster="nodes = 8; ranks_per_node = 1; domain = rack(nodes = 2)",
        axes=("dp = rest", "pp = 2 to 4"),
        batch=64,
    ),
    "many_nodes": planned(
        gpt_facts(layers=9), cluster="nodes = 60; ranks_per_node = 2", axes=("dp = rest", "pp = 4 to 7", "fsdp = 2"), batch=480
    ),
}
PLANS["broken"] = evolve(PLANS["one_loss"], budget=evolve(PLANS["one_loss"].budget, lose=3))


def lines(name: str) -> str:
    proof = prove(PLANS[name], 2**30)
    assert proof is not None
    return "\n".join(render_proof(PLANS[name], proof, PLAIN)) + "\n"


@pytest.mark.parametrize("name", PLANS)
def test_the_proof_of_a_plan(name):
    assert matches_snapshot(f"proof_{name}.txt", lines(name))


@pytest.mark.parametrize("name", PLANS)
def test_no_line_is_wider_than_the_terminal(name):
    assert max(map(len, lines(name).splitlines())) <= 100


def test_a_proof_is_part_of_the_screen_and_of_the_json():
    made = PLANS["one_loss"]
    assert "fault budget: any node may be lost at once" in render_plan(made)
    found = json.loads(render_plan_json(made, 2**30))["proof"]
    assert (found["holds"], found["losses_until_broken"], found["sizes"], found["silent"]) == (True, 2, [2, 3], 2)
    assert [c["what"] for c in found["claims"]][-1] == "memory"
    assert [b["node"] for b in found["blasts"]] == [0, 1, 2, 3, 4]
    assert json.loads(render_plan_json(evolve(made, budget=None)))["proof"] is None


@pytest.mark.parametrize(("name", "lose", "nodes"), [("resilient", 1, 5), ("two_losses", 2, 7)])
def test_the_examples_keep_what_they_promise(name, lose, nodes):
    made = pdsl.compile(pdsl.load(EXAMPLES / f"{name}.pdsl"))
    proof = prove(made)
    assert (proof.holds, proof.lose, proof.nodes) == (True, lose, nodes)
    assert len({len(p.islands) for p in made.pipelines}) == 2
