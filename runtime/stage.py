"""Running one stage: the model's own forward, in which all that the stage does not own is replaced while it runs.

Every stage calls the whole model on its microbatch, so masks, positions and rotary tables are made by the model's own code. Modules of other stages
are stand-ins: they hand on what they got or NaN of the right shape, so a value that wrongly depends on them shows at once. At the first owned block
the received tensors are put in; at the first block of the next stage the pass stops and hands out what crosses. The model object stays whole,
and parameters keep their names.

The calls of modules are intercepted before their hooks run, so what FSDP2 or tensor parallelism hooked to an owned module works as ever, and what
hangs on a module that is skipped stays untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pdsl.grammar.errors import RunError
from pdsl.lowering.facts import SINGLE_INPUT, LayerKind, ModelFacts

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
    bare: tuple[tuple[str, str], ...]  # (module, parameter) of parameters that live elsewhere, outside of all stand-ins


@define(eq=False)
class _Pass:
    """The state of one pass."""

    stage: _Range
    received: tuple[Tensor, ...]
    next_block: int  # layer of the block that comes next
    swaps: dict[int, Tensor] = field(factory=dict)  # id of a stand-in's tensor -> what was received for it
    alive: list[object] = field(factory=list)  # ids stay unique as long as their objects live


@frozen
class _Replay:
    """What a stand-in gave for inputs of one kind: for each leaf of its output a tensor of NaN, ("input", k), or a plain value."""

    leaves: tuple[Any, ...]
    spec: TreeSpec


class StageRunner(nn.Module):
    """Runs stages of one model that live on one rank: `runner(stage, received, batch)`.

    `stages` gives for each stage the layers [start, stop) of `facts`. Parameters of other layers may be on the meta device. `received` are the tensors
    that cross into the stage (none for the first), those that need a gradient as leaves that require one. The result is the tuple of tensors
    that cross into the next stage, or the model's own output from the last. Outside of a call the model behaves as ever.

    `before_layer(i)` is called, if set, before each owned layer runs: the place to seed its random numbers.
    """

    def __init__(self, model: nn.Module, facts: ModelFacts, stages: Mapping[int, tuple[int, int]]) -> None:
        super().__init__()
        self.model = model
        self.facts = facts
        self.before_layer: Callable[[int], None] | None = None
        self._blocks = [i for i, layer in enumerate(facts.layers) if layer.kind is LayerKind.BLOCK]
        self._direct = facts.sequential and all(len(layer.inputs) <= 1 for layer in facts.layers)
        self._replays: dict[object, _Replay | None] = {}
        self._current: _Pass | None = None
        self._inside_stand_in = False
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
        if self.facts.layers[part.start].kind is LayerKind.PROLOGUE:
            self._layer_begins(part.start)
        self._current = _Pass(part, received, self._blocks[0])
        try:
            with self._bare_parameters(part, batch), self._stopping():
                return self._call_model(batch)
        finally:
            self._current = None

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
            self._layer_begins(index)
            x = self.model._modules[self.facts.layers[index].name](x)  # type: ignore[misc]
        return x if part.stop == len(self.facts.layers) else (x.contiguous(),)

    def _layer_begins(self, index: int) -> None:
        if self.before_layer is not None:
            self.before_layer(index)

    # --- preparation ----------------------------------------------------------------------------------------------------------------------

    def _range(self, start: int, stop: int) -> _Range:
        layers = self.facts.layers
        if not 0 <= start < stop <= len(layers):
            raise RunError(f"layers {start} to {stop} are no stage of a model with {len(layers)} layers")
        if start and layers[start].cut_before:
            raise RunError(f"no stage may begin at {layers[start].name}: {layers[start].cut_before}")
        own = frozenset(m for layer in layers[start:stop] for m in layer.modules)
        stand_ins = {m for layer in layers for m in layer.modules} - own
        elsewhere = {n for p in self.facts.parameters if not set(p.layers) & set(range(start, stop)) for n in (p.name, *p.aliases)}
        owners = [(name.rpartition(".")[0], name.rpartition(".")[2]) for name in sorted(elsewhere)]
        bare = tuple((m, leaf) for m, leaf in owners if not any(m == s or m.startswith(f"{s}.") for s in stand_ins))
        return _Range(start, stop, own, bare)

    def _intercept(self) -> None:
        """Route every call of a module that belongs to a layer through this object."""
        block_of = {self.facts.layers[i].name: i for i in self._blocks}
        for name in dict.fromkeys(m for layer in self.facts.layers for m in layer.modules):
            module = self.model.get_submodule(name)
            plain = module._compiled_call_impl or module._call_impl
            module._compiled_call_impl = self._interceptor(name, module, plain, block_of.get(name))

    def _interceptor(self, name: str, module: nn.Module, plain: Callable[..., Any], block: int | None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            now = self._current
            if now is None or self._inside_stand_in:
                return plain(*args, **kwargs)
            if block is not None:
                return self._call_block(now, block, module, plain, args, kwargs)
            if name in now.stage.own:
                return plain(*args, **kwargs)
            return self._stand_in(name, module, args, kwargs)

        return call

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
        if index != now.next_block:
            raise RunError(
                f"{layers[index].name} was called where {layers[now.next_block].name} came when the model was probed: all blocks must run, in one order"
            )
        now.next_block = index + 1
        if index >= stage.stop:
            leaves, _ = tree_flatten((args, kwargs))
            raise _Stop(self._crossing(now, leaves, index))
        if index < stage.start:
            output = self._skip_block(index, module, args, kwargs)
        else:
            args, kwargs = self._put_in(now, index, args, kwargs)
            self._layer_begins(index)
            output = plain(*args, **kwargs)
        return self._after_last_block(now, output) if index == self._blocks[-1] else output

    def _after_last_block(self, now: _Pass, output: Any) -> Any:
        epilogue = self._blocks[-1] + 1
        if epilogue == len(self.facts.layers):
            return output
        if now.stage.stop == epilogue:
            leaves, _ = tree_flatten(output)
            raise _Stop(self._crossing(now, leaves, epilogue))
        if now.stage.start == epilogue:
            leaves, spec = tree_flatten(output)
            output = tree_unflatten(self._swapped(now, epilogue, leaves), spec)
        self._layer_begins(epilogue)
        return output

    def _put_in(self, now: _Pass, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Exchange stand-ins' tensors among the arguments for those received."""
        if not now.received:
            return args, kwargs
        leaves, spec = tree_flatten((args, kwargs))
        if index == now.stage.start:
            leaves = self._swapped(now, index, leaves)
        elif any(id(leaf) in now.swaps for leaf in leaves):
            leaves = [now.swaps.get(id(leaf), leaf) for leaf in leaves]
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
            now.swaps[id(old)] = tensor.clone() if facts.mutated else tensor
        return [now.swaps.get(id(leaf), leaf) for leaf in leaves]

    def _crossing(self, now: _Pass, leaves: list[Any], index: int) -> tuple[Tensor, ...]:
        """What the next stage needs; what this stage received and hands on unchanged is among it."""
        crossing = [leaves[facts.leaf] for facts in self.facts.layers[index].inputs]
        return tuple(now.swaps.get(id(t), t).contiguous() for t in crossing)

    def _skip_block(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = self.facts.layers[index]
        if layer.passthrough and isinstance(args[0], Tensor):
            return args[0].detach()  # a new object each time: exchanging goes by identity
        return self._stand_in(layer.name, module, args, kwargs)

    # --- stand-ins ------------------------------------------------------------------------------------------------------------------------

    def _stand_in(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a module of another stage gives: NaN where it depends on its weights, the true values where it does not.

        The module runs with one NaN in place of each parameter. If all it gives is NaN, it need not run again for inputs of the same kind.
        """
        inputs, _ = tree_flatten((args, kwargs))
        key = (name, module.training, tuple(_kind(leaf) for leaf in inputs))
        replay = self._replays.get(key)
        if replay is not None:
            leaves = [_fresh(leaf, inputs) for leaf in replay.leaves]
            return tree_unflatten(leaves, replay.spec)
        output = self._without_weights(module, args, kwargs, inputs)
        if key not in self._replays:
            self._replays[key] = _make_replay(output, inputs)
        return output

    def _without_weights(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Any]) -> Any:
        device = next((leaf.device for leaf in inputs if isinstance(leaf, Tensor)), torch.device("cpu"))
        devices = [device] if device.type == "cuda" else []
        saved = [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
        try:
            for m, parameters, buffers in saved:
                m._parameters.update({n: _hollow(p, device) for n, p in parameters.items() if p is not None})
                m._buffers.update({n: b.clone() for n, b in buffers.items() if b is not None})
            self._inside_stand_in = True
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                return module.forward(*args, **kwargs)
        finally:
            self._inside_stand_in = False
            for m, parameters, buffers in saved:
                m._parameters.update(parameters)
                m._buffers.update(buffers)

    @contextmanager
    def _bare_parameters(self, part: _Range, batch: Mapping[str, Tensor]) -> Iterator[None]:
        """Give NaN to parameters without memory that the model's own code reads outside of any module of a layer, such as a class token."""
        device = next(iter(batch.values())).device
        changed: list[tuple[nn.Module, str, nn.Parameter]] = []
        for name, leaf in part.bare:
            module = self.model.get_submodule(name)
            parameter = module._parameters.get(leaf)
            if parameter is not None and parameter.device.type == "meta":
                changed.append((module, leaf, parameter))
                module._parameters[leaf] = _hollow(parameter, device)
        try:
            yield
        finally:
            for module, leaf, parameter in changed:
                module._parameters[leaf] = parameter


class StageModule(StageRunner):
    """Layers [start, stop) of a model as one module: `stage(received, batch)`. See `StageRunner`."""

    def __init__(self, model: nn.Module, facts: ModelFacts, start: int, stop: int) -> None:
        super().__init__(model, facts, {0: (start, stop)})

    def forward(self, received: tuple[Tensor, ...], batch: Mapping[str, Tensor]) -> Any:  # type: ignore[override]
        """Run the stage on one microbatch."""
        return super().forward(0, received, batch)


def _hollow(parameter: Tensor, device: torch.device) -> nn.Parameter:
    """One NaN in the shape of a parameter (0 where the dtype has no NaN)."""
    floating = parameter.dtype.is_floating_point or parameter.dtype.is_complex
    scalar = torch.full((), float("nan") if floating else 0, dtype=parameter.dtype, device=device)
    return nn.Parameter(scalar.expand(parameter.shape), requires_grad=False)


def _kind(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.dtype, leaf.device)
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf)


def _make_replay(output: Any, inputs: list[Any]) -> _Replay | None:
    """What to give next time without running; None if some value depends on more than shapes."""
    places = {id(leaf): k for k, leaf in enumerate(inputs) if isinstance(leaf, Tensor)}
    leaves, spec = tree_flatten(output)
    kept: list[Any] = []
    for leaf in leaves:
        if id(leaf) in places:
            kept.append(("input", places[id(leaf)]))
        elif isinstance(leaf, Tensor) and leaf.is_floating_point() and bool(leaf.isnan().all()):
            kept.append(leaf.clone())
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            kept.append(leaf)
        else:
            return None
    return _Replay(tuple(kept), spec)


def _fresh(leaf: Any, inputs: list[Any]) -> Any:
    if isinstance(leaf, tuple):
        return inputs[leaf[1]]
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
