"""`pdsl agent`: one node of a run on many machines."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from pdsl.cli import CLEAN, Invocation

if TYPE_CHECKING:
    from pdsl.lowering.plan import Plan

__all__ = ["start_agent"]


def start_agent(options: argparse.Namespace, plan: Plan) -> int:
    """Become one node of the plan. Does not return where all is well. Raises Invocation for options that cannot be meant, RunError if nothing can be resumed."""
    from pdsl.api import check_resume
    from pdsl.runtime.node import NodeJob, become_node
    from pdsl.runtime.rendezvous import addresses_of

    if plan.budget is None:
        raise Invocation(
            f"{options.file} has no fault_budget; on many machines such a plan runs under torchrun: torchrun ... -m pdsl run FILE"
        )
    try:
        addresses = addresses_of(options.rendezvous)
    except ValueError as error:
        raise Invocation(f"--rendezvous: {error}") from None
    if options.node is not None and options.node < 0:
        raise Invocation(f"--node {options.node}: nodes are numbered from 0")
    if not 0 < options.patience < float("inf"):
        raise Invocation(f"--patience {options.patience:g} is not a number of seconds above zero")
    if options.resume:
        check_resume(plan)
    cores = len(os.sched_getaffinity(0))
    job = NodeJob(
        plan=plan.to_json(),
        arguments={"steps": options.steps, "resume": options.resume},
        addresses=addresses,
        node=options.node,
        host=options.host,
        threads=max(1, cores // plan.ranks_per_node),
        metrics=options.metrics,
        log_directory=options.log_dir,
        patience=options.patience,
    )
    become_node(job)
    return CLEAN
