"""What `pdsl simulate` asks: a plan under a trace of failures, by strategy.

Everything that is assumed, because neither the spec nor the command says it, is told in `Simulation.assumed`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import inf
from pathlib import Path

from attrs import evolve, fields, frozen

from pdsl.grammar.errors import PdslError
from pdsl.lowering.goodput import Checkpoints, Goodput, Strategy, Workload, simulate_run, young
from pdsl.lowering.plan import Plan
from pdsl.lowering.rivals import bamboo, by_parameters, oobleck, varuna
from pdsl.lowering.spec import Spec
from pdsl.lowering.strategies import Times, pdsl, reroute, restore, retemplate
from pdsl.lowering.traces import Exposure, Trace, exposure, random_trace, read_trace, steady_trace
from pdsl.lowering.workload import node_state, plan_workload, step_flops

__all__ = ["STRATEGIES", "Options", "Simulation", "SimulationError", "failures", "options_of", "simulate"]

STRATEGIES = ("pdsl", "retemplate", "reroute", "restore", "oobleck", "varuna", "bamboo")
"""PDSL's answers, all and each alone; then the models of others."""

REROUTE_SECONDS, RETEMPLATE_SECONDS = 0.2, 0.5
"""What PDSL aims at: from a kill to the next step, beyond work that is done again."""

FLOPS = {"cpu": 5e10, "cuda": 2e14}
"""FLOP/s of a rank where nothing is known."""


class SimulationError(PdslError):
    """What was asked for cannot be simulated; the message says what would do."""


@frozen
class Options:
    """What the command says. None: not said, and found elsewhere or assumed. Times in seconds, `rate` and `rack_rate` a node and day."""

    failures: str
    seed: int = 0
    days: float = 30.0
    nodes: int | None = None
    rack_rate: float = 0.0
    rack_size: float = 4.0
    repair_hours: float | None = None
    step_seconds: float | None = None
    flops_per_rank: float | None = None
    recovery_seconds: float | None = None
    restart_seconds: float | None = None
    checkpoint_seconds: float | None = None
    checkpoint_every: int | None = None
    strategies: tuple[str, ...] = STRATEGIES


def options_of(given: argparse.Namespace) -> Options:
    """The options of the command line. Raises SimulationError for a strategy that there is not."""
    unknown = [name for name in given.strategy if name not in STRATEGIES]
    if unknown:
        raise SimulationError(f"there is no strategy {unknown[0]!r}; there are {', '.join(STRATEGIES)}")
    chosen = tuple(name for name in STRATEGIES if name in given.strategy) or STRATEGIES
    known = {f.name for f in fields(Options)} - {"strategies"}
    return Options(**{name: value for name, value in vars(given).items() if name in known}, strategies=chosen)


@frozen
class Simulation:
    """What came out. `step_seconds` are of the plan on `nodes` nodes; `used` nodes train when all of the trace are there; `told` has a line for each strategy, `assumed` one for each assumption."""

    name: str
    trace: Trace
    exposure: Exposure
    nodes: int
    used: int
    step_seconds: float
    results: tuple[Goodput, ...]
    told: tuple[tuple[str, str], ...]
    assumed: tuple[str, ...]


def simulate(plan: Plan, spec: Spec | None, options: Options) -> Simulation:
    """Simulate a plan. `spec` may say the bandwidth and how often checkpoints are written.

    Raises SimulationError if the trace cannot be had or never has enough nodes for one pipeline, TraceError if its text is wrong.
    """
    assumed: list[str] = []
    trace = failures(options, len(plan.nodes))
    flop = _seconds_per_flop(plan, options, assumed)
    job = plan_workload(plan, flop)
    if trace.peak < job.least:
        raise SimulationError(
            f"{trace.name} has at most {trace.peak} nodes at once; the smallest pipeline of {plan.name} takes {job.least}"
        )
    strain = exposure(trace, lose=job.lose, least=job.least)
    made = _strategies(plan, spec, job, trace, strain, options, assumed)
    results = tuple(simulate_run(trace, strategy, job) for strategy in made)
    return Simulation(
        plan.name,
        trace,
        strain,
        len(plan.nodes),
        sum(job.pipelines(trace.peak)),
        float(step_flops(plan)) * flop,
        results,
        tuple((s.name, s.told) for s in made),
        tuple(assumed),
    )


# --- failures -------------------------------------------------------------------------------------------------------------------------------


