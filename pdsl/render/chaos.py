"""Runs with faults on purpose, one line each and a summary, or as JSON. Nothing is decided here."""

from __future__ import annotations

import json
from collections import Counter
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any

from pdsl.render.terminal import PLAIN, Terminal, join_list, plural, wrapped

if TYPE_CHECKING:
    from pdsl.runtime.chaos import Fault
    from pdsl.storm import Storm, Trial

__all__ = ["CHAOS_FORMAT", "render_begin", "render_storm_json", "render_summary", "render_trial"]

CHAOS_FORMAT = "1.0"
"""Version of the JSON form: the minor one goes up when keys are added, the major one when any changes or goes."""

_HOW = {
    "rank": "rank {rank} of node {node} is killed",
    "node": "node {node} is killed",
    "stop": "node {node} stands still",
    "exit": "rank {rank} of node {node} exits",
    "raise": "rank {rank} of node {node} raises",
}
_POINT = {
    "compute": "before the forward of step {step}",
    "backward": "before a backward of step {step}",
    "sums": "before the sums of step {step}",
    "commit": "at the commit of step {step}",
    "applied": "right after {done}",
    "agree": "before it agrees, from step {step} on",
    "group": "while groups are made, from step {step} on",
    "move": "before state moves, from step {step} on",
    "vote": "after state moved, from step {step} on",
    "validate": "before the held-out data after {done}",
    "enter": "before it enters a new plan, from step {step} on",
}
_COLOUR = {"equal": "green", "beyond": "yellow"}


def render_begin(storm: Storm, terminal: Terminal = PLAIN) -> str:
    """What is run and what it is compared with. Ends with a newline."""
    what = f"{storm.name}: {plural(storm.nodes, 'node')}, budget of {plural(storm.lose, 'loss', 'losses')} at once"
    return f"{terminal.heading(what)}\n  undisturbed  {plural(storm.steps, 'step')} in {storm.undisturbed.seconds:.1f} s\n"


def render_trial(trial: Trial, storm: Storm, terminal: Terminal = PLAIN) -> str:
    """One run: its faults, what was done about them, how it compares. Ends with a newline."""
    verdict = trial.verdict(storm.tolerance)
    ranks_per_node = storm.ranks_per_node
    faults = join_list([_fault_in_words(f, ranks_per_node, trial) for f in trial.faults])
    told = f"{faults}: {_outcome(trial, verdict, storm.tolerance)}, {trial.seconds:.1f} s"
    lines = wrapped(told, terminal.width, f"  seed {trial.seed:<7} ")
    shown = _SHOWN[verdict]
    return "\n".join(lines).replace(shown, terminal.paint(shown, _COLOUR.get(verdict, "red")), 1) + "\n"


_SHOWN = {"equal": "equal", "unequal": "NOT EQUAL", "late": "LATE", "hung": "HUNG", "ended": "FAILED", "beyond": "beyond the budget"}


def _fault_in_words(fault: Fault, ranks_per_node: int, trial: Trial) -> str:
    node = fault.rank // ranks_per_node
    point = _POINT[fault.point].format(step=fault.step, done=plural(max(1, fault.step), "step"))
    told = f"{_HOW[fault.how].format(rank=fault.rank, node=node)} {point}"
    return told if node in trial.struck or trial.end else f"{told} (it never came there)"


def _outcome(trial: Trial, verdict: str, tolerance: float) -> str:
    answers = f"{' and '.join(trial.answers)}; " if trial.answers else ""
    pauses = f", recovered in {join_list([f'{s:.2f} s' for s in trial.recoveries])}" if trial.recoveries else ""
    deviation = f"losses within {trial.deviation:.1e} over {plural(trial.compared, 'step')}"
    match verdict:
        case "equal":
            return f"{answers}equal, {deviation}{pauses}"
        case "late":
            return f"{answers}LATE, a recovery may take {trial.allowed:.1f} s; {deviation}{pauses}"
        case "unequal" if not trial.samples:
            return f"{answers}NOT EQUAL, other samples or steps than undisturbed{pauses}"
        case "unequal":
            off = f"{trial.deviation:.1e}" if isfinite(trial.deviation) else "no number"
            return f"{answers}NOT EQUAL, losses differ by {off} within {plural(trial.compared, 'step')} ({tolerance:g} passes){pauses}"
        case "hung":
            return f"{answers}HUNG and was ended: {trial.end}"
        case "ended":
            return f"{answers}FAILED within the budget, ended with: {trial.end}"
    return f"{answers}beyond the budget, ended with: {trial.end}"


def render_summary(storm: Storm, terminal: Terminal = PLAIN) -> str:
    """How many runs ended how, how long recoveries took, what was compared. Ends with a newline."""
    verdicts = Counter(t.verdict(storm.tolerance) for t in storm.trials)
    counted = ", ".join(f"{verdicts[v]} {shown}" for v, shown in _SHOWN.items() if verdicts[v])
    text = f"{plural(len(storm.trials), 'run')}: {counted}"
    lines = ["", terminal.paint(text, "green" if storm.ok else "red")]
    pauses = [s for t in storm.trials for s in t.recoveries]
    if pauses:
        lines += wrapped(f"from a known loss to the next step: median {median(pauses):.2f} s, longest {max(pauses):.2f} s", terminal.width)
    window = max((t.compared for t in storm.trials), default=0)
    lines += wrapped(
        f"losses are compared over at most {plural(window, 'step')} from the first that a fault could change, since rounding grows with every "
        f"step; samples over all {storm.steps}",
        terminal.width,
    )
    return "\n".join([*lines, ""])


def render_storm_json(storm: Storm) -> str:
    """All runs as one JSON object. Seconds throughout; `deviation` is null where there is nothing to compare. Ends with a newline."""
    data = {
        "format": CHAOS_FORMAT,
        "name": storm.name,
        "nodes": storm.nodes,
        "lose": storm.lose,
        "steps": storm.steps,
        "tolerance": storm.tolerance,
        "ok": storm.ok,
        "undisturbed": {"seconds": storm.undisturbed.seconds, "losses": list(storm.undisturbed.losses)},
        "runs": [_trial_data(t, storm) for t in storm.trials],
    }
    return json.dumps(data, indent=2) + "\n"


def _trial_data(trial: Trial, storm: Storm) -> dict[str, Any]:
    return {
        "seed": trial.seed,
        "verdict": trial.verdict(storm.tolerance),
        "ok": trial.ok(storm.tolerance),
        "promised": trial.promised,
        "faults": [f.to_data() for f in trial.faults],
        "struck": list(trial.struck),
        "answers": list(trial.answers),
        "end": trial.end or None,
        "deviation": trial.deviation if isfinite(trial.deviation) and not trial.end else None,
        "compared": trial.compared,
        "samples": trial.samples if not trial.end else None,
        "seconds": trial.seconds,
        "recoveries": list(trial.recoveries),
        "losses": list(trial.losses),
    }
