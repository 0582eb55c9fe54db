"""Runs with faults on purpose, compared with an undisturbed run: the same losses, the same samples, nothing left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

import pdsl
from pdsl.lowering.plan import Plan
from pdsl.runtime.chaos import Fault
from pdsl.runtime.record import Recorder
from pdsl.runtime.report import Reporter
from pdsl.runtime.resilient import Cluster, Nursery

TOLERANCE = 1e-6
"""The largest relative difference of losses between a disturbed and an undisturbed run."""

DEADLINE = 100.0
"""Seconds of a run on a busy machine; alone on it a run takes three."""

SPEC = """pdsl 1
cluster {{ nodes = {nodes}; ranks_per_node = {ranks}; device = cpu }}
mesh {{ axis dp = rest; axis pp = 2 to 3; {axes} }}
model {model}
shard {{ "**" => {layout} }}
pipeline over pp {{ schedule = {schedule}(microbatches = 4) }}
fault_budget {{ lose = {lose}; silence = {silence}; recover = [{recover}] }}
{checkpoint}
train {{
  {data}
  batch = {batch}; steps = {steps}; optimizer = {optimizer}; clip = 1.0; seed = 3
}}
"""

GPT = '"pdsl.models:gpt" {{ layers = 4; width = 16; heads = 2; context = 8; {} }}'  # to be formatted with further arguments
ADAM = "adamw(lr = 1e-2, eps = 1e-6)"
"""With its default of 1e-8 Adam makes differences of one part in a million out of sums that are rounded in another order."""

TEXT = 'data = source("pdsl.data:python_source", context = 8)'


def plan_of(
    nodes: int = 5,
    *,
    ranks: int = 1,
    lose: int = 1,
    steps: int = 8,
    silence: str = "20s",
    recover: str = "reroute, retemplate, restore",
    checkpoint: str = "",
    batch: int = 48,
    model: str = GPT.format(""),
    data: str = TEXT,
    optimizer: str = ADAM,
    schedule: str = "one_f_one_b",
) -> Plan:
    """A small language model on CPU; two ranks of a node shard its layers. `checkpoint` is the inside of that block."""
    axes, layout = ("axis fsdp = 2", "fsdp(fsdp)") if ranks == 2 else ("", "replicate()")
    text = SPEC.format(
        nodes=nodes,
        ranks=ranks,
        lose=lose,
        steps=steps,
        silence=silence,
        recover=recover,
        checkpoint=f"checkpoint {{ {checkpoint} }}" if checkpoint else "",
        batch=batch,
        axes=axes,
        layout=layout,
        model=model,
        data=data,
        optimizer=optimizer,
        schedule=schedule,
    )
    return pdsl.compile(pdsl.load(text))


Disturb = Callable[[Cluster, dict[str, Any]], None]
Watch = Callable[[Cluster], None]


@frozen
class Storm:
    """What a run left behind: losses and digests by step, all events, seconds; those from each loss to the next committed step."""

    losses: dict[int, float]
    digests: dict[int, str]
    events: list[dict[str, Any]] = field(repr=False)
    seconds: float
    recoveries: list[float]

    def named(self, event: str) -> list[dict[str, Any]]:
        """Events of one kind."""
        return [e for e in self.events if e["event"] == event]

    @property
    def lost(self) -> list[int]:
        """The nodes that were lost, ascending."""
        return sorted(e["node"] for e in self.named("lost"))


def run(
    plan: Plan,
    nursery: Nursery,
    faults: Sequence[Fault] = (),
    *,
    joins: int = 0,
    resume: bool = False,
    timeout: float = 60.0,
    disturb: Disturb | None = None,
    watch: Watch | None = None,
) -> Storm:
    """Train with faults. `joins` nodes come after the second step; `disturb` is called with every event as it comes, `watch` when the run is
    over and what is left of its processes is not ended yet. Whatever the outcome, no process of the run is left.
    """
    record = Recorder(Reporter(plan.job.steps, metrics=None, progress=False, generation=0, active=True))
    begin = time.monotonic()
    left = [joins]
    pids: set[int] = set()

    def on_event(event: dict[str, Any]) -> None:
        record(event)
        pids.update(processes(cluster))
        if event["event"] == "step" and event["step"] >= 1:
            while left[0]:
                left[0] -= 1
                cluster.join()
        if disturb is not None:
            disturb(cluster, event)

    told = {"faults": [f.to_data() for f in faults], "resume": resume}
    cluster = Cluster(plan, "train", told, on_event=on_event, nursery=nursery, threads=1)
    try:
        with cluster:
            pids.update(processes(cluster))
            cluster.wait(timeout)
            seconds = time.monotonic() - begin
            if watch is not None:
                watch(cluster)
    finally:
        await_gone(pids)
    return Storm(record.losses, record.digests, list(cluster.events), seconds, record.recoveries)


def processes(cluster: Cluster, node: int | None = None) -> list[int]:
    """The agents and ranks that have not ended, of one node or of all."""
    nodes = cluster.pids()
    return [pid for n, found in nodes.items() if node in (None, n) for pid in (found["agent"], *found["ranks"].values())]


def lives(pid: int) -> bool:
    """Whether a process runs, or stands still; what is dead and not yet buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def await_gone(pids: Sequence[int] | set[int], deadline: float = 10.0) -> None:
    """Wait until none of the processes lives. Raises AssertionError after so many seconds."""
    limit = time.monotonic() + deadline
    while any(map(lives, pids)):
        assert time.monotonic() < limit, f"processes {sorted(filter(lives, pids))} were left behind"
        time.sleep(0.01)


def deviation(one: Storm, other: Storm) -> float:
    """The largest relative difference of losses; infinite if steps or samples differ."""
    if one.losses.keys() != other.losses.keys() or one.digests != other.digests:
        return float("inf")
    return max(abs(one.losses[s] - other.losses[s]) / abs(one.losses[s]) for s in one.losses)
