"""What each command of the command line does: read, ask `pdsl.api`, print. Returns exit statuses; raises errors for `pdsl.cli` to tell.

Every command imports what it needs, so that `pdsl check --no-model` starts quickly.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from attrs import evolve

from pdsl.cli import CLEAN, FINDINGS, Findings, Invocation

if TYPE_CHECKING:
    from pdsl.grammar.diagnostics import Diagnostic
    from pdsl.grammar.source import Source
    from pdsl.lowering.plan import Plan
    from pdsl.lowering.spec import Spec
    from pdsl.render.terminal import Terminal

__all__ = ["agent", "chaos", "check", "explain", "init", "plan", "run", "simulate", "verify"]


# --- check ----------------------------------------------------------------------------------------------------------------------------------


def check(options: argparse.Namespace) -> int:
    """`pdsl check FILE...`."""
    from pdsl.grammar.diagnostics import Severity

    found: list[Diagnostic] = []
    names, unreadable = [], []
    for file in options.files:
        try:
            name, findings = _check_one(file, options)
        except Invocation as error:
            unreadable.append(str(error))
            continue
        names.append(name)
        found += findings
    if names or not unreadable:
        sys.stdout.write(_report(found, names, options.format))
    if unreadable:
        raise Invocation("\npdsl: ".join(unreadable))
    stops = {Severity.ERROR, Severity.WARNING} if options.fail_on == "warning" else {Severity.ERROR}
    return FINDINGS if any(d.severity in stops for d in found) else CLEAN


def _check_one(file: str, options: argparse.Namespace) -> tuple[str, list[Diagnostic]]:
    from pdsl import api
    from pdsl.grammar.source import Source

    how = {"world": options.world, "overrides": options.overrides, "profile": options.profile, "model": not options.no_model}
    if file == "-":
        source = Source(options.stdin_filename, _text_of(sys.stdin.buffer.read(), "standard input"))
        return options.stdin_filename, api.check_source(source, **how)
    return file, api.check_source(_source(file), **how)


def _report(found: Sequence[Diagnostic], names: Sequence[str], form: str) -> str:
    if form in {"full", "concise"}:
        from pdsl.render.diagnostics import render_concise, render_full

        return (render_full if form == "full" else render_concise)(found, len(names), _terminal())
    from pdsl.render import reports

    if form == "json":
        return reports.render_json(found, names)
    if form == "github":
        return reports.render_github(found)
    if form == "junit":
        return reports.render_junit(found, names)
    import pdsl
    from pdsl.lowering.rules import RULES

    return reports.render_sarif(found, pdsl.__version__, {rule.code: rule.name for rule in RULES})


# --- plan -----------------------------------------------------------------------------------------------------------------------------------


def plan(options: argparse.Namespace) -> int:
    """`pdsl plan FILE`."""
    trace = _Trace(options.print_after)
    made, spec = _plan_of(options, trace)
    if trace.wanted:
        sys.stdout.write(trace.text())
        return CLEAN
    if options.output is not None:
        _write(options.output, _beside(made, options.output).to_json())
    if options.svg is not None:
        from pdsl.render.svg import schedule_svg

        _write(options.svg, schedule_svg(made))
    if options.format == "json":
        from pdsl.render.plan_json import render_plan_json

        sys.stdout.write(render_plan_json(made, spec.cluster.memory if spec is not None else None))
        return CLEAN
    from pdsl.render.plan import render_plan

    terminal = _terminal()
    sys.stdout.write(render_plan(made, spec=spec, terminal=terminal))
    if options.origins:
        if spec is None:
            raise Invocation(f"{options.file} is a plan: it holds values, but not where they came from; give the spec")
        from pdsl.render.origins import render_origins

        sys.stdout.write("\n" + render_origins(spec, terminal))
    return CLEAN


class _Trace:
    """Collects what the passes that were asked for have found."""

    def __init__(self, wanted: Sequence[str]) -> None:
        from pdsl.lowering.planner import PASSES

        unknown = [name for name in wanted if name not in PASSES]
        if unknown:
            raise Invocation(f"the planner has no pass {unknown[0]!r}; it has {', '.join(PASSES)}")
        self.wanted = tuple(wanted)
        self._found: list[tuple[str, object]] = []

    def __call__(self, name: str, result: object) -> None:
        if name in self.wanted:
            self._found.append((name, result))

    def text(self) -> str:
        blocks = []
        for name, result in self._found:
            entries = result if isinstance(result, tuple) else (result,)
            blocks.append("\n".join([f"after {name}:", *(f"  {entry}" for entry in entries)]) + "\n")
        return "\n".join(blocks)


def _plan_of(options: argparse.Namespace, trace: _Trace | None = None) -> tuple[Plan, Spec | None]:
    """The plan of a file: of a spec, with the spec, or one that was written before. Findings go to stderr; Findings is raised if they are errors."""
    from pdsl.grammar.diagnostics import Severity
    from pdsl.lowering.planner import plan as plan_spec
    from pdsl.reading import check_rules, examine
    from pdsl.render.diagnostics import render_full

    source = _source(options.file)
    if source.text.lstrip().startswith("{"):
        if options.overrides or options.profile or options.world:
            raise Invocation(f"{options.file} is a plan: --set, --profile and --world change a spec; give the spec")
        if trace is not None and trace.wanted:
            raise Invocation(f"{options.file} is a plan: the passes of the planner run over a spec; give the spec")
        return _read_plan(options.file, source.text), None
    found = examine(source, world=options.world, overrides=options.overrides, profile=options.profile)
    told = [d for d in found.diagnostics if d.severity is not Severity.NOTE]
    if told:
        sys.stderr.write(render_full(told, 1, _terminal(sys.stderr)))
    if found.spec is None or found.facts is None:
        raise Findings
    mesh = check_rules(found.spec, found.facts, options.world, None)
    return plan_spec(found.spec, found.facts, mesh, print_after=trace), found.spec


def _beside(made: Plan, file: str) -> Plan:
    """The plan as it is written into a file: where the modules of its job lie is told from there, so that it runs from any directory."""
    return evolve(made, job=evolve(made.job, directory=os.path.relpath(made.job.directory, Path(file).parent)))


def _read_plan(file: str, text: str) -> Plan:
    from pdsl.grammar.errors import PlanError
    from pdsl.lowering.plan import Plan

    try:
        made = Plan.from_json(text)
    except ValueError as error:
        raise PlanError(f"{file} is no plan of this version: {error}") from None
    return evolve(made, job=evolve(made.job, directory=os.path.normpath(Path(file).parent / made.job.directory)))


# --- run and verify -------------------------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """`pdsl run FILE`."""
    from pdsl import api
    from pdsl.render.terminal import plural

    made, _ = _plan_of(options)
    member = "RANK" in os.environ
    speaks = not member or os.environ["RANK"] == "0"
    if speaks:
        for text in made.pending:
            sys.stderr.write(f"not executed: {text}\n")
    report = api.run(made, steps=options.steps, metrics=options.metrics, log_dir=options.log_dir, port=options.port, resume=options.resume)
    if not speaks:
        return CLEAN
    first, last = report.losses[0], report.losses[-1]
    rate = f"{report.samples_per_second:.1f} samples/s"
    sys.stdout.write(f"{plural(report.steps, 'step')}, {plural(report.samples, 'sample')} in {report.seconds:.1f} s: {rate}\n")
    sys.stdout.write(f"loss {first:.4f} at the first step, {last:.4f} at the last\n")
    if report.metrics is not None:
        sys.stdout.write(f"metrics are in {report.metrics}\n")
    return CLEAN


def agent(options: argparse.Namespace) -> int:
    """`pdsl agent FILE`."""
    from pdsl.agent_command import start_agent

    made, _ = _plan_of(options)
    return start_agent(options, made)


def chaos(options: argparse.Namespace) -> int:
    """`pdsl chaos FILE`."""
    from pdsl.chaos_command import start_chaos

    made, _ = _plan_of(options)
    return start_chaos(options, made)


def verify(options: argparse.Namespace) -> int:
    """`pdsl verify FILE`."""
    from pdsl import api
    from pdsl.render.verify import render_verify

    made, _ = _plan_of(options)
    report = api.verify(made, steps=options.steps, tolerance=options.tolerance)
    sys.stdout.write(render_verify(report, _terminal(), facts=made.facts))
    return CLEAN if report.ok else FINDINGS


# --- simulate -------------------------------------------------------------------------------------------------------------------------------


def simulate(options: argparse.Namespace) -> int:
    """`pdsl simulate FILE --failures TRACE`."""
    from pdsl.lowering.traces import TraceError
    from pdsl.render.goodput import goodput_svg, render_simulation, render_simulation_json
    from pdsl.simulation import SimulationError, options_of
    from pdsl.simulation import simulate as simulate_plan

    try:
        asked = options_of(options)
        made, spec = _plan_of(options)
        found = simulate_plan(made, spec, asked)
    except (SimulationError, TraceError) as error:
        raise Invocation(str(error)) from None
    if options.svg is not None:
        _write(options.svg, goodput_svg(found))
    sys.stdout.write(render_simulation_json(found) if options.format == "json" else render_simulation(found, _terminal()))
    return CLEAN


# --- explain and init -----------------------------------------------------------------------------------------------------------------------


def explain(options: argparse.Namespace) -> int:
    """`pdsl explain [CODE]`."""
    from pdsl.render.explain import UnknownCode, render_codes, render_pairs, render_rule

    terminal = _terminal()
    if options.code == "composability":
        sys.stdout.write(render_pairs(terminal))
        return CLEAN
    try:
        sys.stdout.write(render_codes(terminal) if options.code is None else render_rule(options.code, terminal))
    except UnknownCode as error:
        raise Invocation(str(error)) from None
    return CLEAN


def init(options: argparse.Namespace) -> int:
    """`pdsl init [NAME]`."""
    if not options.name.removesuffix(".pdsl").strip("./ "):
        raise Invocation(f"{options.name!r} is no name for a file")
    path = Path(options.name if options.name.endswith(".pdsl") else f"{options.name}.pdsl")
    text = (Path(__file__).parent / "examples" / "starter.pdsl").read_text(encoding="utf-8").replace("FILE", str(path))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise Invocation(f"{path} exists already; it was left as it is") from None
    except OSError as error:
        raise Invocation(f"{path} cannot be written: {error.strerror}") from None
    sys.stdout.write(f"wrote {path}; try: pdsl check {path}\n")
    return CLEAN


# --- files ----------------------------------------------------------------------------------------------------------------------------------


def _terminal(stream: TextIO | None = None) -> Terminal:
    from pdsl.render.terminal import Terminal

    return Terminal.of(stream or sys.stdout, os.environ)


def _source(file: str) -> Source:
    from pdsl.grammar.source import Source

    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise Invocation(f"{file} cannot be read: {error.strerror}") from None
    return Source(file, _text_of(data, file))


def _text_of(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Invocation(f"{name} is not UTF-8 text: byte {data[error.start]:#04x} at offset {error.start}") from None


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Invocation(f"{file} cannot be written: {error.strerror}") from None
