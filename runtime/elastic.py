"""A session that outlives the loss of nodes: one rank of a run with a fault budget.

Between two events it is an ordinary session. After one the rank stands still, reports what it has, and gets the reports of all. From these every
rank finds by itself what is committed, which plan comes next and what must move. Weights are only written after all ranks agreed on a step, and
a new part only replaces the old one after all ranks have voted for it, so whatever is interrupted leaves the state of some step whole.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import astuple, evolve

from pdsl.grammar.errors import RunError
from pdsl.lowering.ownership import owned_parameters
from pdsl.lowering.payoff import Gain, gain
from pdsl.lowering.plan import Plan
from pdsl.lowering.programs import program
from pdsl.lowering.recovery import Course, Report, Standing, course, is_broken, no_way_back, standing
from pdsl.lowering.replan import copies, layers_held, redo, retemplate
from pdsl.lowering.transition import StateLost
from pdsl.runtime.build import build
from pdsl.runtime.engine import Engine, Totals
from pdsl.runtime.faults import PeerFault, in_words
from pdsl.runtime.groups import Groups, device_of
from pdsl.runtime.handover import PartMaker, Phases, Staged, at_hand, one_plan, plan_over, planned
from pdsl.runtime.island import Island
from pdsl.runtime.keeper import Keeper
from pdsl.runtime.link import Decision, Link
from pdsl.runtime.meeting import Meeting
from pdsl.runtime.moves import same_everywhere
from pdsl.runtime.objective import make_objective
from pdsl.runtime.optimizer import OptimizerFactory
from pdsl.runtime.part import Part, bare_copy
from pdsl.runtime.partial import Partial
from pdsl.runtime.rows import Samples, rank_rows
from pdsl.runtime.session import StepResult
from pdsl.runtime.validation import make_validator

__all__ = ["ElasticSession"]

_ATTEMPTS = 20  # each ends with a loss or by chance; that many in a row have a cause that no further one would mend


class ElasticSession:
    """One rank. `start` first, then `step` until done; `recover` after the others were found not to be done.

    `on_event` gets what happens: dicts with `event` and what belongs to it. `on_step` gets each committed step, once. Raises RunError if the
    spec allows no answer to what happened.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        link: Link,
        samples: Samples,
        *,
        resume: bool = False,
        optimizer: OptimizerFactory | None = None,
        chaos: Callable[[str, int], None] = lambda point, step: None,
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
        on_step: Callable[[StepResult], None] = lambda result: None,
    ) -> None:
        if plan.budget is None:
            raise RunError("the plan has no fault budget; an ordinary session runs it")
        self.rank, self.link, self.samples = rank, link, samples
        self.device = device_of(plan, rank % plan.ranks_per_node)
        self.steps_taken = 0
        self._first = self._plan = plan
        self._plans: dict[int, Plan] = {}
        self._holds = -1
        self._resume = resume
        self._chaos = chaos
        self._on_event, self._on_step = on_event, on_step
        self._objective = make_objective(plan.job)
        self._meeting = Meeting(link, plan.nodes, plan.silence, lambda lost: is_broken(self._plan, rank, lost))
        self._island = Island(plan, rank, self.device, self._meeting.interrupter)
        self._validator = make_validator(plan)
        self._keeper = Keeper(plan.saving, rank, self._event, samples.consumed)
        self._part: Part | None = None
        self._staged: Staged | None = None
        self._gain: Gain | None = None  # of new pipelines over those that are left
        self._engine: Engine | None = None  # of whole steps, or of the rest of an interrupted one
        self._groups: Groups | None = None
        self._partial = Partial()
        self._totals: Totals | None = None
        self._seconds = 0.0
        self._began = 0.0
        self.fault_step = -1
        owned = {p.name for p in owned_parameters(plan, rank)} if rank in plan.ranks else set()
        built = build(plan, owned, self.device)
        self._maker = PartMaker(rank, bare_copy(built), self.device, optimizer)
        self._built: torch.nn.Module | None = built

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._plan

    @property
    def part(self) -> Part:
        """What this rank owns now."""
        assert self._part is not None
        return self._part

    def start(self) -> None:
        """Meet the other ranks. A node that joins a run gets the state of the others here."""
        self._take(self._stand_still())

    def step(self) -> None:
        """Take one step, whatever happens meanwhile. `on_step` gets its result.

        Returns after at least one step was committed, or after state had to be taken from a checkpoint.
        """
        before = self.steps_taken
        while self.steps_taken == before:
            if not self.validate():
                continue
            try:
                self._run()
            except PeerFault as fault:
                self.recover(str(fault))
        self._improve()

    def validate(self, *, last: bool = False) -> bool:
        """The loss on held-out data, if it is due. False if nodes were lost meanwhile: then it is due again, or steps are."""
        if self._engine is None or not self._validator.due(self.steps_taken, last=last):
            return True
        self._at("validate")
        self._partial.clean = False
        try:
            found = self._validator.run(self._plan, self._engine, self.steps_taken, self._island.share)
        except PeerFault as fault:
            self.recover(str(fault))
            return False
        self._partial.clean = True
        self._event("validated", loss=found.loss, samples=found.samples, seconds=found.seconds)
        return True

    def recover(self, reason: str) -> None:
        """Stand still, learn what happened and go on from there."""
        self.fault_step = self.steps_taken
        self._event("fault", reason=reason)
        self._take(self._stand_still())

    def _run(self) -> None:
        engine = self._engine
        assert engine is not None
        self._began = time.perf_counter()
        engine.step = self.steps_taken
        self._at("compute")
        self._partial.clean = False
        sums = engine.compute(self.samples.take(self.steps_taken, rank_rows(engine.plan, self.rank)))
        self._partial.clean = True
        self._partial.add(sums, engine.plan.pipelines[engine.plan.coordinate(self.rank).pipeline].microbatches)
        self._at("sums")
        totals = self._sum_up(engine)
        self._at("commit")
        self._commit(engine, totals)
        self._at("applied")
        if totals.change:
            self._take(self._stand_still())

    def _sum_up(self, engine: Engine) -> Totals:
        """As the engine's; what one rank of an island learns, all of its ranks learn.

        Otherwise one of them could begin the next step and wait there for another that stands still. Raises PeerFault if none of them knows.
        """
        totals, fault = None, ""
        asks, saved = self.link.change_asked, self._keeper.saved
        try:
            ids = self.samples.ids(self.steps_taken, rank_rows(self._plan, self.rank))
            coming = self.samples.count(self.steps_taken + 1)
            totals = engine.sum_up(self._partial.sums, ids, change=asks, seconds=self._seconds, saved=saved, coming=coming)
        except PeerFault as error:
            fault = str(error)
            engine.deliver()
        self._partial.clean = False  # if this fails, a rank of the island was cut short
        with in_words(lambda: f"at the end of step {self.steps_taken}", self._plan.silence):
            totals = self._island.share(totals)
        self._partial.clean = True
        if totals is None:
            raise PeerFault(fault)
        return totals

    def _commit(self, engine: Engine, totals: Totals) -> None:
        """From here on the step is done, also for the ranks that did not hear of it."""
        self._totals = totals
        engine.apply(totals)
        self._seconds = time.perf_counter() - self._began
        self.steps_taken += 1
        self._forget_step()
        self._keeper.agreed(totals.saved, self._plan)
        self._keeper.after(self.steps_taken, self._plan, self.part.state)
        self._on_step(StepResult.of(self.steps_taken - 1, totals, self.samples.count(self.steps_taken - 1), self._seconds))

    def _forget_step(self) -> None:
        self._partial.forget()
        if self._engine is not None and self._engine.plan is not self._plan and self._groups is not None:
            self._run_plan(self._plan, self._groups)  # the rest of a step is done; whole ones follow

    def _improve(self) -> None:
        """New pipelines, if they pay. Every rank decides alike: all numbers come from the plan and from what was agreed on."""
        left = self._plan.job.steps - self.steps_taken
        if self._gain is not None and self._totals is not None and self._gain.pays(self._totals.seconds, left):
            self._take(self._stand_still(asks=True))

    # --- standing still ---------------------------------------------------------------------------------------------------------------

    def _stand_still(self, *, asks: bool = False) -> Decision:
        self._meeting.leave(clean=self._partial.clean)
        self._validator.again()
        if self._groups is not None:
            self._groups.close()
            self._groups = None
        if not self._partial.clean:
            self._partial.forget()
        kinds, bare = self._part.kinds() if self._part is not None else ((), ())
        report = Report(
            committed=self.steps_taken,
            holds=self._holds,
            staged=self._staged.plan.generation if self._staged is not None else -1,
            finished=tuple(sorted(self._partial.finished)),
            totals=astuple(self._totals) if self._totals is not None else (),
            kinds=kinds,
            bare=bare,
            plan=self._plans[self._holds].hash if self._holds >= 0 else evolve(self._plan, generation=0).hash,
            asks=asks,
            broken=not self._partial.clean,
        )
        self._at("agree")
        begin = time.perf_counter()
        decision = self._meeting.decision(report)
        who = {"nodes": list(decision.nodes), "lost": list(decision.lost), "joined": list(decision.joined)}
        self._event("agreed", **who, seconds=time.perf_counter() - begin)
        return decision

    def _take(self, decision: Decision) -> None:
        """Go on as a decision says; if that is interrupted, as the next one says."""
        for _ in range(_ATTEMPTS):
            try:
                with self._meeting.store(decision) as store:
                    self._at("group")
                    self._settle(decision, store)
                return
            except PeerFault as fault:
                self._event("fault", reason=str(fault))
                decision = self._stand_still()
        raise RunError(
            f"the nodes agreed {_ATTEMPTS} times on how to go on, and none of it came about; the last decision was {decision.generation}"
        )

    def _settle(self, decision: Decision, store: dist.Store) -> None:
        reports = {rank: Report.from_data(data) for rank, data in decision.reports.items()}
        now = standing(reports)
        if now.holds < 0 or (now.committed == 0 and any(r.holds < 0 for r in reports.values())):
            self._begin(decision, reports, store)
            return
        if self._holds >= 0 or self._staged is not None:
            self._catch_up(now)
        if any(rank in reports and reports[rank].broken for rank in self._island.ranks):
            self._partial.clean = False
            self._island.make(store, decision.generation)
        base = self._base(decision, reports, now, store)
        living = {rank: r for rank, r in reports.items() if base.node(rank) in decision.nodes}
        found = course(base, living, decision.nodes, generation=decision.generation)
        if found.plan is not None:
            self._reroute(base, found.plan, found, store)
            return
        try:
            self._move(base, decision, now, store, tells=self.rank == min(living))
        except StateLost as lost:
            if now.committed > 0:
                raise RunError(f"{lost}; {no_way_back(base)}") from None
            self._begin(decision, reports, store)  # nothing was trained: the seed gives it all again

    def _begin(self, decision: Decision, reports: Mapping[int, Report], store: dist.Store) -> None:
        """The first plan. If nodes were lost or came before a step was done, the others begin with those that are there."""
        one_plan(reports.values())
        plan = evolve(self._first, generation=decision.generation)
        if set(decision.nodes) != set(plan.nodes):
            plan = retemplate(plan, decision.nodes, {}, generation=decision.generation)
            self._built = None
        if not self._island.made or any(rank in reports and reports[rank].broken for rank in self._island.ranks):
            self._island.make(store, decision.generation)
        built = self._built or build(plan, {p.name for p in owned_parameters(plan, self.rank)}, self.device)
        self._part, self._built = Part(plan, self.rank, self._island.mesh, built, self._maker.optimizer), None
        self._partial = Partial()
        groups = self._grouped(plan, store)
        if self._resume:
            self._load(plan, store, groups)
        self._holds, self._plans = plan.generation, {plan.generation: plan}
        self._enter(plan, groups)

    def _load(self, plan: Plan, store: dist.Store, groups: Groups) -> None:
        """Begin where the newest checkpoint ends, if there is one, under whatever plan it was written."""
        checkpoint = self._keeper.find(store, tells=self.rank == plan.ranks[0])
        if checkpoint is None:
            return
        handover = planned(plan, plan, checkpoint.step, {}, checkpoint)
        self._part = handover.receive(self._maker, self._part, self._island.mesh, groups.control)
        self.steps_taken = checkpoint.step
        self._event("restored")

    def _catch_up(self, now: Standing) -> None:
        """Commit what others know to be committed: the step whose numbers did not arrive here, the part that was voted for."""
        if self._staged is not None and self._staged.plan.generation == now.holds:
            self._adopt(self._staged)
        self._staged = None
        if self.steps_taken >= now.committed:
            return
        engine = self._engine
        if engine is None or engine.gradients is None:
            raise RunError(f"rank {self.rank} has no gradients for step {self.steps_taken}, which others have committed")
        self._commit(engine, Totals(*now.totals))  # type: ignore[arg-type]

    def _base(self, decision: Decision, reports: Mapping[int, Report], now: Standing, store: dist.Store) -> Plan:
        """The plan that is held; the ranks that just came get it from one that has it."""
        if not any(r.holds < 0 for r in reports.values()):
            return self._plans[now.holds]
        teller = min(rank for rank, r in reports.items() if r.holds >= 0 and self._plan.node(rank) in decision.nodes)
        if self.rank == teller:
            store.set("plan", self._plans[now.holds].to_json())
        if self._holds >= 0:
            return self._plans[now.holds]
        self._part = None  # what was built for a start that never came about
        plan = Plan.from_json(store.get("plan").decode())
        self.steps_taken = now.committed
        return evolve(plan, job=evolve(plan.job, directory=self._plan.job.directory))

    def _reroute(self, base: Plan, plan: Plan, found: Course, store: dist.Store) -> None:
        """Go on in place: finish the interrupted step with what is left to run, then run whole steps under the new plan."""
        begin = time.perf_counter()
        at = plan.coordinate(self.rank).pipeline
        mine, left = plan.pipelines[at].microbatches, found.run[at]
        again = left == mine
        if again:
            self._partial.forget()
            if self._partial.clean:
                self.part.drop_gradients()
            else:
                self._rebuild(base)
        else:
            self._partial.keep(self.part.take_gradients())
        partly = any(run != p.microbatches for run, p in zip(found.run, plan.pipelines, strict=True))
        self._enter(plan, self._grouped(plan, store), redo(plan, dict(enumerate(found.run))) if partly else plan)
        self._gain = gain(plan)
        self._save_last_copy(plan)
        count = sum(map(len, found.run))
        self._event("rerouted", again=count, of=plan.microbatches, copies=min(copies(plan)), seconds=time.perf_counter() - begin)

    def _save_last_copy(self, plan: Plan) -> None:
        """Some layer is on one node only, and no new pipelines follow that would change it: save what there is, at once."""
        if min(copies(plan)) == 1 and (self._gain is None or not self._gain.renews):
            self._keeper.after(self.steps_taken, plan, self.part.state, now=True)

    def _rebuild(self, plan: Plan) -> None:
        """A step was cut short inside the model; a part made anew from the same state has no trace of it."""
        self._replace(self._maker.make(plan, self._island.mesh, self.part.state()))
        self._partial.clean = True

    def _replace(self, part: Part) -> None:
        self._close_engine()
        if self._part is not None and self._part is not part:
            self._part.release()
        self._part = part

    def _move(self, base: Plan, decision: Decision, now: Standing, store: dist.Store, *, tells: bool) -> None:
        """Go on over all living nodes in new pipelines: state moves, is verified and voted on, and then replaces what was there."""
        phases = Phases()
        held = {node: layers for node, layers in layers_held(base).items() if node in decision.nodes}
        plan = plan_over(base, decision, held, is_new=self._holds < 0)
        handover = at_hand(base, plan, now, self._keeper, store, tells=tells)
        phases.end("planning")
        if not self._island.made:
            self._island.make(store, decision.generation)
        groups = self._grouped(plan, store)
        same_everywhere(groups.control, f"{plan.hash}{handover.moves.hash}")
        phases.end("grouping")
        if not self._partial.clean and self._part is not None:
            self._rebuild(base)
        self._at("move")
        part = handover.receive(self._maker, self._part, self._island.mesh, groups.control)
        self._staged = Staged(plan, part, handover.moves.version)
        phases.end("moving")
        self._at("vote")
        same_everywhere(groups.control, "received")  # whoever has the answer of all knows that all have received
        self._at("enter")
        self._adopt(self._staged)
        self._staged = None
        self._enter(plan, groups)
        self._save_last_copy(plan)
        if handover.checkpoint is not None:
            self._event("restored", lost=now.committed - self.steps_taken)
        lengths = [len(p.islands) for p in plan.pipelines]
        self._event("moved", bytes=handover.moves.bytes_moved, copies=min(copies(plan)), pipelines=lengths, **phases.all())

    def _adopt(self, staged: Staged) -> None:
        """The new part is everybody's; the old one goes."""
        self._replace(staged.part)
        staged.part.drop_gradients()
        self._partial = Partial()
        self._holds = staged.plan.generation
        self._plans = {self._holds: staged.plan}
        self.steps_taken = staged.version

    def _grouped(self, plan: Plan, store: dist.Store) -> Groups:
        return Groups(plan, program(plan, self.rank), store, self.device, timedelta(seconds=plan.silence), self._meeting.interrupter)

    def _enter(self, plan: Plan, groups: Groups, first: Plan | None = None) -> None:
        """Put a plan in force; `first` is the plan of the rest of a step that comes before."""
        self._plan, self._groups, self._gain = plan, groups, None
        self._run_plan(plan if first is None else first, groups)

    def _run_plan(self, plan: Plan, groups: Groups) -> None:
        self._close_engine()
        engine = Engine.of(plan, program(plan, self.rank), self.part, groups, self._objective, self._partial.kept)
        engine.executor.before_backward = lambda: self._at("backward")
        self._engine = engine

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def finish(self) -> None:
        """Bring a checkpoint that is under way to its end; called after the last step. A loss meanwhile is told by the link."""
        with contextlib.suppress(PeerFault), in_words(lambda: "at the last checkpoint", self._plan.silence):
            self._keeper.finish(self._groups.control if self._groups is not None else None, self._plan)

    def close(self) -> None:
        """Drop all groups."""
        if self._groups is not None:
            self._groups.close()

    def _at(self, point: str) -> None:
        self._chaos(point, self.steps_taken)

    def _event(self, event: str, **what: Any) -> None:
        self._on_event({"event": event, "generation": self._meeting.generation, "step": self.steps_taken, **what})
