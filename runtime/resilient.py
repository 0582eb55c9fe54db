"""Launching a plan with a fault budget on this machine: one agent for each simulated node, as it would be on real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pdsl.lowering.plan import Plan
from pdsl.runtime.cluster import Cluster, Overtime
from pdsl.runtime.nurse import Nursery

__all__ = ["Cluster", "Nursery", "Overtime", "launch_resilient"]


def launch_resilient(
    plan: Plan,
    task: str,
    arguments: Mapping[str, object],
    *,
    threads: int | None = None,
    log_directory: str | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    port: int = 0,
) -> dict[int, bytes | None]:
    """Run a task on every rank of a plan, one agent for each node, through losses; what each rank gave to `done`, by rank.

    `on_event` is called in this thread with every event, see `Cluster`. `port` is where agents meet the launcher, 0 for any free one. `threads`
    per rank default to an equal share of the cores. Raises RankError for the rank that ended the run, RunError if no node is left or the
    agents could not be started. On KeyboardInterrupt every process is ended before it goes on.
    """
    cluster = Cluster(plan, task, arguments, threads=threads, log_directory=log_directory, on_event=on_event, port=port)
    with cluster:
        return cluster.wait()
