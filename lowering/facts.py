"""ModelFacts: what planning needs to know of a model, read once without weights, kept as plain data.

A model is a chain of layers: a prologue, blocks in the order in which they are called, an epilogue. What the model does between two blocks
belongs to the first of them. Prologue and epilogue are layers only where they own parameters or multiply; else the first or the last block does
what little there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from attrs import frozen

from pdsl.lowering.tensor_facts import TensorFacts

__all__ = [
    "SINGLE_INPUT",
    "TARGETS",
    "BoundaryTensor",
    "BufferFacts",
    "DrawFacts",
    "LayerFacts",
    "LayerKind",
    "ModelFacts",
    "ParameterFacts",
    "Rowed",
    "item_bytes",
    "target_of",
]

_Entry = TypeVar("_Entry")

SINGLE_INPUT = "input"
"""The name of the batch entry of a model that was run with one tensor and no names."""

TARGETS = ("targets", "target", "labels", "label")
"""Names of the batch entry that an objective compares the output with; a model that does not take it is called without."""


def target_of(batch: Mapping[str, _Entry]) -> _Entry | None:
    """The target among the entries of a batch."""
    return next((batch[name] for name in TARGETS if name in batch), None)


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


def item_bytes(dtype: str) -> int:
    """Bytes of an element of a dtype, by torch's name; 4 if it is not known."""
    return _ITEM_BYTES.get(dtype, 4)


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
    products of one forward, per sample; `activation_bytes` is what autograd keeps per sample from a forward to its backward, each storage once per layer.
    Where modules of it are computed again in the backward, that are their inputs; `again_flops` is what is then computed twice, per sample, and
    `again_bytes` what the largest of them takes while its backward runs. `inputs` cross the boundary into this layer. `cut_before` is empty if a stage may begin here, else says why not. `passthrough` says that the
    block turns its first argument into one tensor of the same shape and dtype. `writes` is empty unless the block writes into a tensor that it is given
    and that needs a gradient: `alone` if nobody else reads it afterwards, else `seen`.
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
    again_flops: int = 0
    again_bytes: int = 0
    writes: str = ""


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
        return self.numel * item_bytes(self.dtype)


class Rowed(Enum):
    """Whose random numbers a draw gives: each row its own, all rows the same, or such as cannot be told apart by rows."""

    ROWS = "rows"
    SHARED = "shared"
    OPAQUE = "opaque"


@frozen
class DrawFacts:
    """One random operation of a forward in training mode.

    `segment` counts the blocks that were called before (0: none; the last one begins when the last block is done). `operation` is torch's
    name of it (`bernoulli_`), `function` the function of the model's code that leads there (`dropout`), `place` the module path. `dims`
    holds (constant, per_row) for each dim of what is drawn, `row_dim` the dim of which every row has a share, -1 if there is none.
    """

    segment: int
    operation: str
    function: str
    place: str
    dims: tuple[tuple[int, int], ...]
    rowed: Rowed
    row_dim: int = -1


@frozen
class BufferFacts:
    """A buffer that the forward updates, so that it is state: held whole by every rank that runs one of its layers."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layers: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        return item_bytes(self.dtype)


@frozen
class ModelFacts:
    """All facts of one model. `sequential` tells the easy case: the model is an `nn.Sequential` and its output needs an objective.
    `random` tells whether a forward in training mode draws random numbers, `draws` which, if it was run. `inputs` are the names of the batch entries that the model
    was called with; `updated` are the buffers that the forward writes, `statistics` the modules that normalise by statistics of the rows. `shares` are pairs of a buffer or parameter and a parameter that
    lie in the same memory and are not the same parameter. `loss` tells whether it returned a loss: a scalar, or an output with one under that name. `warnings` are things worth
    telling, such as normalisation with batch statistics or what stands in the way of a chain. `tensor` is what was found out about the layouts of one plan over its tensor axes, None where there are none.

    `output` holds (constant, per_row) for each dim of what the model returns, if that is one tensor and no loss; `target` the shape of the target of one row.
    `samples` are those of the training data, None where it has no length or was not read; `entries` are those of its rows.

    Boundaries, FLOPs and bytes are those of the formats and the recomputation that the model was read with. `recomputed` are the outermost modules whose
    activations are computed again, `unrepeatable` says of those that cannot be why not. `casts_output` tells that the last module's output is cast
    to the format of the output. `refuses` is why the model does not run in the format that was asked for, empty if it does; then the facts are those of its own formats.
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
    tensor: TensorFacts | None = None
    recomputed: tuple[str, ...] = ()
    unrepeatable: tuple[str, ...] = ()
    casts_output: bool = False
    refuses: str = ""
    draws: tuple[DrawFacts, ...] = ()
    statistics: tuple[str, ...] = ()
    shares: tuple[tuple[str, str], ...] = ()
    output: tuple[tuple[int, int], ...] | None = None
    target: tuple[int, ...] | None = None
    samples: int | None = None
    entries: tuple[str, ...] = ()

    def parameter(self, name: str) -> ParameterFacts:
        return next(p for p in self.parameters if p.name == name)

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)
