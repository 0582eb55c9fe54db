"""Simulated against executed: stages that sleep for known times, under every schedule, in processes that talk over gloo.

    python tests/benchmarks/sleeping_stages.py [--positions P] [--microbatches M] [--unit SECONDS] [--uneven SHARE] [--schedule NAME]... [--json FILE]

The figure is the time of a step (median, from the moment all ranks begin to the one in which all agree on its numbers) divided by what the simulator
says. Exit status 1 if one is off by more than 5 %. Sleeping needs no processor, but waking up does: on a busy machine take a longer unit.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a plain checkout will do

from attrs import frozen

import pdsl
from pdsl.lowering.plan import Plan
from pdsl.lowering.schedules import SCHEDULES
from pdsl.lowering.simulate import StageCosts, simulate
from tests.benchmarks._sleepers import step_times
from tests.pool import Pool

TOLERANCE = 0.05
STEPS = 3
PARTS = (1.0, 1.2, 0.8)
"""Forward and both halves of the backward of one layer, in units."""

SPEC = """pdsl 1
mesh {{ axis pp = {positions} }}
cluster {{ device = cpu }}
model "tests.benchmarks._sleepers:sleepers" {{ layers = {layers}; forward = {forward}; backward_input = {backward_input}; backward_weight = {backward_weight}; uneven = {uneven} }}
pipeline over pp {{ schedule = {schedule}(microbatches = {microbatches}{virtual}) }}
train {{
  data = source("tests.benchmarks._sleepers:rows")
  objective = mse
  batch = {microbatches}
  steps = 10
  optimizer = sgd(lr = 1e-3)
}}
"""


@frozen
class Figure:
    """Seconds of one step of a schedule."""

    schedule: str
    simulated: float
    executed: float

    @property
    def ratio(self) -> float:
        return self.executed / self.simulated


def plan_of(schedule: str, positions: int, microbatches: int, unit: float, uneven: float) -> Plan:
    """Two layers for each position, as one stage or as two."""
    family = SCHEDULES[schedule]
    forward, backward_input, backward_weight = (f"{unit * part:.6f}" for part in PARTS)
    text = SPEC.format(
        positions=positions,
        layers=2 * positions,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        uneven=uneven,
        schedule=schedule,
        microbatches=microbatches,
        virtual=", virtual = 2" if family.virtual else "",
    )
    return pdsl.compile(pdsl.load(text))


def simulated(plan: Plan, unit: float, uneven: float) -> float:
    """What the simulator says of the plan's rows with the times that its stages sleep. The first stage has all of its backward in the weight half."""
    template = plan.templates[0]
    sums = [sum(1.0 + uneven * (i % 2) for i in range(s.start, s.stop)) * unit for s in template.stages]
    forward, backward_input, backward_weight = ([part * s for s in sums] for part in PARTS)
    backward_input[0], backward_weight[0] = 0.0, backward_input[0] + backward_weight[0]
    costs = StageCosts(tuple(forward), tuple(backward_input), tuple(backward_weight))
    return float(simulate(template.schedule, costs).makespan)


def measure(pool: Pool, schedule: str, positions: int, microbatches: int, unit: float, uneven: float) -> Figure:
    plan = plan_of(schedule, positions, microbatches, unit, uneven)
    ranks = pool.run(step_times, positions, plan.to_json(), STEPS, deadline=300.0)
    return Figure(schedule, simulated(plan, unit, uneven), statistics.median(map(max, zip(*ranks, strict=True))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.02)
    parser.add_argument("--uneven", type=float, default=0.0)
    parser.add_argument("--schedule", action="append", choices=tuple(SCHEDULES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = arguments.schedule or tuple(SCHEDULES)
    os.chdir(Path(__file__).resolve().parents[2])  # from where the model is imported
    pool = Pool()
    try:
        found = []
        print(f"{'schedule':26}{'simulated':>11}{'executed':>11}{'ratio':>8}")
        for name in names:
            figure = measure(pool, name, arguments.positions, arguments.microbatches, arguments.unit, arguments.uneven)
            found.append(figure)
            print(f"{name:26}{1e3 * figure.simulated:8.1f} ms{1e3 * figure.executed:8.1f} ms{figure.ratio:8.3f}", flush=True)
    finally:
        pool.close()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([{"schedule": f.schedule, "simulated": f.simulated, "executed": f.executed} for f in found]))
    return int(any(abs(f.ratio - 1.0) > TOLERANCE for f in found))


if __name__ == "__main__":
    sys.exit(main())
