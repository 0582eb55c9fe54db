"""The Python face of PDSL. The command line does nothing that is not here.

A spec is given as a path or as text: a `str` with a line break in it is text, anything else is a path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve

from pdsl.grammar.diagnostics import Diagnostic
from pdsl.grammar.errors import NotExecuted, PlanError, RunError, SpecError
from pdsl.grammar.source import Source
from pdsl.lowering.spec import ModelSpec, PrecisionSpec, Spec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pdsl.lowering.facts import ModelFacts
    from pdsl.lowering.plan import Plan
    from pdsl.runtime.optimizer import OptimizerFactory
    from pdsl.runtime.session import Session
    from pdsl.runtime.train import RunReport
    from pdsl.runtime.verify import VerifyReport

    Model = nn.Module | Callable[..., nn.Module]
    Batch = Mapping[str, Tensor] | Tensor

__all__ = ["PathOrText", "check", "check_resume", "check_source", "compile", "load", "load_source", "run", "session", "verify"]

PathOrText = str | os.PathLike[str]


def check(
    path_or_text: PathOrText,
    *,
    world: int | None = None,
    overrides: Sequence[str] = (),
    profile: str | None = None,
    model: bool = True,
) -> list[Diagnostic]:
    """Find everything that is wrong with a spec. Never raises on a bad spec.

    Args:
        path_or_text: A path, or the text itself if it is a string with a line break.
        world: The number of ranks, where the spec leaves it open. By default what the cluster block says, else the product of the mesh.
        overrides: What `--set` takes, in order: `"layers=48"`, `"train.batch=8"`.
        profile: The profile to apply.
        model: Read the model and its data, which imports torch and runs code of the user unless the facts are cached. Without it only rules that
            need no model apply.

    Returns:
        All findings, errors and warnings alike, in the order of the text. An empty list means that nothing was found.

    Raises:
        OSError: The file cannot be read.
        UnicodeDecodeError: The file is not UTF-8.
    """
    return check_source(_source(path_or_text), world=world, overrides=overrides, profile=profile, model=model)


def load(path_or_text: PathOrText, *, overrides: Sequence[str] = (), profile: str | None = None) -> Spec:
    """Read a spec: every value evaluated, typed, defaults filled, its origin kept. The model is not read.

    What depends on the number of ranks or on the model (microbatches against stages, the batch against both, patterns) is left to `compile`.

    Args:
        path_or_text: A path, or the text itself if it is a string with a line break.
        overrides: What `--set` takes, in order.
        profile: The profile to apply.

    Returns:
        The spec.

    Raises:
        SpecError: The text or what it says is wrong; `diagnostics` holds every finding.
        OSError: The file cannot be read.
        UnicodeDecodeError: The file is not UTF-8.
    """
    return load_source(_source(path_or_text), overrides=overrides, profile=profile)


def compile(  # noqa: A001  `pdsl.compile` is called so, as `torch.compile` is
    spec: Spec,
    *,
    world_size: int | None = None,
    pipelines: Sequence[tuple[int, int]] | None = None,
    facts: ModelFacts | None = None,
    model: Model | None = None,
    batch: Batch | None = None,
) -> Plan:
    """Plan a spec: who holds what and who does what.

    Args:
        spec: What `load` gave.
        world_size: The number of ranks, where the spec leaves it open.
        pipelines: Pipelines of unequal length, (stages, microbatches) each, in place of the replica and pipeline axes of the mesh.
        facts: What is known of the model, if it was read before.
        model: A module, or a callable that makes one, in place of the factory of the spec. A module is copied without its weights.
        batch: An example batch for the model, any number of rows. By default the first rows of the data of the spec.

    Returns:
        The plan: pure data, equal by value, with a hash.

    Raises:
        SpecError: A rule that needs the model, the mesh or the number of ranks is broken.
        ModelError: The model or its data cannot be read.
        PlanError: No plan exists.
    """
    from pdsl.lowering.planner import plan
    from pdsl.reading import check_rules, check_tensor, read_model, read_tensor_facts

    known = facts if facts is not None else read_model(spec, model, batch)
    spec = spec if spec.model is not None else evolve(spec, model=ModelSpec(known.factory))
    mesh = check_rules(spec, known, world_size, pipelines)
    known = read_tensor_facts(spec, known, mesh, model, batch)
    check_tensor(spec, known, mesh)
    made = plan(spec, known, mesh, pipelines=pipelines)
    if world_size is not None and made.world_size != world_size:  # pipelines that were asked for by number; a mesh was checked
        raise PlanError(f"these pipelines need {made.world_size} ranks, the job has {world_size}")
    return made


def run(
    plan: Plan,
    *,
    steps: int | None = None,
    metrics: str | os.PathLike[str] | None = None,
    progress: bool = True,
    log_dir: str | None = None,
    port: int = 0,
    resume: bool = False,
) -> RunReport:
    """Train as a plan says: on local processes, or as one rank of many where torchrun started this process.

    With a fault budget (`lose` of at least 1) each node is an agent of its own with its ranks, and the run goes on through losses.

    Args:
        plan: What `compile` gave.
        steps: Steps to take instead of those of the plan.
        metrics: A file for one JSON object a step.
        progress: Show a bar, or a line now and then, on stderr.
        log_dir: A folder for what each rank prints, one file each.
        port: Where local processes meet; 0 takes any free port. torchrun has its own options for it.
        resume: Begin where the newest checkpoint of the spec ends, under whatever plan it was written; with the first step if there is none yet.

    Returns:
        Losses, samples and seconds of the steps that were taken, the same on every rank.

    Raises:
        RunError: The run could not start or go on, or there is nothing to resume; RankError if one rank failed, NotExecuted if the plan
            asks for what this version cannot do.
    """
    from pdsl.runtime.launch import join, launch, membership, one_voice
    from pdsl.runtime.train import RunReport, train_rank

    _check_steps(steps)
    if resume:
        check_resume(plan)
    member = membership()
    if member is None and plan.budget is not None and plan.budget.lose > 0:
        return _run_resilient(plan, steps, metrics, progress=progress, log_dir=log_dir, port=port, resume=resume)
    told = {"steps": steps, "metrics": None if metrics is None else os.fspath(metrics), "progress": progress}
    if member is not None and plan.budget is not None and plan.budget.lose > 0:
        raise RunError(
            f"the plan is to survive the loss of {plan.budget.lose}, and torchrun ends all ranks when one dies: start "
            "`pdsl agent FILE --rendezvous HOST:PORT` on each machine, or run with fault_budget.lose=0"
        )
    if member is not None:
        store = join(plan, member)
        with one_voice(store, member.rank):
            result = train_rank(plan, member.rank, store, local_rank=member.local_rank, **told)  # type: ignore[arg-type]
    else:
        result = launch(plan, "train", told, log_directory=log_dir, port=port)[0]
    return RunReport(**{**result, "losses": tuple(result["losses"])})


def _run_resilient(
    plan: Plan, steps: int | None, metrics: str | os.PathLike[str] | None, *, progress: bool, log_dir: str | None, port: int, resume: bool
) -> RunReport:
    """One agent for each node of the plan on this machine, as it would be on as many machines."""
    from pdsl.runtime.record import Recorder
    from pdsl.runtime.report import Reporter
    from pdsl.runtime.resilient import launch_resilient
    from pdsl.runtime.train import RunReport

    total = plan.job.steps if steps is None else steps
    path = None if metrics is None else os.fspath(metrics)
    with Reporter(total, metrics=path, progress=progress, generation=0, active=True) as reporter:
        record = Recorder(reporter)
        launch_resilient(plan, "train", {"steps": steps, "resume": resume}, log_directory=log_dir, on_event=record, port=port)
    if not record.losses:
        raise RunError(
            f"the checkpoint is of step {record.began}, and the run has {total} steps: none is left to take; more steps would do"
        )
    losses = tuple(record.losses[step] for step in sorted(record.losses))
    return RunReport(len(losses), losses, sum(record.samples[step] for step in record.losses), record.seconds, path)


def verify(plan: Plan, *, steps: int = 3, tolerance: float | None = None) -> VerifyReport:
    """Run a few steps of a plan on local processes and compare with one process of plain torch.

    Args:
        plan: What `compile` gave.
        steps: Steps to take.
        tolerance: The largest relative deviation that passes, of losses, norms, every gradient, and the weights after each step. By default
            1e-5, or 2e-2 where the plan computes or sums in a low precision, which rounds each order of a sum in its own way.

    Returns:
        Every deviation, the largest first; `ok` says whether all pass.

    Raises:
        RunError: The run could not start or go on.
    """
    from pdsl.lowering.precision import LOW
    from pdsl.runtime.launch import launch
    from pdsl.runtime.verify import assemble, compare, oracle

    _check_steps(steps)
    ours = assemble(plan, launch(plan, "verify", {"steps": steps}))
    if tolerance is None:
        exact = plan.precision == PrecisionSpec() and not any(p.dtype in LOW for p in plan.facts.parameters)
        tolerance = 1e-5 if exact else 2e-2
    return compare(ours, oracle(plan, ours), tolerance)


@contextmanager
def session(plan: Plan, model: Model | None = None, *, optimizer: OptimizerFactory | None = None) -> Iterator[Session]:
    """One rank of a plan inside a loop of your own: `with pdsl.session(plan) as s: result = s.step(batch)`.

    The process is the only rank of a plan of one, or one that torchrun started.

    Args:
        plan: What `compile` gave, the same on every rank.
        model: The model, or a callable that makes it, in place of the plan's own factory.
        optimizer: A function from the local parameters to a torch optimizer that works element by element, in place of the plan's own.

    Yields:
        The session: `step(batch)` takes the global batch, the same on every rank, and makes one optimizer step.

    Raises:
        RunError: This process is not one of the ranks, or the ranks hold different plans.
    """
    from pdsl.runtime.launch import join, membership
    from pdsl.runtime.session import Session

    member = membership()
    if member is None and plan.world_size > 1:
        raise RunError(
            f"the plan has {plan.world_size} ranks and this process is none of them: start it with torchrun --nproc-per-node {plan.world_size}"
        )
    rank, local, store = (0, 0, None) if member is None else (member.rank, member.local_rank, join(plan, member))
    with Session(plan, rank, store, local_rank=local, model=model, optimizer=optimizer) as made:
        yield made


def check_resume(plan: Plan) -> None:
    """Whether a run of a plan can go on from a checkpoint. Raises NotExecuted without a fault budget, RunError if nothing is ever saved."""
    if plan.budget is None or plan.budget.lose < 1:
        raise NotExecuted(
            "going on from a checkpoint is executed for plans with fault_budget { lose = 1 } or more; this plan has no such budget"
        )
    if plan.saving is None:
        raise RunError("there is nothing to go on from: the spec has no checkpoint block, so no run of it has saved anything")


def _check_steps(steps: int | None) -> None:
    if steps is not None and steps < 1:
        raise RunError(f"steps is {steps}: at least one is taken")


# --- what the command line needs beside it ------------------------------------------------------------------------------------------------


def check_source(
    source: Source, *, world: int | None = None, overrides: Sequence[str] = (), profile: str | None = None, model: bool = True
) -> list[Diagnostic]:
    """As `check`, for a text with a name."""
    from pdsl.reading import examine

    return list(examine(source, world=world, overrides=overrides, profile=profile, model=model).diagnostics)


def load_source(source: Source, *, overrides: Sequence[str] = (), profile: str | None = None) -> Spec:
    """As `load`, for a text with a name."""
    from pdsl.reading import examine

    found = examine(source, overrides=overrides, profile=profile, model=False, on_mesh=False)
    if found.spec is None:
        raise SpecError(tuple(d for d in found.diagnostics if d.code != "PDL900"))  # that the model was not read is no news here
    return found.spec


def _source(path_or_text: PathOrText) -> Source:
    if isinstance(path_or_text, str) and "\n" in path_or_text:
        return Source("<text>", path_or_text)
    return Source(os.fspath(path_or_text), Path(path_or_text).read_text(encoding="utf-8-sig"))
