"""A session that outlives the loss of nodes: one rank of a run with a fault budget.

Between two events it is an ordinary session. After one the rank stands still, reports what it has, and gets the reports of all. From these every
rank finds by itself what is committed, which plan comes next and what must move. Weights are only written after all ranks agreed on a step, and
a new part only replaces the old one after all ranks have voted for it, so whatever is interrupted leaves the state of some step whole.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from attrs import astuple, evolve, frozen

from pdsl.grammar.errors import RunError
from pdsl.lowering.holdings import demand, plan_holdings, state_tensors
from pdsl.lowering.ownership import owned_parameters
from pdsl.lowering.payoff import Gain, gain
from pdsl.lowering.pending import require_executable
from pdsl.lowering.plan import Plan
from pdsl.lowering.programs import program
from pdsl.lowering.recovery import Course, Report, Standing, course, standing
from pdsl.lowering.replan import copies, layers_held, redo, retemplate
from pdsl.lowering.transition import Transition, transition
from pdsl.runtime.build import build
from pdsl.runtime.engine import Engine, Totals
from pdsl.runtime.executor import StepSums
from pdsl.runtime.faults import PeerFault, in_words
from pdsl.runtime.gradients import local_tensor
from pdsl.runtime.groups import CROSS_SOCKETS, ISLAND_SOCKETS, PIPELINE_SOCKETS, CrossGroup, Groups, device_of, island_mesh
from pdsl.runtime.link import Decision, Link
from pdsl.runtime.moves import Placed, carry_out, compare_digests, dtype_in, same_everywhere
from pdsl.runtime.objective import make_objective
from pdsl.runtime.optimizer import OptimizerFactory
from pdsl.runtime.part import WEIGHT, Part, bare_copy, with_memory
from pdsl.runtime.rows import Batch, rank_rows
from pdsl.runtime.session import StepResult
from pdsl.runtime.sockets import Interrupter

__all__ = ["ElasticSession", "Samples"]


class Samples(Protocol):
    """Where the rows of a step come from, on any rank and as often as asked."""

    def ids(self, step: int, places: Sequence[int]) -> Sequence[int]:
        """Sample ids at places of the global batch of a step."""
        ...

    def rows(self, ids: Sequence[int]) -> Batch:
        """The rows of samples."""
        ...


@frozen(eq=False)
class _Staged:
    """A part that was received and verified, not yet known to be everybody's."""

    plan: Plan
    part: Part
    version: int


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
        optimizer: OptimizerFactory | None = None,
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
        on_step: Callable[[StepResult], None] = lambda result: None,
    ) -> None:
        require_executable(plan.pending)
        if plan.budget is None:
            raise RunError("the plan has no fault budget; an ordinary session runs it")
        self.rank, self.link, self.samples = rank, link, samples
        self.device = device_of(plan, rank % plan.ranks_per_node)
        self.steps_taken = 0
        self._plan = plan  # in force; before the start the one to begin with
        self._plans: dict[int, Plan] = {}
        self._holds = -1
        self._generation = -1
        self._node = plan.node(rank)
        self._nodes = frozenset(plan.nodes)
        self._optimizer = optimizer
        self._on_event, self._on_step = on_event, on_step
        self._objective = make_objective(plan.job)
        self._interrupter = Interrupter()
        self._mesh: Any = None
        self._mates: CrossGroup | None = None
        self._part: Part | None = None
        self._staged: _Staged | None = None
        self._gain: Gain | None = None  # of new pipelines over those that are left
        self._engine: Engine | None = None  # of whole steps, or of the rest of an interrupted one
        self._groups: Groups | None = None
        self._clean = True
        self._sums = StepSums()
        self._finished: frozenset[int] = frozenset()
        self._kept: dict[str, torch.Tensor] = {}  # gradients of what is finished of an interrupted step
        self._totals: Totals | None = None
        self._seconds = 0.0
        self._began = 0.0
        self.fault_step = -1
        owned = {p.name for p in owned_parameters(plan, rank)} if rank in plan.ranks else set()
        built = build(plan, owned, self.device)
        self._bare = bare_copy(built)
        self._built: torch.nn.Module | None = built
        link.on_lost = self._on_lost

    # --- steps ------------------------------------------------------------------------------------------------------------------------

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
            try:
                self._run()
            except PeerFault as fault:
                self.recover(str(fault))
        self._improve()

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
        self._clean = False
        sums = engine.compute({m: self.samples.rows(ids) for m, ids in self._ids(engine.plan).items()})
        self._clean = True
        self._sums = StepSums(self._sums.loss + sums.loss, self._sums.tokens + sums.tokens)
        self._finished |= set(engine.plan.pipelines[engine.plan.coordinate(self.rank).pipeline].microbatches)
        totals = self._sum_up(engine)
        self._commit(engine, totals)
        if totals.change:
            self._take(self._stand_still())

    def _sum_up(self, engine: Engine) -> Totals:
        """As the engine's; what one rank of an island learns, all of its ranks learn.

        Otherwise one of them could begin the next step and wait there for another that stands still. Raises PeerFault if none of them knows.
        """
        totals, fault = None, None
        try:
            totals = engine.sum_up(self._sums, self._ids(self._plan), change=self.link.change_asked, seconds=self._seconds)
        except PeerFault as error:
            fault = error
        if self._mates is None:
            known = [totals] if totals is not None else []
        else:
            self._clean = False  # if this fails, one of the island was cut short
            with in_words(lambda: f"at the end of step {self.steps_taken}", self._plan.silence):
                known = [found for row in self._mates.gather(_packed(totals)) if (found := _unpacked(row)) is not None]
            self._clean = True
        if known:
            return known[0]
        raise PeerFault(str(fault))

    def _ids(self, plan: Plan) -> dict[int, Sequence[int]]:
        return {m: self.samples.ids(self.steps_taken, places) for m, places in rank_rows(plan, self.rank).items()}

    def _commit(self, engine: Engine, totals: Totals) -> None:
        """From here on the step is done, also for the ranks that did not hear of it."""
        self._totals = totals
        engine.apply(totals)
        self._seconds = time.perf_counter() - self._began
        self.steps_taken += 1
        self._forget_step()
        self._on_step(StepResult.of(self.steps_taken - 1, totals, engine.plan.job.batch, self._seconds))

    def _forget_step(self) -> None:
        self._sums, self._finished, self._kept = StepSums(), frozenset(), {}
        if self._engine is not None and self._engine.plan is not self._plan and self._groups is not None:
            self._run_plan(self._plan, self._groups)  # the rest of a step is done; whole ones follow

    def _improve(self) -> None:
        """New pipelines, if they pay. Every rank decides alike: all numbers come from the plan and from what was agreed on."""
        if self._gain is None or self._totals is None:
            return
        if self._gain.pays(self._totals.seconds, self._plan.job.steps - self.steps_taken):
            self._take(self._stand_still(asks=True))

    # --- standing still ---------------------------------------------------------------------------------------------------------------

    def _on_lost(self, lost: frozenset[int]) -> None:
        """In the listening thread: end what can no longer succeed. A pipeline that is whole finishes its own work first."""
        if not lost & self._nodes:
            return
        plan = self._plan
        mine = plan.pipelines[plan.coordinate(self.rank).pipeline] if self.rank in plan.ranks else None
        broken = mine is None or any(plan.node(r) in lost for island in mine.islands for r in island)
        self._interrupter.interrupt(*((CROSS_SOCKETS, PIPELINE_SOCKETS) if broken else (CROSS_SOCKETS,)))

    def _stand_still(self, *, asks: bool = False) -> Decision:
        broken = () if self._clean else (ISLAND_SOCKETS,)
        self._interrupter.interrupt(CROSS_SOCKETS, PIPELINE_SOCKETS, *broken)
        if self._groups is not None:
            self._groups.close()
            self._groups = None
        if not self._clean:
            self._finished = frozenset()
        self._interrupter.forget(CROSS_SOCKETS, PIPELINE_SOCKETS)
        kinds, bare = self._kinds()
        report = Report(
            committed=self.steps_taken,
            holds=self._holds,
            staged=self._staged.plan.generation if self._staged is not None else -1,
            finished=tuple(sorted(self._finished)),
            totals=astuple(self._totals) if self._totals is not None else (),
            kinds=kinds,
            bare=bare,
            plan=self._plans[self._holds].hash if self._holds >= 0 else evolve(self._plan, generation=0).hash,
            asks=asks,
            broken=not self._clean,
        )
        begin = time.perf_counter()
        self.link.report(self._generation, **report.to_data())
        decision = self.link.decision()
        self._nodes = frozenset(decision.nodes)
        self._interrupter.forget(CROSS_SOCKETS, PIPELINE_SOCKETS)  # what was lost before is left out of the decision
        if self.link.lost:
            self._interrupter.interrupt(CROSS_SOCKETS, PIPELINE_SOCKETS)
        self._event("agreed", nodes=list(decision.nodes), lost=list(decision.lost), joined=list(decision.joined), seconds=_since(begin))
        return decision

    def _kinds(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What the optimizer keeps, and the parameters with a part here for which it keeps nothing yet."""
        if self._part is None:
            return (), ()
        pairs = [key.split("/", 1) for key in self._part.state() if not key.startswith(f"{WEIGHT}/")]
        kept = {name for _, name in pairs}
        bare = tuple(n for n, p in self._part.parameters.items() if n not in kept and local_tensor(p.data).numel())
        return tuple(dict.fromkeys(kind for kind, _ in pairs)), bare

    def _take(self, decision: Decision) -> None:
        """Go on as a decision says; if that is interrupted, as the next one says."""
        while True:
            try:
                with self._regrouping(decision) as store:
                    self._settle(decision, store)
                return
            except PeerFault as fault:
                self._event("fault", reason=str(fault))
                decision = self._stand_still()

    @contextlib.contextmanager
    def _regrouping(self, decision: Decision) -> Iterator[dist.Store]:
        """The store of a decision. Within, whatever torch says of connections is a fault of a peer."""
        self._generation = decision.generation
        timeout = timedelta(seconds=self._plan.silence)
        try:
            with self._interrupter.making(CROSS_SOCKETS):
                store = dist.TCPStore(decision.host, decision.port, is_master=False, wait_for_workers=False, timeout=timeout)
            with in_words(lambda: f"while generation {decision.generation} was formed", self._plan.silence):
                yield store
        except (dist.DistError, ConnectionError) as error:
            raise PeerFault(f"while generation {decision.generation} was formed: {error}") from None

    def _settle(self, decision: Decision, store: dist.Store) -> None:
        reports = {rank: Report.from_data(data) for rank, data in decision.reports.items()}
        now = standing(reports)
        if now.holds < 0:
            self._begin(decision, store)
            return
        if self._holds >= 0:
            self._catch_up(now)
        if any(rank in reports and reports[rank].broken for rank in self._island_ranks):
            self._clean = False
            self._make_island(store)
        base = self._base(decision, reports, now, store)
        living = {rank: r for rank, r in reports.items() if base.node(rank) in decision.nodes}
        found = course(base, living, decision.nodes, generation=decision.generation)
        if found.plan is None:
            self._move(base, decision, now, store)
        else:
            self._reroute(base, found, store)

    def _begin(self, decision: Decision, store: dist.Store) -> None:
        """The first plan. If nodes were lost before anything was done, the others begin without them."""
        plan = evolve(self._plan, generation=decision.generation)
        if set(decision.nodes) != set(plan.nodes):
            plan = retemplate(plan, decision.nodes, {}, generation=decision.generation)
            self._built = build(plan, {p.name for p in owned_parameters(plan, self.rank)}, self.device)
        assert self._built is not None
        if self._mesh is None:
            self._make_island(store)
        others = {r.plan for r in map(Report.from_data, decision.reports.values())}
        if len(others) > 1:
            raise RunError(f"the nodes hold different plans ({', '.join(sorted(p[:12] for p in others))}): all need one")
        if self._part is None:
            self._part = Part(plan, self.rank, self._mesh, self._built, self._optimizer)
            self._built = None
        self._enter(plan, self._grouped(plan, store))
        self._holds, self._plans = plan.generation, {plan.generation: plan}

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
        plan = Plan.from_json(store.get("plan").decode())
        self.steps_taken = now.committed
        return evolve(plan, job=evolve(plan.job, directory=self._plan.job.directory))

    # --- the two answers --------------------------------------------------------------------------------------------------------------

    def _reroute(self, base: Plan, found: Course, store: dist.Store) -> None:
        """Go on in place: finish the interrupted step with what is left to run, then run whole steps under the new plan."""
        plan = found.plan
        assert plan is not None
        begin = time.perf_counter()
        at = plan.coordinate(self.rank).pipeline
        mine, left = plan.pipelines[at].microbatches, found.run[at]
        again = left == mine
        if again:
            self._sums, self._finished, self._kept = StepSums(), frozenset(), {}
            if self._clean:
                self.part.drop_gradients()
            else:
                self._rebuild(base)
        else:
            self._kept = _added(self._kept, self.part.take_gradients())
        partly = any(run != p.microbatches for run, p in zip(found.run, plan.pipelines, strict=True))
        self._enter(plan, self._grouped(plan, store), redo(plan, dict(enumerate(found.run))) if partly else plan)
        self._gain = gain(plan)
        self._event("rerouted", again=sum(map(len, found.run)), of=plan.microbatches, copies=min(copies(plan)), seconds=_since(begin))

    def _rebuild(self, plan: Plan) -> None:
        """A step was cut short inside the model; a part made anew from the same state has no trace of it."""
        old = self.part
        part = Part(plan, self.rank, self._mesh, with_memory(self._bare, plan, self.rank, self.device), self._optimizer)
        part.load(old.state())
        self._part, self._clean = part, True

    def _move(self, base: Plan, decision: Decision, now: Standing, store: dist.Store) -> None:
        """Go on over all living nodes in new pipelines: state moves, is verified and voted on, and then replaces what was there."""
        begin = time.perf_counter()
        held = {node: layers for node, layers in layers_held(base).items() if node in decision.nodes}
        plan = retemplate(base, decision.nodes, held, generation=decision.generation)
        kinds = now.kinds_in(base)
        rows = plan_holdings(base, now.committed, kinds)
        moves = transition(
            tuple(h for h in rows if base.node(h.owner) in decision.nodes),
            demand(plan, kinds),
            state_tensors(base, kinds),
            node_of=plan.node,
            former=tuple(h for h in rows if base.node(h.owner) not in decision.nodes),
        )
        planned = _since(begin)
        if self._mesh is None:
            self._make_island(store)
        groups = self._grouped(plan, store)
        same_everywhere(groups.control, f"{plan.hash}{moves.hash}")
        grouped = _since(begin) - planned
        if not self._clean and self._part is not None:
            self._rebuild(base)
        part = self._receive(base, plan, moves, now, groups)
        staged = _Staged(plan, part, moves.version)
        self._staged = staged
        same_everywhere(groups.control, "received")  # whoever has the answer of all knows that all have received
        self._adopt(staged)
        self._staged = None
        self._enter(plan, groups)
        self._event(
            "moved",
            bytes=moves.bytes_moved,
            copies=min(copies(plan)),
            pipelines=[len(p.islands) for p in plan.pipelines],
            seconds=_since(begin),
            planning=planned,
            groups=grouped,
        )

    def _receive(self, base: Plan, plan: Plan, moves: Transition, now: Standing, groups: Groups) -> Part:
        kinds = now.kinds_in(base)
        wanted = demand(plan, kinds)
        needs = {n.tensor: n for n in wanted if n.owner == self.rank}
        boxes = {h.tensor: h.box for h in plan_holdings(base, now.committed, kinds) if h.owner == self.rank}
        state = self._part.state() if self._part is not None else {}
        held = {name: Placed(state[name], box) for name, box in boxes.items() if name in state}
        shapes = {tensor.name: tensor.shape for tensor in state_tensors(base, kinds)}
        found = carry_out(moves, self.rank, needs, held, lambda name: dtype_in(plan, name), groups.control)
        compare_digests(groups.control, moves, wanted, self.rank, held, found, shapes)
        part = self._part
        if part is None or not _same_layers(base, plan, self.rank):
            part = Part(plan, self.rank, self._mesh, with_memory(self._bare, plan, self.rank, self.device), self._optimizer)
            part.load(part.empty_state() | {name: placed.tensor for name, placed in found.items()})
        return part

    def _adopt(self, staged: _Staged) -> None:
        """The new part is everybody's; the old one goes."""
        self._close_engine()
        self._part = staged.part
        self._part.drop_gradients()
        self._sums, self._finished, self._kept, self._clean = StepSums(), frozenset(), {}, True
        self._holds = staged.plan.generation
        self._plans = {self._holds: staged.plan}
        self.steps_taken = staged.version

    # --- entering a plan --------------------------------------------------------------------------------------------------------------

    def _grouped(self, plan: Plan, store: dist.Store) -> Groups:
        return Groups(plan, program(plan, self.rank), store, self.device, timedelta(seconds=plan.silence), self._interrupter)

    @property
    def _island_ranks(self) -> tuple[int, ...]:
        size = self._plan.shard_size * self._plan.tensor_size
        first = self.rank - self.rank % self._plan.ranks_per_node % size
        return tuple(range(first, first + size))

    def _make_island(self, store: dist.Store) -> None:
        """The groups of this rank's island, at the start and after it was cut short. It dies with its node: no loss elsewhere interrupts it."""
        ranks = self._island_ranks
        if len(ranks) == 1:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        self._interrupter.forget(ISLAND_SOCKETS)
        prefix = dist.PrefixStore(f"island{self._generation}", store)
        timeout = timedelta(seconds=self._plan.silence)
        with self._interrupter.making(ISLAND_SOCKETS):
            self._mesh = island_mesh(self._plan, ranks, self.rank, prefix, self.device, timeout)
            self._mates = CrossGroup(f"mates{ranks[0]}", ranks, self.rank, prefix, torch.device("cpu"), timeout)

    def _enter(self, plan: Plan, groups: Groups, first: Plan | None = None) -> None:
        """Put a plan in force; `first` is the plan of the rest of a step that comes before."""
        self._plan, self._groups = plan, groups
        self._gain = None
        self._run_plan(plan if first is None else first, groups)

    def _run_plan(self, plan: Plan, groups: Groups) -> None:
        self._close_engine()
        self._engine = Engine.of(plan, program(plan, self.rank), self.part, groups, self._objective, self._kept)

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def close(self) -> None:
        """Drop all groups."""
        if self._groups is not None:
            self._groups.close()

    def _event(self, event: str, **what: Any) -> None:
        self._on_event({"event": event, "generation": self._generation, "step": self.steps_taken, **what})


def _since(begin: float) -> float:
    return time.perf_counter() - begin


def _same_layers(one: Plan, other: Plan, rank: int) -> bool:
    """Whether a rank runs the same stages in two plans."""
    return _stages(one, rank) == _stages(other, rank)


def _stages(plan: Plan, rank: int) -> list[tuple[int, int, int, int]]:
    stages = plan.template(plan.coordinate(rank).pipeline).stages
    return [(s, stages[s].start, stages[s].stop, len(stages)) for s in plan.stages_of(rank)]


def _added(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sums by name; a gradient that is on one side only is taken as it is."""
    return {n: one[n] + other[n] if n in one and n in other else one.get(n, other.get(n)) for n in one | other}  # type: ignore[misc]


def _packed(totals: Totals | None) -> torch.Tensor:
    """Agreed numbers as one row of integers; the first one tells whether they are known."""
    if totals is None:
        return torch.zeros(7, dtype=torch.int64)
    floats = torch.tensor([totals.loss, totals.squared, totals.over, totals.seconds], dtype=torch.float64).view(torch.int64)
    return torch.cat([torch.ones(1, dtype=torch.int64), floats, torch.tensor([totals.digest, totals.change], dtype=torch.int64)])


def _unpacked(row: torch.Tensor) -> Totals | None:
    if not int(row[0]):
        return None
    loss, squared, over, seconds = row[1:5].contiguous().view(torch.float64).tolist()
    return Totals(loss, squared, over, int(row[5]), bool(row[6]), seconds)
