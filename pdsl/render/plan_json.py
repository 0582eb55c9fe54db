"""A plan with its costs as one JSON object, for programs. `pdsl plan -o` writes the plan alone, for `pdsl run`."""

from __future__ import annotations

import json
from fractions import Fraction

from attrs import asdict

from pdsl.lowering.cost import cost
from pdsl.lowering.plan import Plan
from pdsl.lowering.proof import prove
from pdsl.render.plan import plan_notes
from pdsl.render.proof import proof_json

__all__ = ["PLAN_FORMAT", "render_plan_json"]

PLAN_FORMAT = "1.1"
"""Version of this form: the minor one goes up when keys are added, the major one when any changes or goes."""


def render_plan_json(plan: Plan, memory: int | None = None) -> str:
    """`memory` are the bytes of one device, for the proof of a fault budget. Sizes are in bytes, traffic in bytes sent in a step, times in FLOPs; shares are fractions of one. Ends with a newline."""
    report, proof = cost(plan), prove(plan, memory)
    found = {
        "format": PLAN_FORMAT,
        "name": plan.name,
        "hash": plan.hash,
        "world_size": plan.world_size,
        "ranks": [_rank(plan, rank) for rank in plan.ranks],
        "memory": [{**asdict(m), "total": m.total} for m in report.memory],
        "traffic": [{**asdict(t), "total": t.total} for t in report.traffic],
        "time": {
            "step": _number(report.step_time),
            "ideal": _number(report.ideal),
            "bubble": _number(report.bubble),
            "templates": [{"makespan": _number(t.makespan), "bubble": _number(t.bubble)} for t in report.templates],
        },
        "proof": proof_json(proof) if proof is not None else None,
        "notes": list(plan_notes(plan)),
        "plan": json.loads(plan.to_json()),
    }
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def _rank(plan: Plan, rank: int) -> dict[str, object]:
    at = plan.coordinate(rank)
    stages = plan.template(at.pipeline).stages
    layers = [layer.name for s in plan.stages_of(rank) for layer in plan.facts.layers[stages[s].start : stages[s].stop]]
    return {"rank": rank, "node": plan.node(rank), **asdict(at), "stages": list(plan.stages_of(rank)), "layers": layers}


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)
