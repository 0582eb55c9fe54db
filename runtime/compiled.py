"""Layers compiled with torch.compile, each by itself.

What is compiled is a layer's own forward, inside of all hooks: sharded parameters are gathered before it and given back after it, and a pipeline runs its
stages as ever. Blocks of one shape share one compiled graph, also with those of a part that is made anew after a loss: it is kept for
the code of the forward, not for the module.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pdsl.grammar.errors import RunError
from pdsl.lowering.facts import ModelFacts
from pdsl.lowering.plan import Plan

__all__ = ["compile_layers", "require_compiler"]

_EXCHANGES = ("pdsl.runtime.tensor_parallel", "pdsl.runtime.tensor_collectives")


def require_compiler(plan: Plan, device: torch.device) -> None:
    """Raises RunError if layers are to be compiled for a CPU, for which inductor writes C++, and this machine has no compiler for that."""
    if plan.compile != "inductor" or device.type != "cpu":
        return
    asked = os.environ.get("CXX")
    names = (asked,) if asked else ("g++", "clang++", "c++")
    if not any(shutil.which(name) for name in names):
        raise RunError(
            f"train {{ compile = true }} needs a C++ compiler to run on a CPU, and there is none: looked for {', '.join(names)}; "
            "install one, or say compile = aot_eager, which needs none and saves no time"
        )


def compile_layers(plan: Plan, model: nn.Module, layers: Iterable[int]) -> None:
    """Compile the forward of every module of these layers. Compiling itself is done when a layer first runs. Raises as `require_compiler`."""
    if not plan.compile:
        return
    from torch._dynamo import trace_rules  # slow to import

    require_compiler(plan, next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu")))
    if plan.tensor_size > 1:
        for source in _EXCHANGES:  # what tensor ranks exchange stays between the compiled parts of a layer
            trace_rules.add(source)
    options: dict[str, Any] = {}
    if plan.compile == "inductor":
        import torch._inductor.config as inductor

        # processes of its own would outlive a rank that is killed; and random numbers must be those that eager layers draw
        inductor.compile_threads = 1
        options = {"options": {"fallback_random": True}}
    for name in _modules(plan.facts, layers):
        module = model.get_submodule(name)
        module.forward = torch.compile(module.forward, backend=plan.compile, dynamic=False, **options)


def _modules(facts: ModelFacts, layers: Iterable[int]) -> tuple[str, ...]:
    """Names of the modules of some layers; one that holds the whole model is left alone, since stages patch its forward."""
    return tuple(dict.fromkeys(m for i in layers for m in facts.layers[i].modules if m))
