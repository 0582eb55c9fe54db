"""Watching modules that are to be computed again in the backward: what is kept of them, what they take then, and whether they can be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from attrs import define, field
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["Repeats"]


@define(eq=False)
class Repeats:
    """Of a module in `names`, only what goes in is kept until the backward; `keep(storage, bytes)` is told of it.

    `flops` and `bytes` are, by segment of the pass, what is computed again and what the largest of the modules takes while its backward runs.
    `unrepeatable` says which of them cannot be run twice.
    """

    names: tuple[str, ...]
    segment: Callable[[], int]
    total: Callable[[], int]
    keep: Callable[[int, int], None]
    flops: dict[int, int] = field(factory=dict)
    bytes: dict[int, int] = field(factory=dict)
    unrepeatable: list[str] = field(factory=list)
    _inside: dict[int, int] | None = None  # what autograd keeps inside the module that runs
    _given: set[int] = field(factory=set)
    _seen: list[tuple[Tensor, int]] = field(factory=list)
    _alive: list[Tensor] = field(factory=list)

    def install(self, model: nn.Module, stack: ExitStack) -> None:
        """Hook the modules; to be called after every other hook on what goes into them."""
        for name in self.names:
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(self._begins, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(lambda *_, n=name: self._ends(n), prepend=True).remove)

    def takes(self, storage: int, size: int) -> bool:
        """Whether a tensor that autograd keeps is one that comes back when the module runs again."""
        if self._inside is None:
            return False
        if storage not in self._given:
            self._inside[storage] = size
        return True

    def reasons(self, updated: Iterable[str]) -> tuple[str, ...]:
        """Why modules cannot be computed again; `updated` are the buffers that the forward writes."""
        twice = (
            f"{name} updates its buffer {b}, which would happen twice" for b in updated for name in self.names if b.startswith(f"{name}.")
        )
        return (*self.unrepeatable, *twice)

    def _begins(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._seen = [(t, t._version) for t in tensors]
        self._alive += tensors  # the id of a storage is its own as long as it lives
        self._given = {t.untyped_storage()._cdata for t in tensors}
        for t in tensors:
            self.keep(t.untyped_storage()._cdata, t.untyped_storage().nbytes())
        self._inside = {}
        self._add(-self.total())

    def _ends(self, name: str) -> None:
        at = self.segment()
        self._add(self.total())
        self.bytes[at] = max(self.bytes.get(at, 0), sum((self._inside or {}).values()))
        self._inside = None
        if any(tensor._version != version for tensor, version in self._seen):
            self.unrepeatable.append(f"{name} writes into what it is given")

    def _add(self, flops: int) -> None:
        self.flops[self.segment()] = self.flops.get(self.segment(), 0) + flops
