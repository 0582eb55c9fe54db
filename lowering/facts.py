"""ModelFacts: what planning needs to know of a model, read once without weights, kept as plain data.

A model is a chain of layers: a prologue, blocks in the order in which they are called, an epilogue. What the model does between two blocks
belongs to the first of them. Prologue and epilogue are layers only where they own parameters or multiply; else the first or the last block does
what little there is.
"""

from __future__ import annotations

from enum import Enum

from attrs import frozen

__all__ = ["SINGLE_INPUT", "TARGETS", "BoundaryTensor", "BufferFacts", "LayerFacts", "LayerKind", "ModelFacts", "ParameterFacts"]

SINGLE_INPUT = "input"
"""The name of the batch entry of a model that was run with one tensor and no names."""

TARGETS = ("targets", "target", "labels", "label")
"""Names of the batch entry that an objective compares the output with; a model that does not take it is called without."""


class LayerKind(Enum):
    """Where in the chain a layer stands."""

    PROLOGUE = "prologue"
    BLOCK = "block"
    EPILOGUE = "epilogue"


@frozen
class BoundaryTensor:
    """One tensor that crosses the boundary into a layer.

    `dims` holds (constant, per_row) for each dim: the size is constant + per_row * rows. `leaf` is its index among the flattened positional
    and keyword arguments of the block's call (of the last block's output for a boundary into the epilogue). `mutated` says that the model
    writes into it after the boundary, so a stage has to work on a copy.
    """

    leaf: int
    dims: tuple[tuple[int, int], ...]
    dtype: str
    differentiable: bool
    mutated: bool = False

    def shape(self, rows: int) -> tuple[int, ...]:
        """The shape for a microbatch of `rows` samples."""
        return tuple(constant + per_row * rows for constant, per_row in self.dims)


@frozen
class LayerFacts:
    """One layer of the chain.

    `name` is the block's module name; the prologue and epilogue are named by their first module, or `(prologue)`, `(epilogue)` if they own
    none; the one layer of a model without a chain is `(model)`. `modules` are the outermost modules that belong to it and have parameters.
    `parameters` are the canonical names of the parameters used in it (a tied one appears in several layers). FLOPs are those of the matrix
    products of one forward, per sample; `activation_bytes` is what autograd saves per sample, in fp32, each storage once per layer.
    `inputs` cross the boundary into this layer. `cut_before` is empty if a stage may begin here, else says why not. `passthrough` says that the
    block turns its first argument into one tensor of the same shape and dtype.
    """

    name: str
    kind: LayerKind
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    flops: int
    activation_bytes: int
    inputs: tuple[BoundaryTensor, ...] = ()
    cut_before: str = ""
    passthrough: bool = False


@frozen
class ParameterFacts:
    """One parameter under its canonical (first) name. `aliases` are its other names (tied weights). `layers` are the layers that use it, in
    order. `module` is the class name of the module that holds it (`Linear`, `Embedding`). `outside` tells that it lies in the module of a
    layer and is read by code outside of that module, when it may not be gathered.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    layers: tuple[int, ...]
    module: str
    aliases: tuple[str, ...] = ()
    outside: bool = False

    @property
    def numel(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def bytes(self) -> int:
        return self.numel * {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}.get(self.dtype, 4)


@frozen
class BufferFacts:
    """A buffer that the forward updates, so that it is state: held whole by every rank that runs one of its layers."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layers: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES.get(self.dtype, 4)


_ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@frozen
class ModelFacts:
    """All facts of one model. `sequential` tells the easy case: the model is an `nn.Sequential` and its output needs an objective.
    `random` tells whether a forward in training mode draws random numbers. `inputs` are the names of the batch entries that the model
    was called with; `updated` are the buffers that the forward writes. `loss` tells whether it returned a loss: a scalar, or an output with one under that name. `warnings` are things worth
    telling, such as normalisation with batch statistics or what stands in the way of a chain.
    """

    factory: str
    layers: tuple[LayerFacts, ...]
    parameters: tuple[ParameterFacts, ...]
    buffers: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    sequential: bool = False
    random: bool = False
    loss: bool = False
    warnings: tuple[str, ...] = ()
    torch: str = ""
    updated: tuple[BufferFacts, ...] = ()

    def parameter(self, name: str) -> ParameterFacts:
        return next(p for p in self.parameters if p.name == name)

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)
