"""A rank's next part out of a transition: state that is kept, received or read becomes the part of another plan, and is compared as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from attrs import frozen
from torch import nn

from pdsl.grammar.errors import PlanError, RunError
from pdsl.lowering.holdings import Holding, demand, plan_holdings, state_tensors
from pdsl.lowering.plan import Plan
from pdsl.lowering.recovery import Report, Standing
from pdsl.lowering.replan import retemplate
from pdsl.lowering.transition import Move, StateLost, Transition, transition
from pdsl.runtime.checkpoint import Checkpoint
from pdsl.runtime.faults import PeerFault
from pdsl.runtime.groups import CrossGroup
from pdsl.runtime.keeper import Keeper
from pdsl.runtime.link import Decision
from pdsl.runtime.meshes import IslandMesh
from pdsl.runtime.moves import Placed, carry_out, compare_digests, dtype_in
from pdsl.runtime.optimizer import OptimizerFactory
from pdsl.runtime.part import Part, with_memory

__all__ = ["Handover", "PartMaker", "Phases", "Staged", "at_hand", "one_plan", "plan_over", "planned"]


@frozen
class PartMaker:
    """Makes parts of one rank from the bare model."""

    rank: int
    bare: nn.Module
    device: torch.device
    optimizer: OptimizerFactory | None = None

    def make(self, plan: Plan, mesh: IslandMesh | None, state: Mapping[str, torch.Tensor]) -> Part:
        """A part with this state."""
        part = Part(plan, self.rank, mesh, with_memory(self.bare, plan, self.rank, self.device), self.optimizer)
        part.load(part.empty_state() | dict(state))
        return part


class Phases:
    """The seconds of what follows one another: `end` names what was done since the last."""

    def __init__(self) -> None:
        self._begin = self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        now = time.perf_counter()
        self._seconds[name], self._last = now - self._last, now

    def all(self) -> dict[str, float]:
        """By name, and `seconds` of all together."""
        return {**self._seconds, "seconds": time.perf_counter() - self._begin}


@frozen(eq=False)
class Staged:
    """A part that was received and verified, not yet known to be everybody's."""

    plan: Plan
    part: Part
    version: int


@frozen(eq=False)
class Handover:
    """A transition from what is held under `base` to `plan`, and what it takes to carry it out.

    `kinds` are the kinds of state by parameter that exist at the version of the transition.
    """

    base: Plan
    plan: Plan
    moves: Transition
    kinds: Mapping[str, tuple[str, ...]]
    checkpoint: Checkpoint | None = None

    def receive(self, maker: PartMaker, part: Part | None, mesh: IslandMesh | None, group: CrossGroup | None) -> Part:
        """This rank's part under the new plan; the old one is not changed, and is given back if it is the same. Raises RunError if state is damaged."""
        rank, held = maker.rank, {}
        if part is not None and self.checkpoint is None:
            state = part.state()
            boxes = {h.tensor: h.box for h in plan_holdings(self.base, 0, self.kinds) if h.owner == rank}
            held = {name: Placed(state[name], box) for name, box in boxes.items() if name in state}
        needs = {n.tensor: n for n in demand(self.plan, self.kinds) if n.owner == rank}
        found = carry_out(self.moves, rank, needs, held, lambda name: dtype_in(self.plan, name), group, self._reader())
        shapes = {t.name: t.shape for t in state_tensors(self.base, self.kinds)}
        compare_digests(group, self.moves, rank, held, found, shapes)
        if part is not None and self.checkpoint is None and _same_layers(self.base, self.plan, rank):
            return part
        return maker.make(self.plan, mesh, {name: placed.tensor for name, placed in found.items()})

    def _reader(self) -> Callable[[Move], torch.Tensor] | None:
        checkpoint = self.checkpoint
        return None if checkpoint is None else lambda move: checkpoint.read(move.tensor, move.box)


def plan_over(base: Plan, decision: Decision, held: Mapping[int, Collection[int]], *, is_new: bool) -> Plan:
    """New pipelines over all nodes of a decision.

    Nodes that came and cannot be used beside the others go again: there an error ends them, and the others agree anew without them (PeerFault).
    Raises PlanError if the nodes cannot be used without that.
    """
    try:
        return retemplate(base, decision.nodes, held, generation=decision.generation)
    except PlanError as error:
        if not decision.joined:
            raise
        raise (RuntimeError if is_new else PeerFault)(f"nodes {decision.joined} are of no use to the run: {error}") from None


def planned(
    base: Plan,
    plan: Plan,
    version: int,
    kinds: Mapping[str, tuple[str, ...]],
    checkpoint: Checkpoint | None = None,
    *,
    lacking: Collection[int] = (),
) -> Handover:
    """The handover of the state after `version` steps, or of what a checkpoint has. `lacking` are ranks of `base` that have nothing.

    Raises StateLost if a part of it is nowhere, RunError if the checkpoint is of another model.
    """
    alive = set(plan.nodes)
    rows = plan_holdings(base, version, kinds)
    if checkpoint is None:
        there = {rank for rank in base.ranks if base.node(rank) in alive and rank not in lacking}
        held: tuple[Holding, ...] = tuple(h for h in rows if h.owner in there)
        former = tuple(h for h in rows if h.owner not in there)
    else:
        held, former, kinds = checkpoint.holdings(), (), checkpoint.kinds
        _check_model(plan, checkpoint)
    moves = transition(held, demand(plan, kinds), state_tensors(plan, kinds), node_of=plan.node, former=former)
    return Handover(base, plan, moves, kinds, checkpoint)


def _check_model(plan: Plan, checkpoint: Checkpoint) -> None:
    there = {t.name.partition("/")[2]: t.shape for t in checkpoint.tensors if t.name.startswith("weight/")}
    ours = {p.name: p.shape for p in plan.facts.parameters}
    if there != ours:
        name = next(n for n in (*ours, *there) if there.get(n) != ours.get(n))
        raise RunError(
            f"the checkpoint of step {checkpoint.step} is of another model: it has {name} as {there.get(name, 'nothing')}, "
            f"the plan as {ours.get(name, 'nothing')}"
        )


def _same_layers(one: Plan, other: Plan, rank: int) -> bool:
    """Whether a rank runs the same stages in two plans."""
    return rank in one.ranks and _stages(one, rank) == _stages(other, rank)


def _stages(plan: Plan, rank: int) -> list[tuple[int, int, int, int]]:
    stages = plan.template(plan.coordinate(rank).pipeline).stages
    return [(s, stages[s].start, stages[s].stop, len(stages)) for s in plan.stages_of(rank)]


def at_hand(base: Plan, plan: Plan, now: Standing, keeper: Keeper, store: dist.Store, *, tells: bool) -> Handover:
    """From one plan to another with the state of the last step if all of it is left, else with that of a checkpoint.

    Raises StateLost if there is neither.
    """
    try:
        return planned(base, plan, now.committed, now.kinds_in(base), lacking=now.lacking)
    except StateLost:
        if plan.budget is None or "restore" not in plan.budget.recover:
            raise
        checkpoint = keeper.find(store, tells=tells)
        if checkpoint is None:
            raise
    return planned(base, plan, checkpoint.step, {}, checkpoint)


def one_plan(reports: Iterable[Report]) -> None:
    """Raises RunError if the nodes that begin were given different plans."""
    found = {r.plan for r in reports if r.holds < 0}
    if len(found) > 1:
        raise RunError(f"the nodes hold different plans ({', '.join(sorted(p[:12] for p in found))}): all need one")
