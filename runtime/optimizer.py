"""Optimizers on local shards, and learning rates as pure functions of the step.

The optimizers of the language work element by element, so they may run on each rank's boxes alone. They are given plain tensors that share the
storage of the parameters: DTensor dispatch is paid in the model, not again for every parameter in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from math import cos, pi

import torch
from torch import nn

from pdsl.grammar.errors import RunError
from pdsl.lowering.spec import CallValue, Quantity, Value
from pdsl.runtime.local import local_tensor

__all__ = ["LocalOptimizer", "OptimizerFactory", "make_optimizer", "rate_at"]

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def _number(value: Value, default: float) -> float:
    if isinstance(value, Quantity):
        return float(value.value)
    return float(value) if isinstance(value, (int, Fraction)) else default


def rate_at(rate: CallValue, step: int, steps: int) -> float:
    """The factor of the learning rate at a 0-based step: linear warm-up over `warmup` steps, then constant, or a linear or cosine decay to
    `floor` at the last step.
    """
    warmup = int(_number(rate.get("warmup"), 0))
    floor = _number(rate.get("floor"), 0.0)
    if step < warmup:
        return (step + 1) / warmup
    if rate.name == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    share = 1.0 - done if rate.name == "linear" else 0.5 * (1.0 + cos(pi * done))
    return floor + (1.0 - floor) * share


def make_optimizer(call: CallValue, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer that a call of the language names. Raises RunError for an unknown name."""
    params = list(parameters)
    fused = all(p.is_floating_point() for p in params)  # there is no fused step for complex numbers
    rate = _number(call.get("lr"), 1e-3)
    decay = _number(call.get("weight_decay"), 0.01 if call.name == "adamw" else 0.0)
    if call.name == "adamw":
        betas = call.get("betas")
        b1, b2 = (_number(b, 0.9) for b in betas) if isinstance(betas, tuple) else (0.9, 0.999)
        return torch.optim.AdamW(params, lr=rate, betas=(b1, b2), eps=_number(call.get("eps"), 1e-8), weight_decay=decay, fused=fused)
    if call.name == "sgd":
        momentum = _number(call.get("momentum"), 0.0)
        nesterov = call.get("nesterov") is True
        return torch.optim.SGD(params, lr=rate, momentum=momentum, nesterov=nesterov, weight_decay=decay)
    raise RunError(f"no optimizer {call.name}; adamw and sgd are known")


def _made(factory: object, held: list[nn.Parameter]) -> torch.optim.Optimizer:
    if isinstance(factory, torch.optim.Optimizer) or not callable(factory):
        raise RunError(
            "an optimizer made before the session holds parameters that are not the session's; give a function from parameters to optimizer"
        )
    made: object = factory(held)
    if not isinstance(made, torch.optim.Optimizer):
        raise RunError(f"the optimizer's function gave a {type(made).__name__}: expected a torch.optim.Optimizer")
    ours = {id(p) for p in held}
    foreign = sum(id(p) not in ours for g in made.param_groups for p in g["params"])
    if foreign:
        raise RunError(f"the optimizer holds {foreign} parameters that are not the session's; make it from the parameters that it is given")
    return made


class LocalOptimizer:
    """One rank's optimizer over the boxes it owns. A rank that owns nothing trainable has an empty one."""

    def __init__(
        self, call: CallValue, parameters: Mapping[str, nn.Parameter], factory: OptimizerFactory | None = None, *, host: bool = False
    ) -> None:
        """With `host` the optimizer works in the memory of the host, on copies of the weights that are brought back after each step: neither its
        state nor its arithmetic needs the device. `factory`, if given, makes the optimizer from the local parameters in place of what `call` names.

        Raises RunError if it is no function, or if what it makes holds other parameters: an optimizer that was built before sharding
        would step on weights that the model no longer uses, without a word.
        """
        self._here = {n: local_tensor(p.data) for n, p in parameters.items()}
        self._host = host
        where = {n: t.to("cpu", copy=True) if host else t for n, t in self._here.items()}
        self._locals = {n: nn.Parameter(t, requires_grad=True) for n, t in where.items()}
        held = [p for p in self._locals.values() if p.numel()]
        self._optimizer = (_made(factory, held) if factory is not None else make_optimizer(call, held)) if held else None
        self._rates = [g["lr"] for g in self._optimizer.param_groups] if self._optimizer is not None else []

    def step(self, gradients: Mapping[str, torch.Tensor], factor: float) -> None:
        """Update with the given local gradients at `factor` times the base rate. A parameter without gradient stays as it is."""
        if self._optimizer is None:
            return
        for name, parameter in self._locals.items():
            grad = gradients.get(name)
            parameter.grad = None if grad is None else grad.to(parameter.device)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        step: Callable[[], object] = self._optimizer.step
        step()
        for parameter in self._locals.values():
            parameter.grad = None
        if self._host:
            for name, parameter in self._locals.items():
                self._here[name].copy_(parameter.data)

    def take_weights(self) -> None:
        """The weights have changed where they are: let the optimizer go on from there."""
        if self._host:
            for name, parameter in self._locals.items():
                parameter.data.copy_(self._here[name])

    def state(self) -> dict[str, torch.Tensor]:
        """What the optimizer keeps, as `KEY/NAME`; it shares storage. A parameter that never got a gradient has none.

        Raises RunError for an optimizer of the user's that keeps anything but tensors.
        """
        if self._optimizer is None:
            return {}
        found = {}
        for name, parameter in self._locals.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if value is None:
                    continue
                if not isinstance(value, torch.Tensor):
                    raise RunError(f"the optimizer keeps a {type(value).__name__} ({key}) for {name}: only tensors can be moved and saved")
                found[f"{key}/{name}"] = value
        return found

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state` gave, by reference."""
        if self._optimizer is None:
            return
        self._optimizer.state.clear()
        for full, value in state.items():
            key, _, name = full.partition("/")
            parameter = self._locals.get(name)
            if parameter is not None and parameter.numel():
                self._optimizer.state.setdefault(parameter, {})[key] = value

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The local boxes by name; they share the storage of the model's parameters."""
        return dict(self._here)
