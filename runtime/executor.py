"""The executor: one rank's program for one step.

It knows nothing of neighbours, ranks or schedules; it does what the actions say, in their order. Transfers are posted when the program names
them and waited for where their data is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from attrs import define, field

from pdsl.grammar.errors import RunError
from pdsl.lowering.crossings import crossing
from pdsl.lowering.facts import BoundaryTensor
from pdsl.lowering.plan import Plan
from pdsl.lowering.program import Action, ActionKind, Program
from pdsl.runtime.faults import in_words
from pdsl.runtime.gradients import Reducer
from pdsl.runtime.groups import Groups
from pdsl.runtime.objective import Objective
from pdsl.runtime.rows import Share, StepRows
from pdsl.runtime.shard import Units
from pdsl.runtime.split_backward import WeightHalf, backward_input, is_divisible
from pdsl.runtime.waits import Pending

__all__ = ["Executor", "StageCall", "StepSums"]

_Key = tuple[int, int]  # (stage, microbatch)

_WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "input half of the backward",
    ActionKind.BACKWARD_WEIGHT: "weight half of the backward",
}
_NEEDS = {
    ActionKind.FORWARD: ActionKind.RECEIVE_ACTIVATION,
    ActionKind.BACKWARD: ActionKind.RECEIVE_GRADIENT,
    ActionKind.BACKWARD_INPUT: ActionKind.RECEIVE_GRADIENT,
}


class StageCall(Protocol):
    """Runs one stage: (stage, received tensors, rows of the microbatch) -> tensors for the next stage, or the model's output."""

    def __call__(self, stage: int, received: tuple[torch.Tensor, ...], batch: Mapping[str, torch.Tensor]) -> Any: ...


@define
class StepSums:
    """What a rank adds up over the microbatches whose loss it computed. The losses are read when the step is over: on a GPU whoever reads one waits for all
    that was begun before.
    """

    losses: list[torch.Tensor] = field(factory=list)
    tokens: int = 0

    @property
    def loss(self) -> float:
        return sum(map(float, self.losses))


@define
class _InFlight:
    """What a backward needs of its forward."""

    received: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]  # the loss alone on the last stage