def failures(options: Options, nodes: int) -> Trace:
    """The trace of `--failures`: a file, `rate:R` (losses a node and day) or `every:S` (one loss every S seconds), of `nodes` nodes by default.

    Raises SimulationError, TraceError.
    """
    count = options.nodes or nodes
    kind, _, value = options.failures.partition(":")
    if kind in {"rate", "every"}:
        number = _number(value, options.failures)
        if kind == "every":
            return steady_trace(count, number, min(count, max(1, int(options.days * 86400 / number) - 1)))
        repair = options.repair_hours * 3600 if options.repair_hours is not None else None
        try:
            return random_trace(
                count, options.days, number, seed=options.seed, rack_rate=options.rack_rate, rack_size=options.rack_size, repair=repair
            )
        except ValueError as error:
            raise SimulationError(str(error)) from None
    try:
        text = Path(options.failures).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SimulationError(
            f"{options.failures} cannot be read: {error.strerror}; --failures takes a trace (lines of ms,add|remove,node), rate:R or every:S"
        ) from None
    except UnicodeDecodeError:
        raise SimulationError(f"{options.failures} is not UTF-8 text; a trace has lines of ms,add|remove,node") from None
    return read_trace(text, options.failures)


def _number(text: str, whole: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < inf:
        raise SimulationError(
            f"{whole}: {text!r} is no number above zero; rate:0.0065 is losses a node and day, every:600 is one loss in 600 s"
        )
    return number


# --- times ----------------------------------------------------------------------------------------------------------------------------------


def _seconds_per_flop(plan: Plan, options: Options, assumed: list[str]) -> float:
    if options.step_seconds is not None:
        return options.step_seconds / float(step_flops(plan))
    if options.flops_per_rank is not None:
        return 1 / options.flops_per_rank
    flops = FLOPS["cpu" if plan.device == "cpu" else "cuda"]
    assumed.append(f"{flops:.0e} FLOP/s of each rank; --step-seconds takes what was measured, --flops-per-rank a better guess")
    return 1 / flops


def _strategies(
    plan: Plan, spec: Spec | None, job: Workload, trace: Trace, strain: Exposure, options: Options, assumed: list[str]
) -> tuple[Strategy, ...]:
    parameters = float(plan.facts.numel)
    length = "interpolated by parameters between published models"
    restart = options.restart_seconds
    if restart is None:
        restart = by_parameters(parameters, lambda p: p.restart)
        assumed.append(f"a restart takes {restart:.0f} s, {length}; --restart-seconds")
    write = options.checkpoint_seconds
    if write is None:
        write = by_parameters(parameters, lambda p: p.write)
        assumed.append(f"writing a checkpoint takes {write:.1f} s, {length}; --checkpoint-seconds")
    times = _own_times(plan, spec, trace, restart, options, assumed)
    often, seldom = _checkpoints(spec, trace, strain, write, options, assumed)
    pause = by_parameters(parameters, lambda p: p.recovery)
    local = by_parameters(parameters, lambda p: p.local)
    makers: dict[str, Callable[[], Strategy]] = {
        "pdsl": lambda: pdsl(job, times, seldom),
        "retemplate": lambda: retemplate(job, times, seldom),
        "reroute": lambda: reroute(job, times, seldom),
        "restore": lambda: restore(job, times, often),
        "oobleck": lambda: oobleck(job, evolve(times, retemplate=pause), seldom),
        "varuna": lambda: varuna(job, times, often, pipeline=job.least),
        "bamboo": lambda: bamboo(job, evolve(times, retemplate=local), seldom, pipeline=job.least),
    }
    return tuple(makers[name]() for name in options.strategies)


def _own_times(plan: Plan, spec: Spec | None, trace: Trace, restart: float, options: Options, assumed: list[str]) -> Times:
    bandwidth = spec.cluster.bandwidth if spec is not None else None
    moving = node_state(plan) / bandwidth if bandwidth else 0.0
    if options.recovery_seconds is not None:
        return Times(options.recovery_seconds, options.recovery_seconds + moving, restart, trace.mean_gap)
    assumed.append(f"PDSL re-routes in {REROUTE_SECONDS} s and re-templates in {RETEMPLATE_SECONDS} s, as it aims to; --recovery-seconds")
    return Times(REROUTE_SECONDS, RETEMPLATE_SECONDS + moving, restart, trace.mean_gap)


def _checkpoints(
    spec: Spec | None, trace: Trace, strain: Exposure, write: float, options: Options, assumed: list[str]
) -> tuple[Checkpoints, Checkpoints]:
    """For strategies that fall back at every loss, and for those that only do beyond the budget."""
    steps = options.checkpoint_every
    if steps is None and spec is not None and spec.checkpoint is not None:
        steps = spec.checkpoint.every
    if steps is not None:
        return (Checkpoints(steps=steps, write=write),) * 2
    length = trace.end / 1000
    often, seldom = young(write, length, strain.instants), young(write, length, strain.beyond)
    assumed.append(
        f"a checkpoint every {often:.0f} s where every loss needs it, every {seldom:.0f} s where only losses beyond the budget do (Young's formula); "
        "--checkpoint-every"
    )
    return Checkpoints(interval=often, write=write), Checkpoints(interval=seldom, write=write)
