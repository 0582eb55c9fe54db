"""Runs with faults on purpose, compared with an undisturbed run: the same losses, the same samples, nothing left behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from attrs import field, frozen

import pdsl
from pdsl.lowering.plan import Plan
from pdsl.runtime.chaos import Fault
from pdsl.runtime.record import Recorder
from pdsl.runtime.report import Reporter
from pdsl.runtime.resilient import Cluster, Nursery

SPEC = """pdsl 1
cluster {{ nodes = {nodes}; ranks_per_node = {ranks}; device = cpu }}
mesh {{ axis dp = rest; axis pp = 2 to 3; {axes} }}
model "pdsl.models:gpt" {{ layers = 4; width = 16; heads = 2; context = 8 }}
shard {{ "**" => {layout} }}
pipeline over pp {{ schedule = one_f_one_b(microbatches = 4) }}
fault_budget {{ lose = {lose}; silence = {silence}; recover = [{recover}] }}
{checkpoint}
train {{
  data = source("pdsl.data:python_source", context = 8)
  batch = {batch}; steps = {steps}; optimizer = adamw(lr = 1e-2); clip = 1.0; seed = 3
}}
"""


def plan_of(
    nodes: int = 5,
    *,
    ranks: int = 1,
    lose: int = 1,
    steps: int = 8,
    silence: str = "10s",
    recover: str = "reroute, retemplate, restore",
    checkpoint: str = "",
    batch: int = 24,
) -> Plan:
    """A small language model on CPU; two ranks of a node shard its layers."""
    axes, layout = ("axis fsdp = 2", "fsdp(fsdp)") if ranks == 2 else ("", "replicate()")
    text = SPEC.format(
        nodes=nodes,
        ranks=ranks,
        lose=lose,
        steps=steps,
        silence=silence,
        recover=recover,
        checkpoint=checkpoint,
        batch=batch,
        axes=axes,
        layout=layout,
    )
    return pdsl.compile(pdsl.load(text))


@frozen
class Storm:
    """What a run left behind: losses and digests by step, all events, seconds."""

    losses: dict[int, float]
    digests: dict[int, str]
    events: list[dict[str, Any]] = field(repr=False)
    seconds: float

    def named(self, event: str) -> list[dict[str, Any]]:
        """Events of one kind."""
        return [e for e in self.events if e["event"] == event]


def run(plan: Plan, nursery: Nursery, faults: Sequence[Fault] = (), *, joins: int = 0, resume: bool = False, timeout: float = 60.0) -> Storm:
    """Train with faults. `joins` nodes come after the second step; stopped nodes go on again when the run is over."""
    record = Recorder(Reporter(plan.job.steps, metrics=None, progress=False, generation=0, active=True))
    begin = time.monotonic()
    left = [joins]

    def on_event(event: dict[str, Any]) -> None:
        record(event)
        if event["event"] == "step" and event["step"] >= 1:
            while left[0]:
                left[0] -= 1
                cluster.join()

    told = {"faults": [f.to_data() for f in faults], "resume": resume}
    cluster = Cluster(plan, "train", told, on_event=on_event, nursery=nursery, threads=1)
    with cluster:
        cluster.wait(timeout)
    return Storm(record.losses, record.digests, list(cluster.events), time.monotonic() - begin)


def deviation(one: Storm, other: Storm) -> float:
    """The largest relative difference of losses; infinite if steps or samples differ."""
    if one.losses.keys() != other.losses.keys() or one.digests != other.digests:
        return float("inf")
    return max(abs(one.losses[s] - other.losses[s]) / abs(one.losses[s]) for s in one.losses)
