"""Random numbers that belong to rows: every plan draws for a row what one process draws for it.

A random operation of a forward in training mode gets its numbers row by row, each row's from a generator seeded by (seed, step, segment of the
model, number of the draw in the segment, place of the row in the global batch). What the probe found out says which dim holds the rows, and
how large a row is as a whole: a rank that holds a part of it takes its part of the same numbers. A draw without rows (one number for a whole
layer, noise on a weight) is the same for all rows of a step. What cannot be told apart by rows is drawn from torch's own generator, which is seeded anew
for each (seed, step, microbatch, shard, segment).

When the backward computes something again, `torch.utils.checkpoint` restores the state of torch's generator. Every draw takes one number from
there, its token, and a token that was seen before stands for the draw of that time.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pdsl.grammar.errors import RunError
from pdsl.lowering.facts import DrawFacts, LayerKind, ModelFacts, Rowed
from pdsl.runtime.row_filling import Window, draw_rows

__all__ = ["Draws", "row_seeded"]

_MASK = (1 << 64) - 1


@frozen
class _Drawn:
    """A draw of a forward: where its numbers come from, and the rows that it is for."""

    key: int
    facts: DrawFacts | None
    places: range


@define(eq=False)
class Draws:
    """The random numbers of one rank. `begin_step`, then `begin_pass` for each forward and `begin_segment` as the model comes to one, within `active`.

    `tensor` is (coordinate, size) on the tensor axes.
    """

    facts: ModelFacts
    seed: int
    shard: int = 0
    tensor: tuple[int, int] = (0, 1)
    device: torch.device = field(factory=lambda: torch.device("cpu"))
    _step: int = 0
    _microbatch: int = 0
    _places: range = range(0)
    _segment: int = 0
    _owned: bool = True
    _count: int = 0
    _known: dict[tuple[int, int], DrawFacts] = field(init=False)
    _functions: frozenset[str] = field(init=False)
    _seen: dict[int, _Drawn] = field(factory=dict)
    _generators: dict[torch.device, torch.Generator] = field(factory=dict)
    _warned: set[str] = field(factory=set)

    def __attrs_post_init__(self) -> None:
        self._known, counts = {}, dict[int, int]()
        for draw in self.facts.draws:
            ordinal = counts.get(draw.segment, 0)
            self._known[draw.segment, ordinal] = draw
            counts[draw.segment] = ordinal + 1
        self._functions = frozenset(d.function for d in self.facts.draws if d.function)

    def begin_step(self, step: int) -> None:
        """Of a 0-based step."""
        self._step = step
        self._seen.clear()

    def begin_pass(self, microbatch: int, places: range) -> None:
        """A forward of rows at these places of the global batch."""
        self._microbatch, self._places = microbatch, places
        self.begin_segment(0)

    def begin_segment(self, segment: int, *, owned: bool = True) -> None:
        """What is drawn from here on belongs to a segment. One that is not `owned` computes what nobody uses."""
        self._segment, self._owned, self._count = segment, owned, 0
        if not owned:
            return
        seed = _hashed(self.seed, self._step, self._microbatch, self.shard, segment) >> 1
        if self.device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the block random operations of passes draw by rows. It may be entered again inside, as where a backward computes something again."""
        with ExitStack() as stack:
            if self._functions and not any(isinstance(m, _Functions) for m in _get_current_function_mode_stack()):
                stack.enter_context(_Functions(self._functions, self))
            yield

    # --- one random operation -------------------------------------------------------------------------------------------------------------

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do a random operation of the dispatcher."""
        if not self._owned and not _in_backward():
            return func(*args, **kwargs)
        drawn = self._drawn()
        facts = drawn.facts
        if facts is None or facts.rowed is Rowed.OPAQUE or facts.operation != func._overloadpacket.__name__:
            if facts is None or facts.operation != func._overloadpacket.__name__:
                self._warn(
                    f"{func._overloadpacket.__name__} is drawn where the probe saw {facts.operation if facts else 'no random numbers'}"
                )
            return func(*args, **kwargs)
        shared = facts.rowed is Rowed.SHARED
        seeds = [_mixed(drawn.key, -1)] if shared else [_mixed(drawn.key, place) for place in drawn.places]
        window = Window(
            row_dim=facts.row_dim,
            rows=len(seeds),
            whole=tuple(constant + slope * (1 if shared else len(seeds)) for constant, slope in facts.dims),
            coordinate=self.tensor[0],
            parts=self.tensor[1],
        )
        result = draw_rows(func, args, kwargs, window, self._seeded(seeds))
        if result is NotImplemented:
            self._warn(f"{facts.operation} in {facts.place or 'the model'} has another shape than in the probe")
            return func(*args, **kwargs)
        return result

    def _drawn(self) -> _Drawn:
        token = int(torch.empty((), dtype=torch.int64).random_())
        found = self._seen.get(token)
        if found is not None:
            return found
        if _in_backward():
            raise RunError(
                "the backward draws random numbers that the forward did not draw: torch.utils.checkpoint needs preserve_rng_state = True"
            )
        key = _hashed(self.seed, self._step, self._segment, self._count)
        found = _Drawn(key, self._known.get((self._segment, self._count)), self._places)
        self._count += 1
        self._seen[token] = found
        return found

    def _seeded(self, seeds: Sequence[int]) -> Callable[[int, torch.device], torch.Generator]:
        """The generator of the i-th row, to be used before the next is asked for."""

        def generator(row: int, device: torch.device) -> torch.Generator:
            found = self._generators.get(device)
            if found is None:
                found = self._generators[device] = torch.Generator(device)
            return found.manual_seed(seeds[row])

        return generator

    def _warn(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"{what}: these numbers depend on microbatches and shards", stacklevel=2)


class _Functions(TorchFunctionMode):
    """Looks into the functions that were seen to draw, and into nothing else: what they cost is all that row-true numbers cost."""

    def __init__(self, names: frozenset[str], draws: Draws) -> None:
        super().__init__()
        self._names = names
        self._draws = draws

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _BACKWARDS:
            return self._backward(func, args, kwargs or {})
        if getattr(func, "__name__", "") not in self._names:
            return func(*args, **(kwargs or {}))
        with _Operations(self._draws), _decomposed(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))

    def _backward(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A backward within the mode: it may compute parts of a forward again. Of edges of the graph torch asks no mode, of tensors it does."""
        places = (*args, *(kwargs.get(name) for name in ("tensors", "inputs", "outputs")))
        found = [leaf for leaf in tree_leaves(places) if isinstance(leaf, Tensor)]
        if not all(leaf.requires_grad for leaf in found):
            return func(*args, **kwargs)  # torch has the words for it
        if func is Tensor.backward:
            func, args, kwargs = torch.autograd.backward, args[:1], dict(zip(("gradient", *_MORE), args[1:], strict=False)) | kwargs
            kwargs["grad_tensors"] = kwargs.pop("gradient", None)
        with self:
            given = {name: _edges(value) if name in ("tensors", "inputs", "outputs") else value for name, value in kwargs.items()}
            return func(*map(_edges, args), **given)