@define
class Executor:
    """Holds what one rank needs to run its program; `step` runs it once."""

    plan: Plan
    program: Program
    groups: Groups
    call: StageCall
    objective: Objective
    reducer: Reducer
    units: Units | None
    before_forward: Callable[[int, int], None] | None = None
    before_backward: Callable[[], None] | None = None
    _inputs: dict[int, tuple[BoundaryTensor, ...]] = field(init=False)
    _last_backward: frozenset[int] = field(init=False)
    _own_stages: tuple[int, ...] = field(init=False)
    _sizes: dict[int, int] = field(factory=dict, init=False)  # rows of each microbatch of the step on this rank
    _current: Action = field(init=False)
    _posted: dict[tuple[ActionKind, int, int], tuple[list[Pending], tuple[torch.Tensor, ...]]] = field(factory=dict, init=False)
    _sends: list[tuple[Pending, torch.Tensor]] = field(factory=list, init=False)
    _flying: dict[_Key, _InFlight] = field(factory=dict, init=False)
    _halves: dict[_Key, WeightHalf] = field(factory=dict, init=False)
    _divisible: dict[int, bool] = field(factory=dict, init=False)
    _handed: dict[tuple[ActionKind, int, int], tuple[torch.Tensor, ...]] = field(factory=dict, init=False)
    _ready: dict[tuple[ActionKind, int, int], tuple[torch.Tensor, ...]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        rank = self.program.rank
        stages = self.plan.template(self.plan.coordinate(rank).pipeline).stages
        self._own_stages = self.plan.stages_of(rank)
        self._current = self.program.actions[0]
        self._inputs = {i: crossing(self.plan, s.start) if i else () for i, s in enumerate(stages)}
        ends = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
        self._last_backward = frozenset({a.stage: i for i, a in enumerate(self.program.actions) if a.kind in ends}.values())

    def step(self, rows: StepRows) -> StepSums:
        """Run every action but STEP. `rows` are those of this rank. What was sent is waited for by `settle`.

        Raises RunError, with the action that this rank was at, if a peer is gone or silent.
        """
        sums = StepSums()
        self._divisible.clear()
        self.reducer.begin_step()
        if self.units is not None:
            self.units.begin_step()
        with in_words(self._where, self.plan.silence):
            self._run(rows, sums)
        return sums

    def settle(self) -> None:
        """Wait for what was sent. To be called when all ranks are known to be done with the step, so that it has arrived: gloo does not always
        tell whoever waits to send to a peer that has just died.
        """
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def deliver(self) -> None:
        """As `settle`, after a loss elsewhere: others of this pipeline may still need what was sent. Given up if one of them is lost too."""
        if self.groups.transfers is not None and self._sends:
            self.groups.transfers.watch([work for work, _ in self._sends]).wait()
        self._sends.clear()

    def _where(self) -> str:
        """What this rank is at, and whom it waits for there."""
        action = self._current
        what = _WORDS.get(action.kind, action.kind.name.lower().replace("_", " "))
        needs = _NEEDS.get(action.kind)
        key = (needs, action.stage, action.microbatch)
        peer = next((a.peer for a in self.program.actions if (a.kind, a.stage, a.microbatch) == key), action.peer)
        waits = f", which needs rank {peer}" if peer >= 0 else ""
        return f"at the {what} of stage {action.stage}, microbatch {action.microbatch}{waits}"

    def _run(self, rows: StepRows, sums: StepSums) -> None:
        self._sizes = {m: share.size for m, share in rows.shares.items()}
        for index, action in enumerate(self.program.actions):
            self._current = action
            match action.kind:
                case ActionKind.FORWARD:
                    self._forward(action, rows.shares[action.microbatch], rows.samples, sums)
                case ActionKind.BACKWARD:
                    self._backward(action, last=index in self._last_backward)
                case ActionKind.BACKWARD_INPUT:
                    self._backward_input(action)
                case ActionKind.BACKWARD_WEIGHT:
                    self._backward_weight(action, last=index in self._last_backward)
                case ActionKind.SEND_ACTIVATION | ActionKind.SEND_GRADIENT:
                    self._send(action)
                case ActionKind.RECEIVE_ACTIVATION | ActionKind.RECEIVE_GRADIENT:
                    self._receive(action)
                case ActionKind.UNSHARD:
                    self._units.unshard(action.stage)
                case ActionKind.RESHARD:
                    pass  # done by the backward that follows: a whole one does it unit by unit by itself, a half does not
                case ActionKind.REDUCE:
                    self.reducer.issue(action.bucket)
                case ActionKind.STEP:
                    return
                case _:
                    raise RunError(f"this version does not execute {action.kind.name.lower().replace('_', ' ')} actions")

    @property
    def _units(self) -> Units:
        if self.units is None:
            raise RunError("the program shards units that this rank does not have")
        return self.units

    # --- computing --------------------------------------------------------------------------------------------------------------------

    def _forward(self, action: Action, share: Share, samples: int, sums: StepSums) -> None:
        stage, microbatch = action.stage, action.microbatch
        received = self._take(ActionKind.RECEIVE_ACTIVATION, stage, microbatch)
        for tensor, facts in zip(received, self._inputs[stage], strict=True):
            tensor.requires_grad_(facts.differentiable)
        if self.before_forward is not None:
            self.before_forward(stage, microbatch)
        output = self.call(stage, received, share.batch)
        if stage + 1 == len(self._inputs):
            weighted = self.objective(output, share, samples)
            sums.losses.append(weighted.loss.detach())
            sums.tokens += weighted.count
            self._flying[stage, microbatch] = _InFlight(received, (weighted.loss,))
            return
        outputs = self._checked(output, stage + 1, microbatch)
        self._flying[stage, microbatch] = _InFlight(received, outputs)
        self._hand_on(
            ActionKind.SEND_ACTIVATION, ActionKind.RECEIVE_ACTIVATION, stage, stage + 1, microbatch, tuple(t.detach() for t in outputs)
        )

    def _backward(self, action: Action, *, last: bool) -> None:
        stage, microbatch = action.stage, action.microbatch
        if self.before_backward is not None:
            self.before_backward()
        flying = self._flying.pop((stage, microbatch))
        outputs, given = self._given(flying, stage, microbatch)
        self._begin_last(stage, last=last, by_itself=True)
        if outputs:
            torch.autograd.backward(outputs, given)
        wanted = self._wanted(flying, stage)
        self._hand_back(action, wanted, tuple(t.grad for t in wanted))

    def _backward_input(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        if self.before_backward is not None:
            self.before_backward()
        flying = self._flying.pop((stage, microbatch))
        outputs, given = self._given(flying, stage, microbatch)
        wanted = self._wanted(flying, stage)
        if stage not in self._divisible:
            self._divisible[stage] = is_divisible(outputs)
        if self._divisible[stage] or not wanted:
            found, half = backward_input(outputs, given, wanted)
        else:
            torch.autograd.backward(outputs, given)
            found, half = tuple(t.grad for t in wanted), WeightHalf()
        self._halves[stage, microbatch] = half
        self._hand_back(action, wanted, found)

    def _backward_weight(self, action: Action, *, last: bool) -> None:
        half = self._halves.pop((action.stage, action.microbatch))
        self._begin_last(action.stage, last=last, by_itself=half.whole)
        if not last or half.whole or self.units is None:
            half.run()
            if self.units is not None and not last:
                self.units.end_weight_half(action.stage)
            return
        ends = self.units.ends(action.stage, half.weights())
        half.run(ends.done)
        ends.finish()

    def _begin_last(self, stage: int, *, last: bool, by_itself: bool) -> None:
        """Ahead of what makes the gradients of a stage final. `by_itself` tells that it is a backward as torch knows it, in which FSDP2 reduces."""
        if not last:
            return
        self.reducer.begin_last_backward(stage)
        if self.units is not None and by_itself:
            self.units.begin_last_backward(stage)

    def _given(self, flying: _InFlight, stage: int, microbatch: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs of a stage that a backward starts from, and their gradients."""
        if stage + 1 == len(self._inputs):
            loss = flying.outputs[0]
            return ([loss], [torch.ones_like(loss)]) if loss.requires_grad else ([], [])
        grads = self._take(ActionKind.RECEIVE_GRADIENT, stage, microbatch)
        outputs = [t for t, f in zip(flying.outputs, self._inputs[stage + 1], strict=True) if f.differentiable]
        pairs = [(t, g) for t, g in zip(outputs, grads, strict=True) if t.requires_grad]
        return [t for t, _ in pairs], [g for _, g in pairs]

    def _wanted(self, flying: _InFlight, stage: int) -> tuple[torch.Tensor, ...]:
        """The received tensors whose gradients the stage before needs."""
        return tuple(t for t, f in zip(flying.received, self._inputs[stage], strict=True) if f.differentiable)

    def _hand_back(self, action: Action, wanted: tuple[torch.Tensor, ...], found: tuple[torch.Tensor | None, ...]) -> None:
        """Give the gradients of the received tensors to the stage before; zero where nothing depends on one."""
        stage, microbatch = action.stage, action.microbatch
        if stage == 0:
            return
        gradients = tuple(torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True))
        self._hand_on(ActionKind.SEND_GRADIENT, ActionKind.RECEIVE_GRADIENT, stage, stage - 1, microbatch, gradients)

    def _checked(self, output: Any, stage: int, microbatch: int) -> tuple[torch.Tensor, ...]:
        """The outputs for a stage, of the shapes that its peer expects: a wrong size would kill the process on the wire."""
        expected = self._inputs[stage]
        outputs = tuple(output)
        if len(outputs) != len(expected):
            raise RunError(f"stage {stage - 1} gave {len(outputs)} tensors where stage {stage} takes {len(expected)}")
        for i, (tensor, facts) in enumerate(zip(outputs, expected, strict=True)):
            shape, dtype = facts.shape(self._sizes[microbatch]), getattr(torch, facts.dtype)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise RunError(
                    f"microbatch {microbatch}: tensor {i} from stage {stage - 1} to stage {stage} is {tuple(tensor.shape)} {tensor.dtype}, "
                    f"the plan says {shape} {dtype}; all microbatches must have the shapes that the model was probed with"
                )
        return outputs

    # --- transfers --------------------------------------------------------------------------------------------------------------------

    def _hand_on(
        self, send: ActionKind, receive: ActionKind, stage: int, to: int, microbatch: int, tensors: tuple[torch.Tensor, ...]
    ) -> None:
        """Keep tensors for the send that the program names later, or give them to a stage of this rank."""
        if to in self._own_stages:
            self._handed[receive, to, microbatch] = tensors
            return
        self._ready[send, stage, microbatch] = tensors

    def _take(self, kind: ActionKind, stage: int, microbatch: int) -> tuple[torch.Tensor, ...]:
        key = (kind, stage, microbatch)
        if key in self._handed:
            return self._handed.pop(key)
        if key not in self._posted:
            return ()
        works, tensors = self._posted.pop(key)
        for work in works:
            work.wait()
        return tensors

    def _send(self, action: Action) -> None:
        group = self.groups.transfers
        assert group is not None
        tensors = self._ready.pop((action.kind, action.stage, action.microbatch))
        activation = action.kind is ActionKind.SEND_ACTIVATION
        boundary = action.stage + 1 if activation else action.stage
        # what has left need not be kept until the end of the step
        self._sends = [entry for entry in self._sends if not entry[0].is_completed()]
        for i, tensor in enumerate(tensors):
            whole = tensor.contiguous()
            work = group.send(whole, action.peer, self._tag(boundary, action.microbatch, activation, i))
            self._sends.append((work, whole))

    def _receive(self, action: Action) -> None:
        group = self.groups.transfers
        assert group is not None
        activation = action.kind is ActionKind.RECEIVE_ACTIVATION
        boundary = action.stage if activation else action.stage + 1
        works, tensors = [], []
        for i, facts in enumerate(f for f in self._inputs[boundary] if activation or f.differentiable):
            tensor = torch.empty(facts.shape(self._sizes[action.microbatch]), dtype=getattr(torch, facts.dtype), device=self.groups.device)
            works.append(group.receive(tensor, action.peer, self._tag(boundary, action.microbatch, activation, i)))
            tensors.append(tensor)
        self._posted[action.kind, action.stage, action.microbatch] = (works, tuple(tensors))

    def _tag(self, boundary: int, microbatch: int, activation: bool, index: int) -> int:
        """A tag that no other message of the step has."""
        return ((microbatch * len(self._inputs) + boundary) * 2 + activation) * 16 + index
