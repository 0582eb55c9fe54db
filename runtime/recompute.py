"""Modules whose activations are computed again in the backward, by torch's own checkpointing of the non-reentrant kind.

Checkpointing wraps the module's own forward, inside of all hooks: what gathers a sharded unit runs once for the forward and once for the backward, as without it,
and casts of inputs are not repeated. What comes in is all that is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from attrs import define
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from pdsl.grammar.errors import ModelError

__all__ = ["Recompute"]


@define(eq=False)
class Recompute:
    """How modules run again. `within` is entered when they do: autograd runs them outside of what is active around the backward. `random`: they may draw random
    numbers, which must then be drawn again.
    """

    random: bool = False
    within: Callable[[], AbstractContextManager[None]] = nullcontext

    def apply(self, model: nn.Module, names: Iterable[str]) -> None:
        """Let the named modules run again in the backward."""
        chosen = tuple(names)
        if chosen:
            # checkpointing imports it when it first runs, and what it computes then would be held by the frames of that import
            import_module("torch._dynamo")
        for name in chosen:
            module = model.get_submodule(name)
            module.forward = self._twice(name, module.forward)

    def _twice(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.random}
        if self.random:
            options["context_fn"] = lambda: (nullcontext(), self.within())

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            before = [(leaf, leaf._version) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            output = checkpoint(forward, *args, **options, **kwargs)
            if any(tensor._version != version for tensor, version in before):
                raise ModelError(f"{name} writes into what it is given, so it cannot be computed again: leave it out of `recompute`")
            return output

        return run
