"""Running one stage: the model's own forward, in which all that the stage does not own is replaced while it runs.

Every stage calls the whole model on its microbatch, so masks, positions and rotary tables are made by the model's own code. Modules of other stages
are stand-ins: they hand on what they got or NaN of the right shape, so a value that wrongly depends on them shows at once. At the first owned block
the received tensors are put in; at the first block of the next stage the pass stops and hands out what crosses. The model object stays whole,
and parameters keep their names.

The calls of modules are intercepted before their hooks run, so what FSDP2 or tensor parallelism hooked to an owned module works as ever, and what
hangs on a module that is skipped stays untouched.

A model may compute parts again in its backward (`torch.utils.checkpoint`). What is called then belongs to the pass whose backward runs, gets what
that pass was given, and draws the random numbers that it drew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from pdsl.grammar.errors import RunError
from pdsl.lowering.facts import SINGLE_INPUT, LayerKind, ModelFacts
from pdsl.runtime.stand_ins import StandIns, hollow

__all__ = ["StageModule", "StageRunner"]


class _Stop(BaseException):
    """Ends a pass at the first block of the next stage. No Exception, so that no model swallows it."""

    def __init__(self, crossing: tuple[Tensor, ...]) -> None:
        self.crossing = crossing


@frozen
class _Range:
    """Layers [start, stop) of the chain, with what a pass over them needs to know."""

    start: int
    stop: int
    own: frozenset[str]  # modules that run
    bare: tuple[tuple[str, str], ...]  # (module, parameter) of parameters that live elsewhere
    segments: range = range(0)  # what the model does from the call of one block to that of the next, by its number


@define(eq=False)
class _Pass:
    """The state of one pass, kept until its backward is done."""

    stage: _Range
    received: tuple[Tensor, ...]
    next_block: int  # layer of the block that comes next
    swaps: dict[int, tuple[weakref.ref[Tensor], Tensor]] = field(factory=dict)  # by id of a stand-in's tensor: itself, what came for it
    alive: list[object] = field(factory=list)  # stand-ins' tensors, until the forward is done
    seeds: dict[int, int] = field(factory=dict)  # segment -> seed of its random numbers
    again: bool = False  # whether the forward is done, and parts of it run once more for the backward

    def received_for(self, leaf: Any) -> Any:
        """What was received in place of a stand-in's tensor; any other leaf as it is."""
        stand_in, tensor = self.swaps.get(id(leaf), (None, None))
        return tensor if stand_in is not None and stand_in() is leaf else leaf


