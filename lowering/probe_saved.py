"""What autograd keeps of a forward for its backward, by layer: each storage once a layer, without what is there anyway."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from pdsl.lowering.facts import ModelFacts
from pdsl.lowering.probe_tensor_trace import WholeRun

__all__ = ["SavedBytes"]


class SavedBytes:
    """Counts within a `with` block. A tensor counts for the layer whose module runs then, else for the last layer that one counted for."""

    def __init__(self, facts: ModelFacts, run: WholeRun, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        self._run = run
        self._layer_of = {module: i for i, layer in enumerate(facts.layers) for module in layer.modules}
        self._exempt = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), *batch.values())}
        self._seen: list[dict[int, int]] = [{} for _ in facts.layers]
        self._layer = 0
        self._alive: list[Tensor] = []  # storages keep their addresses as long as they live
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._hooks.__exit__(kind, error, traceback)

    @property
    def bytes(self) -> tuple[int, ...]:
        """Of each layer."""
        return tuple(sum(sizes.values()) for sizes in self._seen)

    def _pack(self, tensor: Tensor) -> Tensor:
        with self._run.muted():
            storage = tensor.untyped_storage()
            if storage._cdata not in self._exempt:
                self._layer = self._now()
                self._seen[self._layer][storage._cdata] = storage.nbytes()
                self._alive.append(tensor.detach())
            return tensor

    def _now(self) -> int:
        """The layer of the innermost running module that belongs to one."""
        for path in reversed(self._run.at):
            parts = path.split(".")
            for end in range(len(parts), 0, -1):
                found = self._layer_of.get(".".join(parts[:end]))
                if found is not None:
                    return found
        return self._layer
