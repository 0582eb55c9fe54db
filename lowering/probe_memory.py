"""Which parameters and buffers lie in the same memory, also when parameters lose theirs: views of one storage stay views of one storage."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pdsl.lowering.probe_pass import parameter_groups

__all__ = ["Memories", "shared_memory"]

_LARGEST = 1 << 24  # elements of a storage up to which overlaps are looked for one by one

_found: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[str, str], ...]] = weakref.WeakKeyDictionary()


@define(eq=False)
class Memories:
    """The storages that parameters had, and the ones without memory that stand for them."""

    _bases: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = field(factory=dict)

    def bare(self, parameter: Tensor) -> Tensor:
        """A tensor without memory that lies in its storage as the parameter does in its own."""
        storage = parameter.untyped_storage()
        reference, base = self._bases.get(storage._cdata, (None, None))
        if reference is None or base is None or reference.expired():
            base = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
            self._bases[storage._cdata] = StorageWeakRef(storage), base
        found = torch.empty(0, dtype=parameter.dtype, device="meta")
        found.set_(base, parameter.storage_offset(), parameter.shape, parameter.stride())
        return found

    def base_of(self, tensor: Tensor) -> int:
        """What tells the storage of a tensor, or of the parameter that had it."""
        storage = tensor.untyped_storage()
        reference, base = self._bases.get(storage._cdata, (None, None))
        if reference is None or base is None or reference.expired():
            return int(storage._cdata)
        return int(base._cdata)

    def note(self, model: nn.Module) -> None:
        """Find out what shares memory in a model that was just built, for `shared_memory` to tell."""
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
            return
        parameters = {name: group[0][1] for name, group in parameter_groups(model).items() if group[0][1].layout == torch.strided}
        by_base: dict[int, list[tuple[str, Tensor]]] = {}
        for name, parameter in parameters.items():
            if parameter.numel():
                by_base.setdefault(self.base_of(parameter), []).append((name, parameter))
        pairs = [pair for found in by_base.values() if len(found) > 1 for pair in _overlapping(found)]
        for name, buffer in model.named_buffers():
            if buffer.layout == torch.strided and buffer.numel():
                pairs += [(name, p) for p, tensor in by_base.get(self.base_of(buffer), ()) if _overlap(buffer, tensor)][:1]
        _found[model] = tuple(pairs)


def shared_memory(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Pairs of a buffer or parameter and a parameter that lie in the same memory and are not one, as `Memories.note` found them."""
    return _found.get(model, ())


def _overlapping(tensors: list[tuple[str, Tensor]]) -> Iterable[tuple[str, str]]:
    for i, (name, tensor) in enumerate(tensors):
        first = next((other for other, before in tensors[:i] if _overlap(tensor, before)), None)
        if first is not None:
            yield name, first


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    size = max(_end(one), _end(other))
    if min(_end(one), _end(other)) <= max(one.storage_offset(), other.storage_offset()) or size > _LARGEST:
        return False
    taken = torch.zeros(size, dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _end(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