class StageRunner(nn.Module):
    """Runs stages of one model that live on one rank: `runner(stage, received, batch)`.

    `stages` gives for each stage the layers [start, stop) of `facts`. Parameters of other layers may be on the meta device. `received` are the tensors
    that cross into the stage (none for the first), those that need a gradient as leaves that require one. The result is the tuple of tensors
    that cross into the next stage, or the model's own output from the last. Outside of a call the model behaves as ever.

    `before_segment(k, owned)` is called, if set, as the model comes to its k-th block (0: to its begin; the last: behind all blocks), and tells whether
    the stage owns it: the place to seed random numbers.
    """

    def __init__(self, model: nn.Module, facts: ModelFacts, stages: Mapping[int, tuple[int, int]]) -> None:
        super().__init__()
        self.model = model
        self.facts = facts
        self.before_segment: Callable[[int, bool], None] | None = None
        self._blocks = [i for i, layer in enumerate(facts.layers) if layer.kind is LayerKind.BLOCK]
        self._segment_of = {i: k for k, i in enumerate(self._blocks, start=1)}
        self._direct = facts.sequential and all(len(layer.inputs) <= 1 for layer in facts.layers)
        self._bare: dict[int, list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]]] = {}  # by first layer of a stage
        self._current: _Pass | None = None
        self._in_backward: weakref.ref[_Pass] | None = None
        self._stand_ins = StandIns()
        self._stages = {s: self._range(start, stop) for s, (start, stop) in stages.items()}
        if not facts.inputs and not facts.sequential:
            raise RunError(
                f"{facts.factory} was read without running it, so what crosses between its layers is not known: name data in `train`"
            )
        if not self._direct and len(facts.layers) > 1:
            self._intercept()

    def forward(self, stage: int, received: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> Any:
        """Run one stage on one microbatch. Raises RunError if what it gets is not what the facts say, or if the blocks come in another order."""
        part = self._stages[stage]
        expected = len(self.facts.layers[part.start].inputs) if part.start else 0
        if len(received) != expected and not self._direct:
            raise RunError(
                f"stage {stage} begins at {self.facts.layers[part.start].name} and takes {expected} tensors, it was given {len(received)}"
            )
        missing = [name for name in self.facts.inputs if name not in batch]
        if missing:
            raise RunError(
                f"the batch has no {', '.join(missing)}: the model was probed with {', '.join(self.facts.inputs)}, the batch has {', '.join(batch)}"
            )
        if self._direct:
            return self._run_children(part, received, batch)
        now = self._current = _Pass(part, received, self._blocks[0])
        self._segment_begins(0, now)
        try:
            with self._bare_parameters(part, batch), self._stopping():
                output = self._call_model(batch)
        finally:
            self._current = None
        now.again = True
        now.alive.clear()
        self._announce_backward(now, output)
        return output

    def _announce_backward(self, now: _Pass, output: Any) -> None:
        """Let the backward through `output` say whose it is, for what the model computes again in it."""

        def begins(*_: Any) -> None:
            self._in_backward = weakref.ref(now)

        leaves = tree_leaves(output)
        held = (v for leaf in leaves if not isinstance(leaf, Tensor) for v in tree_leaves(getattr(leaf, "__dict__", {})))
        for tensor in (*leaves, *held):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(begins)

    def _call_model(self, batch: Mapping[str, Tensor]) -> Any:
        entries = {name: batch[name] for name in self.facts.inputs}
        if self.facts.sequential or self.facts.inputs == (SINGLE_INPUT,):
            return self.model(next(iter(entries.values())))
        return self.model(**entries)

    def _run_children(self, part: _Range, received: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> Any:
        """The easy case: a sequence of modules with one tensor between them."""
        x = received[0] if part.start else batch[self.facts.inputs[0]] if self.facts.inputs else next(iter(batch.values()))
        if part.start and self.facts.layers[part.start].inputs and self.facts.layers[part.start].inputs[0].mutated:
            x = x.clone()
        for index in range(part.start, part.stop):
            self._segment_begins(index + 1)
            x = self.model._modules[self.facts.layers[index].name](x)  # type: ignore[misc]
        return x if part.stop == len(self.facts.layers) else (x.contiguous(),)

    def _segment_begins(self, segment: int, now: _Pass | None = None) -> None:
        if self.before_segment is None:
            return
        if now is not None and now.again:
            if segment in now.seeds:
                torch.manual_seed(now.seeds[segment])
            return
        owned = now is None or segment in now.stage.segments
        self.before_segment(segment, owned)
        if now is not None and owned:
            now.seeds[segment] = torch.initial_seed()

    # --- preparation ----------------------------------------------------------------------------------------------------------------------

    def _range(self, start: int, stop: int) -> _Range:
        layers = self.facts.layers
        if not 0 <= start < stop <= len(layers):
            raise RunError(f"layers {start} to {stop} are no stage of a model with {len(layers)} layers")
        if start and layers[start].cut_before:
            raise RunError(f"no stage may begin at {layers[start].name}: {layers[start].cut_before}")
        own = frozenset(m for layer in layers[start:stop] for m in layer.modules)
        elsewhere = {n for p in self.facts.parameters if not set(p.layers) & set(range(start, stop)) for n in (p.name, *p.aliases)}
        bare = tuple((name.rpartition(".")[0], name.rpartition(".")[2]) for name in sorted(elsewhere))
        shift = layers[0].kind is not LayerKind.PROLOGUE  # what comes before the first block is a segment, but then no layer
        first = start + shift if start else 0
        after = stop + shift if stop < len(layers) else len(self._blocks) + 2
        return _Range(start, stop, own, bare, range(first, after))

    def _intercept(self) -> None:
        """Route every call of a module that belongs to a layer through this object."""
        block_of = {self.facts.layers[i].name: i for i in self._blocks}
        for name in dict.fromkeys(m for layer in self.facts.layers for m in layer.modules):
            module = self.model.get_submodule(name)
            plain = module._compiled_call_impl or module._call_impl
            module._compiled_call_impl = self._interceptor(name, module, plain, block_of.get(name))

    def _interceptor(self, name: str, module: nn.Module, plain: Callable[..., Any], block: int | None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            now = self._current or self._pass_in_backward()
            if now is None or self._stand_ins.running:
                return plain(*args, **kwargs)
            if block is not None:
                return self._call_block(now, block, module, plain, args, kwargs)
            if name in now.stage.own:
                return plain(*args, **kwargs)
            return self._stand_ins(name, module, args, kwargs)

        return call

    def _pass_in_backward(self) -> _Pass | None:
        """The pass whose backward runs now, None outside of a backward."""
        if self._in_backward is None or torch._C._current_graph_task_id() == -1:
            return None
        return self._in_backward()

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Let the model's forward return what crosses when the pass stops, so that hooks around the model see an ordinary return."""
        forward = self.model.forward

        def stopping(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except _Stop as stop:
                return stop.crossing

        patched = self.model.__dict__.get("forward")
        self.model.__dict__["forward"] = stopping
        try:
            yield
        finally:
            if patched is None:
                del self.model.__dict__["forward"]
            else:
                self.model.__dict__["forward"] = patched

    # --- blocks ---------------------------------------------------------------------------------------------------------------------------

    def _call_block(
        self, now: _Pass, index: int, module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        layers, stage = self.facts.layers, now.stage
        if index != now.next_block and not now.again:
            raise RunError(
                f"{layers[index].name} was called where {layers[now.next_block].name} came when the model was probed: all blocks must run, in one order"
            )
        now.next_block = index + 1
        if index >= stage.stop and now.again:
            raise RunError(f"the backward computes {layers[index].name} again, which belongs to another stage")
        self._segment_begins(self._segment_of[index], now)
        if index >= stage.stop:
            leaves, _ = tree_flatten((args, kwargs))
            raise _Stop(self._crossing(now, leaves, index))
        if index < stage.start:
            output = self._skip_block(index, module, args, kwargs)
        else:
            args, kwargs = self._put_in(now, index, args, kwargs)
            output = plain(*args, **kwargs)
        return self._after_last_block(now, output) if index == self._blocks[-1] else output

    def _after_last_block(self, now: _Pass, output: Any) -> Any:
        epilogue = self._blocks[-1] + 1
        self._segment_begins(len(self._blocks) + 1, now)
        if epilogue == len(self.facts.layers) or (now.again and now.stage.stop == epilogue):
            return output
        if now.stage.stop == epilogue:
            leaves, _ = tree_flatten(output)
            raise _Stop(self._crossing(now, leaves, epilogue))
        if now.stage.start == epilogue:
            leaves, spec = tree_flatten(output)
            output = tree_unflatten(self._swapped(now, epilogue, leaves), spec)
        return output

    def _put_in(self, now: _Pass, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Exchange stand-ins' tensors among the arguments for those received."""
        if not now.received:
            return args, kwargs
        leaves, spec = tree_flatten((args, kwargs))
        if index == now.stage.start:
            leaves = self._swapped(now, index, leaves)
        elif any(id(leaf) in now.swaps for leaf in leaves):
            leaves = [now.received_for(leaf) for leaf in leaves]
        else:
            return args, kwargs
        args, kwargs = tree_unflatten(leaves, spec)
        return args, kwargs

    def _swapped(self, now: _Pass, index: int, leaves: list[Any]) -> list[Any]:
        """Put the received tensors in for the first time and remember what they stand for: later blocks may be given the same ones."""
        for facts, tensor in zip(self.facts.layers[index].inputs, now.received, strict=True):
            old = leaves[facts.leaf] if facts.leaf < len(leaves) else None
            if not isinstance(old, Tensor):
                raise RunError(f"{self.facts.layers[index].name} was given other arguments than when the model was probed")
            now.alive.append(old)
            now.swaps[id(old)] = weakref.ref(old), tensor.clone() if facts.mutated else tensor
        return [now.received_for(leaf) for leaf in leaves]

    def _crossing(self, now: _Pass, leaves: list[Any], index: int) -> tuple[Tensor, ...]:
        """What the next stage needs; what this stage received and hands on unchanged is among it."""
        crossing = [leaves[facts.leaf] for facts in self.facts.layers[index].inputs]
        return tuple(now.received_for(t).contiguous() for t in crossing)

    def _skip_block(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = self.facts.layers[index]
        if layer.passthrough and isinstance(args[0], Tensor):
            return args[0].detach()  # a new object each time: exchanging goes by identity
        return self._stand_ins(layer.name, module, args, kwargs)

    # --- parameters that live elsewhere --------------------------------------------------------------------------------------------------

    @contextmanager
    def _bare_parameters(self, part: _Range, batch: Mapping[str, Tensor]) -> Iterator[None]:
        """Give NaN to parameters without memory that the model's own code reads outside of their modules: a class token, the gain of a block."""
        if part.start not in self._bare:
            self._bare[part.start] = self._hollow_parameters(part, next(iter(batch.values())).device)
        changed = [(holder, leaf, holder[leaf]) for holder, leaf, _ in self._bare[part.start]]
        for holder, leaf, nan in self._bare[part.start]:
            holder[leaf] = nan
        try:
            yield
        finally:
            for holder, leaf, parameter in changed:
                holder[leaf] = parameter

    def _hollow_parameters(self, part: _Range, device: torch.device) -> list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]]:
        """Where the parameters without memory are held, under which name, and the NaN for each."""
        found = []
        for name, leaf in part.bare:
            holder = self.model.get_submodule(name)._parameters
            parameter = holder.get(leaf)
            if parameter is not None and parameter.device.type == "meta":
                found.append((holder, leaf, hollow(parameter, device)))
        return found


class StageModule(StageRunner):
    """Layers [start, stop) of a model as one module: `stage(received, batch)`. See `StageRunner`."""

    def __init__(self, model: nn.Module, facts: ModelFacts, start: int, stop: int) -> None:
        super().__init__(model, facts, {0: (start, stop)})

    def forward(self, received: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> Any:  # type: ignore[override]
        """Run the stage on one microbatch."""
        return super().forward(0, received, batch)
