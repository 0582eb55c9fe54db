"""Watching one forward pass of a model: what crosses from block to block, which parameter is read where, what it costs.

Hooks on the blocks see the boundaries, a function mode sees every operation with its operands, and autograd's graph tells whether the loss reads
inside earlier blocks past what crosses.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from pdsl.lowering.chain import Crossing, Observation, Segment
from pdsl.lowering.draws import Draw
from pdsl.lowering.probe_numerics import Numerics
from pdsl.lowering.probe_repeats import Repeats
from pdsl.lowering.probe_writes import Writes, written_from

__all__ = ["NotAChain", "Recorder", "is_plain_sequential", "loss_of", "parameter_groups", "put", "remade"]


_COMPARED = 1 << 20  # elements of a buffer up to which it is compared with what it was


class NotAChain(BaseException):
    """The blocks are not called one after the other, once each. No Exception, so that no model swallows it."""


def parameter_groups(model: nn.Module) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """All parameters by canonical name: the first name, then every other name of the same parameter or of one that shares its memory."""
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
    first: dict[object, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        keys = [id(parameter)]
        if parameter.numel() and parameter.layout == torch.strided:
            keys.append((parameter.untyped_storage()._cdata, parameter.storage_offset(), tuple(parameter.shape), parameter.stride()))  # type: ignore[arg-type]
        canonical = next((first[k] for k in keys if k in first), name)
        for key in keys:
            first.setdefault(key, canonical)
        groups.setdefault(canonical, []).append((name, parameter))
    return groups


def remade(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter with other data, trained or not as this one is, with the attributes that were set on it."""
    made = nn.Parameter(data, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def put(model: nn.Module, group: Iterable[tuple[str, nn.Parameter]], parameter: nn.Parameter) -> None:
    """Let all names of a group, as `parameter_groups` has them, be this parameter."""
    for name, _ in group:
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = parameter


def is_plain_sequential(model: nn.Module) -> bool:
    """Whether the model is an `nn.Sequential` that does nothing but call its children in turn."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward and len(model) > 0


class _Uses(TorchFunctionMode):
    """Tells `note` of every tensor that an operation reads: one that gives a tensor, or a plain value of one."""

    _READS = frozenset({"item", "tolist", "__bool__", "__float__", "__int__"})

    def __init__(self, note: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.note = note
        self.running = ""  # the function that runs now

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.running = getattr(func, "__name__", "")
        result = func(*args, **(kwargs or {}))
        self.running = ""
        if getattr(func, "__name__", "") in self._READS or any(isinstance(r, Tensor) for r in tree_leaves(result)):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self.note(leaf)
        return result


class _Operations(TorchDispatchMode):
    """Counts the operations of matrix products by torch's own formulas, and of attention on CPU, for which torch has none; tells `drawn` of every
    operation that draws random numbers, and whether it is none of torch's own.
    """

    def __init__(self, drawn: Callable[[str, Tensor, bool], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.drawn = drawn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        foreign = func.namespace not in ("aten", "prim", "prims")
        state = torch.get_rng_state() if foreign else None
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags or (state is not None and not torch.equal(state, torch.get_rng_state())):
            drawn = next((t for t in tree_leaves(result) if isinstance(t, Tensor)), None)
            if drawn is not None:
                self.drawn(func._overloadpacket.__name__, drawn, foreign)
        packet = func._overloadpacket
        if packet in flop_registry:
            self.total += int(flop_registry[packet](*args, **kwargs, out_val=result))
        elif packet.__name__ == "_scaled_dot_product_flash_attention_for_cpu":
            (b, h, s, d), t, v = args[0].shape, args[1].shape[-2], args[2].shape[-1]
            self.total += 2 * b * h * s * t * (d + v)
        return result


class Recorder:
    """Watches one forward pass and keeps what `Observation` holds."""

    def __init__(self, model: nn.Module, blocks: tuple[str, ...], batch: Mapping[str, Tensor], numerics: Numerics | None = None) -> None:
        self.model = model
        self.numerics = numerics
        self.blocks = blocks
        groups = parameter_groups(model)
        self.names = {id(p): canonical for canonical, group in groups.items() for _, p in group}
        self.aliases_of = {canonical: tuple(name for name, _ in group) for canonical, group in groups.items()}
        held = [*model.parameters(), *model.buffers(), *batch.values()]
        self.exempt = {t.untyped_storage()._cdata for t in held}  # memory that is there anyway
        self.order: list[str] = []
        self.used: dict[str, set[int]] = {}
        self.modules: list[list[str]] = [[]]
        self.saved: list[dict[int, int]] = [{}]
        self.flops_at: list[int] = []
        self.marks: list[int] = []  # sequence number of autograd at the begin of segments 1, 2, ...
        self.crossings: list[list[tuple[int, Tensor, Tensor, int]]] = [[]]  # leaf, source, what the block got, its version then
        self.passthrough: list[bool] = []
        self.made: set[int] = set()  # ids of tensors that a block returned
        self.aliases: dict[Any, int] = {}  # autograd node of an alias -> id of its source
        self.alive: list[object] = []  # ids stay unique as long as their objects live
        self.inside = ""
        self.running: list[str] = []  # modules outside of blocks, the outermost first
        self.updated: tuple[tuple[str, tuple[int, ...], str], ...] = ()  # buffers that the forward changed
        self.outside: set[str] = set()  # parameters read while no module that holds them runs
        self.writes = Writes()
        self.draws: list[Draw] = []
        self.flops = _Operations(self._drawn)
        self.uses = _Uses(self._note)
        again = numerics.recompute if numerics is not None else ()
        self.repeats = Repeats(again, lambda: self.segment, lambda: self.flops.total, self._keep)
        self.paths = {id(m): name for name, m in model.named_modules()}

    @property
    def segment(self) -> int:
        return len(self.marks)

    def run(self, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor], rows: int) -> Observation:
        """Call the model and tell what happened."""
        state = torch.get_rng_state()
        buffers = {name: (b, b._version, b.clone() if b.numel() <= _COMPARED else None) for name, b in self.model.named_buffers()}
        with ExitStack() as stack:
            if not is_plain_sequential(self.model):
                self._hook(stack)
            for handle in self.numerics.install(self.model) if self.numerics is not None else ():
                stack.callback(handle.remove)
            self.repeats.install(self.model, stack)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t))
            stack.enter_context(self.flops)
            stack.enter_context(self.uses)
            output = self._call_children(args[0]) if is_plain_sequential(self.model) and self.blocks else self.model(*args, **kwargs)
        missing = [b for b in self.blocks if b not in self.order]
        if missing:
            raise NotAChain(f"{missing[0]} was not called" + (f", nor were {len(missing) - 1} others" if len(missing) > 1 else ""))
        if not self.blocks:
            self._begin_segment()
        now, running = dict(self.model.named_buffers()), _running_buffers(self.model)
        self.updated = tuple(
            (name, tuple(b.shape), str(b.dtype).removeprefix("torch."))
            for name, (b, version, before) in buffers.items()
            if now.get(name) is not b
            or b._version != version
            or name in running
            or (before is not None and not torch.allclose(b, before, rtol=0.0, atol=0.0, equal_nan=True))
        )
        return self._observation(output, rows, random=not torch.equal(state, torch.get_rng_state()))

    def _call_children(self, x: Any) -> Any:
        for name, child in self.model._modules.items():
            (x,), _ = self._enter(name, (x,), {})
            x = self._leave((x,), {}, child(x) if child is not None else x)
        return x

    # --- hooks --------------------------------------------------------------------------------------------------------------------------

    def _hook(self, stack: ExitStack) -> None:
        for name, module in self.model.named_modules():
            if name in self.blocks:
                handles = [
                    module.register_forward_pre_hook(lambda _, a, k, n=name: self._enter(n, a, k), with_kwargs=True),
                    module.register_forward_hook(lambda _, a, k, out: self._leave(a, k, out), with_kwargs=True),
                ]
            elif self._countable(name, module):
                handles = [
                    module.register_forward_pre_hook(lambda *_, n=name: self._module_begins(n)),
                    module.register_forward_hook(lambda *_: self._module_ends()),
                ]
            else:
                continue
            for handle in handles:
                stack.callback(handle.remove)

    def _countable(self, name: str, module: nn.Module) -> bool:
        """Modules that may belong to prologue, glue or epilogue: with parameters, neither in a block nor around one."""
        if not name or next(module.parameters(), None) is None:
            return False
        return not any(name.startswith(f"{b}.") or b.startswith(f"{name}.") for b in self.blocks)

    def _module_begins(self, name: str) -> None:
        if not self.running and not self.inside and name not in self.modules[-1]:
            self.modules[-1].append(name)
        self.running.append(name)

    def _module_ends(self) -> None:
        self.running.pop()

    def _note(self, tensor: Tensor) -> None:
        name = self.names.get(id(tensor))
        if name is None:
            return
        self.used.setdefault(name, set()).add(self.segment)
        holders = [m for m in (self.inside, *self.running) if m]
        if not any(alias.startswith(f"{m}.") for alias in self.aliases_of[name] for m in holders):
            self.outside.add(name)

    def _drawn(self, operation: str, tensor: Tensor, foreign: bool) -> None:
        """Note a random operation; the module is that of the innermost forward that runs."""
        frame: FrameType | None = sys._getframe(1)
        place = None
        while frame is not None and place is None:
            place = self.paths.get(id(frame.f_locals.get("self")))
            frame = frame.f_back
        self.draws.append(Draw(self.segment, operation, self.uses.running, place or "", tuple(tensor.shape), foreign))

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.exempt and not self.repeats.takes(storage._cdata, storage.nbytes()):
            self._keep(storage._cdata, storage.nbytes())
        return tensor

    def _keep(self, storage: int, size: int) -> None:
        if storage not in self.exempt:
            self.saved[-1][storage] = size

    def _begin_segment(self) -> None:
        self.flops_at.append(self.flops.total)
        with torch.enable_grad():
            node: Any = torch.zeros((), requires_grad=True).view(()).grad_fn
        self.marks.append(node._sequence_nr())
        self.modules.append([])
        self.saved.append({})
        self.crossings.append([])

    def _enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.inside:
            raise NotAChain(f"{name} is called inside {self.inside}")
        if name in self.order:
            raise NotAChain(f"{name} is called more than once")
        self.inside = name
        self.order.append(name)
        self._begin_segment()
        leaves, spec = tree_flatten((args, kwargs))
        if not torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise NotAChain(f"{name} runs without autograd on tensors that need a gradient, as under checkpoint(..., use_reentrant=True)")
        given = self._aliased(leaves)
        self.writes.enters(self.segment, given, self.crossings[-1])
        args, kwargs = tree_unflatten(given, spec)
        return args, kwargs

    def _aliased(self, leaves: list[Any]) -> list[Any]:
        """Note what crosses; tensors that need a gradient are replaced by copies, so that autograd's graph shows who reads them here."""
        given: dict[int, Any] = {}
        self.alive.append(list(leaves))
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or id(leaf) in self.names or id(leaf) in given:
                continue
            if not leaf.requires_grad and id(leaf) not in self.made:
                continue
            copy = leaf.clone() if leaf.requires_grad else leaf
            given[id(leaf)] = copy
            if leaf.requires_grad:
                self.aliases[copy.grad_fn] = id(leaf)
            if id(leaf) in self.made:
                self.made.add(id(copy))
            self.crossings[-1].append((i, leaf, copy, copy._version))
        return [given.get(id(leaf), leaf) for leaf in leaves]

    def _leave(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        self.writes.leaves(self.segment, self.inside)
        self.inside = ""
        handed = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        leaves, spec = tree_flatten(output)
        self.alive.append((args, kwargs, leaves))
        self.made |= {id(leaf) for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in handed}
        first = next(iter(args), None)
        same = isinstance(output, Tensor) and isinstance(first, Tensor) and (output.shape, output.dtype) == (first.shape, first.dtype)
        self.passthrough.append(same)
        if len(self.order) < len(self.blocks):
            return output
        self._begin_segment()
        return tree_unflatten(self._aliased(leaves), spec)

    # --- what was seen --------------------------------------------------------------------------------------------------------------------

    def _observation(self, output: Any, rows: int, *, random: bool) -> Observation:
        loss = loss_of(output)
        leaks = self._leaks([loss] if loss is not None else [t for t in tree_leaves(output) if isinstance(t, Tensor)])
        kinds = self.writes.kinds(self.crossings, leaks)
        leaks |= {s: why for s, why in self.writes.reasons(self.crossings).items() if s not in leaks}
        ends = [*self.flops_at, self.flops.total]
        begins = [0, *self.flops_at]
        segments = [
            Segment(
                crossings=tuple(
                    Crossing(
                        i,
                        tuple(t.shape),
                        str(t.dtype).removeprefix("torch."),
                        source.requires_grad,
                        written_from(self.crossings, s, source),
                    )
                    for i, source, t, _ in self.crossings[s]
                ),
                modules=tuple(self.modules[s]),
                flops=ends[s] - begins[s],
                saved=sum(self.saved[s].values()),
                leak=leaks.get(s, ""),
                writes=kinds.get(s, ""),
                again_flops=self.repeats.flops.get(s, 0),
                again=self.repeats.bytes.get(s, 0),
            )
            for s in range(len(ends))
        ]
        used = {name: frozenset(at) for name, at in self.used.items()}
        passthrough, outside = tuple(self.passthrough), frozenset(self.outside)
        found = Observation(
            rows,
            tuple(self.order),
            tuple(segments),
            used,
            passthrough,
            random,
            loss is not None,
            outside,
            self.updated,
            tuple(self.draws),
            output=tuple(output.shape) if loss is None and isinstance(output, Tensor) else None,
        )
        return evolve(found, unrepeatable=self.repeats.reasons(name for name, _, _ in self.updated))

    def _leaks(self, roots: list[Tensor]) -> dict[int, str]:
        """For each segment whose begin the loss reads past, and not only through what crosses: a parameter that it reaches so.

        Nodes of autograd are numbered as they are made, so a number tells the segment. An edge into an earlier segment is fine exactly if it
        starts at the alias of a tensor that crosses every boundary between.
        """
        carried = [{id(source) for _, source, _, _ in crossing} for crossing in self.crossings]
        leaks: dict[int, str] = {}
        waiting: list[Any] = [t.grad_fn for t in roots if t.grad_fn is not None]
        visited = set(waiting)
        while waiting:
            node = waiting.pop()
            later = bisect_right(self.marks, node._sequence_nr())
            for below, _ in node.next_functions:
                if below is None or hasattr(below, "variable"):
                    continue
                source = self.aliases.get(node)
                for s in range(bisect_right(self.marks, below._sequence_nr()) + 1, later + 1):
                    if source not in carried[s]:
                        leaks.setdefault(s, self._leak_text(below))
                if below not in visited:
                    visited.add(below)
                    waiting.append(below)
        return leaks

    def _leak_text(self, node: Any) -> str:
        """Names a parameter of the segment in which `node` was made that goes into it."""
        text = "what follows also reads earlier results than those it is given"
        begin = bisect_right(self.marks, node._sequence_nr())
        waiting, visited = [node], {node}
        while waiting:
            for below, _ in waiting.pop(0).next_functions:
                name = self.names.get(id(getattr(below, "variable", None)))
                if name is not None:
                    return f"{text} (made with {name})"
                if below is not None and below not in visited and bisect_right(self.marks, below._sequence_nr()) == begin:
                    visited.add(below)
                    waiting.append(below)
        return text


def loss_of(output: Any) -> Tensor | None:
    """The loss in what a model returned: a scalar, or a scalar under the name `loss`."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(found, tuple) and found:
        found = found[0]
    return found if isinstance(found, Tensor) and found.numel() == 1 else None


def _running_buffers(model: nn.Module) -> set[str]:
    """Buffers that normalisation updates in its kernel, of which torch keeps no count."""
    norms = {n: m for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase)}
    tracking = {n: m for n, m in norms.items() if m.training and m.track_running_stats}
    return {f"{n}.{key}" if n else key for n, m in tracking.items() for key, b in m._buffers.items() if b is not None}