class _Operations(TorchDispatchMode):
    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draws.draw(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


_BACKWARDS = (torch.autograd.backward, torch.autograd.grad, Tensor.backward)
_MORE = ("retain_graph", "create_graph", "inputs")


def _edges(value: Any) -> Any:
    """Tensors as edges of the graph, in a tuple; what is an edge already stays one, though it is a tuple too."""
    if value is None:
        return None
    leaves = tree_leaves(value, is_leaf=lambda leaf: isinstance(leaf, GradientEdge))
    return tuple(get_gradient_edge(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)


@contextmanager
def _decomposed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Attention with dropout on a GPU in its parts: the fused kernels draw for a whole microbatch at once."""
    on_gpu = any(isinstance(a, Tensor) and a.device.type == "cuda" for a in args[:1])
    if not on_gpu or "attention" not in getattr(func, "__name__", ""):
        yield
        return
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _hashed(*parts: int) -> int:
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mixed(key: int, place: int) -> int:
    """A seed for one row: the finaliser of splitmix64, so that neighbours share nothing even in 32 bits, of which some generators take no more."""
    x = (key + (place + 2) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) >> 1


@contextmanager
def row_seeded(model: nn.Module, facts: ModelFacts, *, seed: int, step: int, places: range, microbatch: int = 0) -> Iterator[None]:
    """Within the block forwards (and backwards) of a whole model draw the random numbers that a plan with this seed draws in a 0-based step.

    `places` are those of the rows in the global batch. It is what one process does to compute the same as many, dropout and all.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    draws = Draws(facts, seed, device=device)
    draws.begin_step(step)
    blocks = [layer.name for layer in facts.layers if layer.kind is LayerKind.BLOCK and layer.name != "(model)"]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        for segment, name in enumerate(blocks, start=1):
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(lambda *_, s=segment: draws.begin_segment(s), prepend=True).remove)
        if blocks:
            last = model.get_submodule(blocks[-1])
            stack.callback(last.register_forward_hook(lambda *_: draws.begin_segment(len(blocks) + 1)).remove)
        draws.begin_pass(microbatch, places)
        stack.enter_context(draws.active())
        yield
