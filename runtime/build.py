"""Building a model with the memory of what this rank owns, and with the weights that one process would get from the same seed.

The factory runs twice. The first run puts every parameter on the meta device and notes in which order they are made; the second keeps those that
are owned. What would draw random numbers for a parameter without memory draws them all the same, into scratch memory, so the numbers that follow
are those of a plain build. A factory for which that cannot be done, or that looks whether its parameters have memory, is run plainly, and what is
not owned is dropped afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pdsl.grammar.errors import ModelError
from pdsl.lowering.factory import call_factory, on_path, plain_arguments, resolve
from pdsl.lowering.plan import Plan
from pdsl.lowering.probe import on_meta, parameters_on_meta
from pdsl.lowering.probe_pass import parameter_groups, put, remade

__all__ = ["build", "build_model"]

_OTHER_MODEL = "the model is not the one that the plan was made for"
_ADVICE = "a factory may depend on its arguments and on files, not on the environment or on chance"


def build(
    plan: Plan, owned: Collection[str], device: torch.device, *, model: nn.Module | Callable[..., nn.Module] | None = None
) -> nn.Module:
    """The model of a plan with the parameters in `owned` (canonical names) on `device`, all others on the meta device, buffers on `device`.

    Weights equal those of one process that seeds torch with the plan's seed and calls the factory. `model` replaces the factory: a function
    without arguments, or a module with its weights, which is copied and stays as it is. Raises ModelError.
    """
    if isinstance(model, nn.Module):
        made = copy.deepcopy(model)
        _drop(made, owned)
        _check_names(made, plan)
        return _moved(made, device)
    job = plan.job
    name = job.factory if model is None else getattr(model, "__name__", "the model's factory")
    with on_path(job.directory):
        factory = resolve(job.factory, job.directory) if model is None else model
        arguments = plain_arguments(job.arguments) if model is None else {}
        made = build_model(factory, arguments, seed=job.seed, owned=owned, name=name)
    _check_names(made, plan)
    return _moved(made, device)


def build_model(factory: Callable[..., Any], arguments: Mapping[str, object], *, seed: int, owned: Collection[str], name: str) -> nn.Module:
    """`factory(**arguments)` after `torch.manual_seed(seed)`, on CPU, with only the owned parameters in memory. Torch's generators stay as they were.

    Raises ModelError if the factory raises or gives no module.
    """
    with torch.random.fork_rng():
        model: object = _replayed(factory, arguments, seed, owned, name)
        if model is None:
            torch.manual_seed(seed)
            model = call_factory(factory, arguments, name)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} returned a {type(model).__name__}: expected a torch.nn.Module")
    _drop(model, owned)
    return model


def _replayed(
    factory: Callable[..., Any], arguments: Mapping[str, object], seed: int, owned: Collection[str], name: str
) -> nn.Module | None:
    """The build in two runs, or None where the runs differ or values without memory are needed."""
    first: list[nn.Parameter] = []
    second: list[nn.Parameter] = []
    try:
        torch.manual_seed(seed)
        with parameters_on_meta(seen=first):
            plan = call_factory(factory, arguments, name)
        if not isinstance(plan, nn.Module):
            return None
        wanted = {id(p) for canonical, group in parameter_groups(plan).items() if canonical in owned for _, p in group}
        keep = [id(p) in wanted for p in first]
        shapes = [p.shape for p in first]
        del plan
        torch.manual_seed(seed)
        with parameters_on_meta(lambda k: k < len(keep) and keep[k], second), _drawing_anyway() as watch:
            model = call_factory(factory, arguments, name)
        if watch.asked:
            return None
    except ModelError:  # the plain build says what is wrong, if anything is
        return None
    if not isinstance(model, nn.Module) or [p.shape for p in second] != shapes:
        return None
    groups = parameter_groups(model)
    complete = all(p.device.type != "meta" for canonical in owned for _, p in groups.get(canonical, ()))
    return model if complete and all(b.device.type != "meta" for b in model.buffers()) else None


@contextmanager
def _drawing_anyway() -> Iterator[_Watch]:
    """Within the block random operations on tensors without memory draw what they would have drawn, functions of `torch.nn.init` too."""
    watch = _Watch()
    names = [n for n in dir(nn.init) if n.endswith("_") and not n.startswith("__") and callable(getattr(nn.init, n))]
    originals = {n: getattr(nn.init, n) for n in names}
    for n, original in originals.items():
        setattr(nn.init, n, _on_scratch(original))
    try:
        with watch, _DrawAnyway():  # type: ignore[no-untyped-call]
            yield watch
    finally:
        for n, original in originals.items():
            setattr(nn.init, n, original)


def _on_scratch(initialise: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of `torch.nn.init`, run on scratch memory for a tensor that has none: some of them do nothing then, and draw nothing."""

    @wraps(initialise)
    def run(*args: Any, **kwargs: Any) -> Any:
        tensor = kwargs.get("tensor", args[0] if args else None)
        if isinstance(tensor, Tensor) and _bare(tensor):
            with torch.no_grad():
                initialise(*tree_map(_scratch, args), **tree_map(_scratch, kwargs))
            return tensor
        return initialise(*args, **kwargs)

    return run


class _Watch(TorchFunctionMode):
    """Notes whether anything asked if a tensor without memory is one: what it did then is not what a plain build does."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.asked = self.asked or (result is True and getattr(func, "__self__", None) is Tensor.is_meta)
        return result


class _DrawAnyway(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random and any(_bare(leaf) for leaf in tree_leaves((args, kwargs))):
            func(*tree_map(_scratch, args), **tree_map(_scratch, kwargs))
        return func(*args, **kwargs)


def _bare(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "meta"


def _scratch(leaf: Any) -> Any:
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype) if _bare(leaf) else leaf


def _drop(model: nn.Module, owned: Collection[str]) -> None:
    """Move what is not owned to the meta device; names of one parameter stay names of one parameter."""
    for canonical, group in parameter_groups(model).items():
        parameter = group[0][1]
        kept = parameter if canonical in owned else parameter if parameter.device.type == "meta" else on_meta(parameter)
        put(model, group, kept)


def _moved(model: nn.Module, device: torch.device) -> nn.Module:
    """All that has memory, on the device. `Module.to` refuses meta tensors, so each is moved by itself."""
    if device.type == "cpu":
        return model
    for group in parameter_groups(model).values():
        parameter = group[0][1]
        if parameter.device.type == "meta":
            continue
        put(model, group, remade(parameter, parameter.detach().to(device)))
    for module in model.modules():
        module._buffers.update({n: b.to(device) for n, b in module._buffers.items() if b is not None})
    return model


def _check_names(model: nn.Module, plan: Plan) -> None:
    """Raises ModelError if the model has other parameters than the plan was made for."""
    found = {name: tuple(group[0][1].shape) for name, group in parameter_groups(model).items()}
    planned = {p.name: p.shape for p in plan.facts.parameters}
    if found == planned:
        return
    missing = [n for n in planned if n not in found]
    extra = [n for n in found if n not in planned]
    if missing or extra:
        what = [f"the plan has {missing[0]}, the model has not"] if missing else []
        what += [f"the model has {extra[0]}, the plan has not"] if extra else []
        raise ModelError(f"{_OTHER_MODEL}: {'; '.join(what)}; {_ADVICE}")
    name = next(n for n in planned if planned[n] != found[n])
    raise ModelError(f"{_OTHER_MODEL}: {name} is {found[name]}, in the plan {planned[name]}; {_ADVICE}")
