"""`pdsl chaos`: training with faults on purpose, compared with an undisturbed run."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from pdsl.cli import CLEAN, FINDINGS, Invocation

if TYPE_CHECKING:
    from pdsl.lowering.plan import Plan

__all__ = ["start_chaos"]


def start_chaos(options: argparse.Namespace, plan: Plan) -> int:
    """Run it, and tell of every run when it is over. Exit status 0 if every run kept what was promised, 1 if one did not.

    Raises Invocation for what cannot be tried, RunError if the undisturbed run fails.
    """
    from pdsl.render.chaos import render_begin, render_storm_json, render_summary, render_trial
    from pdsl.render.terminal import Terminal
    from pdsl.storm import storm

    if plan.budget is None or plan.budget.lose < 1:
        raise Invocation(f"{options.file} promises nothing that could be tried: chaos needs fault_budget {{ lose = 1 }} or more")
    kills = plan.budget.lose if options.kills is None else options.kills
    if kills >= len(plan.nodes):
        raise Invocation(f"--kills {kills}: {options.file} has {len(plan.nodes)} nodes, so {len(plan.nodes) - 1} can be lost at most")
    terminal, text = Terminal.of(sys.stdout, os.environ), options.format == "text"
    found = None
    for found in storm(plan, kills=kills, runs=options.runs, seed=options.seed, steps=options.steps, tolerance=options.tolerance):
        if text:
            sys.stdout.write(render_trial(found.trials[-1], found, terminal) if found.trials else render_begin(found, terminal))
            sys.stdout.flush()
    assert found is not None
    sys.stdout.write(render_summary(found, terminal) if text else render_storm_json(found))
    return CLEAN if found.ok else FINDINGS
