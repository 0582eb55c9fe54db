"""The table of the language: which blocks, keys and calls exist, with type, unit, default, choices and one line of help.

Checking, completion, the reference page and "did you mean" all read this one table. The grammar knows none of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from fractions import Fraction
from types import MappingProxyType

from attrs import frozen

from pdsl.lowering.schedules import FAMILIES
from pdsl.lowering.spec import CallValue, Value

__all__ = ["BLOCKS", "LAYOUTS", "PARAM_TYPES", "UNITS", "BlockInfo", "CallInfo", "KeyInfo", "Kind", "Statements", "leaf_paths"]


class Kind(Enum):
    """What a key takes. The value is how messages call it."""

    INT = "a whole number"
    NUMBER = "a number"
    BOOL = "true or false"
    STRING = "a string"
    SECONDS = "a time"
    BYTES = "a size in bytes"
    RATE = "a rate in bytes per second"
    PERIOD = "a period in steps or epochs"
    COUNT_PER_TIME = "a count, or a count per time"
    CHOICE = "a word"
    CHOICES = "a list of words"
    NAMES = "a list of strings"
    PAIR = "a list of two numbers from 0 to 1"
    PATTERN = "a pattern over module names"
    STAGES = "balanced, or stage items"
    CONDITION = "a comparison"
    CALL = "a call"
    SOURCE = "a module and factory"
    VALUE = "any value"


EXAMPLES: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.INT: "4",
        Kind.NUMBER: "0.5, 1/3, 1e-3",
        Kind.BOOL: "true, false",
        Kind.STRING: '"text"',
        Kind.SECONDS: "500ms, 30s, 5min",
        Kind.BYTES: "512MiB, 16GiB",
        Kind.RATE: "25GB/s, 450GB/s",
        Kind.PERIOD: "100, 1 epoch",
        Kind.COUNT_PER_TIME: "3, 5 per 24h",
        Kind.PAIR: "[0.9, 0.95]",
        Kind.NAMES: '["mask"]',
        Kind.PATTERN: '"layers.*"',
        Kind.CONDITION: "gain > 5%",
        Kind.SOURCE: '"package.module:factory", source("package.module:factory", key = 1)',
    }
)

UNITS: Mapping[str, tuple[Fraction, str]] = MappingProxyType(
    {
        "us": (Fraction(1, 1_000_000), "seconds"),
        "ms": (Fraction(1, 1000), "seconds"),
        "s": (Fraction(1), "seconds"),
        "min": (Fraction(60), "seconds"),
        "h": (Fraction(3600), "seconds"),
        "d": (Fraction(86_400), "seconds"),
        "%": (Fraction(1, 100), "ratio"),
        **{f"{prefix}B": (Fraction(1000**n), "bytes") for n, prefix in enumerate(("", "k", "M", "G", "T", "P"))},
        **{f"{prefix}iB": (Fraction(1024**n), "bytes") for n, prefix in enumerate(("K", "M", "G", "T", "P"), 1)},
        **{f"{prefix}B/s": (Fraction(1000**n), "bytes/s") for n, prefix in enumerate(("", "k", "M", "G", "T", "P"))},
        **{f"{prefix}iB/s": (Fraction(1024**n), "bytes/s") for n, prefix in enumerate(("K", "M", "G", "T", "P"), 1)},
    }
)
"""Unit -> (size in base units, dimension)."""

PARAM_TYPES: Mapping[str, Kind] = MappingProxyType(
    {
        "int": Kind.INT,
        "number": Kind.NUMBER,
        "float": Kind.NUMBER,
        "bool": Kind.BOOL,
        "string": Kind.STRING,
        "time": Kind.SECONDS,
        "bytes": Kind.BYTES,
        "rate": Kind.RATE,
    }
)
"""Types of `param`."""


class Statements(Enum):
    """What a block holds."""

    KEYS = "keys"
    AXES = "axes"
    RULES = "rules"
    ARGUMENTS = "arguments"


@frozen
class CallInfo:
    """A call that a key takes: its keyword arguments and positional ones. `open` lets any further keyword pass."""

    name: str
    help: str
    keywords: tuple[KeyInfo, ...] = ()
    positional: tuple[KeyInfo, ...] = ()
    open: bool = False

    def keyword(self, name: str) -> KeyInfo | None:
        return next((k for k in self.keywords if k.name == name), None)


@frozen
class KeyInfo:
    """One key of a block or one argument of a call.

    `minimum` holds for numbers and, in base units, for quantities. `choices` are the words of a CHOICE or CHOICES, `calls` the calls that are
    accepted (a call without required arguments may be written as its bare name). `function` lets a CHOICE also be "module:function". A key without default that is not `required` is None.
    """

    name: str
    kind: Kind
    help: str
    default: Value = None
    required: bool = False
    minimum: int | None = None
    above: int | None = None
    choices: tuple[str, ...] = ()
    calls: tuple[CallInfo, ...] = ()
    function: bool = False

    def call(self, name: str) -> CallInfo | None:
        return next((c for c in self.calls if c.name == name), None)

    @property
    def examples(self) -> str:
        """What a value may look like, for messages."""
        if self.choices and not self.calls:
            return ", ".join(self.choices)
        if self.calls:
            return ", ".join((*self.choices, *(f"{c.name}({', '.join(k.name for k in c.keywords if k.required)})" for c in self.calls)))
        return EXAMPLES.get(self.kind, "")


@frozen
class BlockInfo:
    """One block. `label` says in words what stands between its name and its brace. `implicit` blocks act by their defaults when not written."""

    name: str
    help: str
    statements: Statements = Statements.KEYS
    keys: tuple[KeyInfo, ...] = ()
    label: str = ""
    implicit: bool = False

    def key(self, name: str) -> KeyInfo | None:
        return next((k for k in self.keys if k.name == name), None)


# --- calls ----------------------------------------------------------------------------------------------------------------------------------

_MICROBATCHES = KeyInfo(
    "microbatches", Kind.INT, "parts of the batch that go through one pipeline one after another", required=True, minimum=1
)
_VIRTUAL = KeyInfo("virtual", Kind.INT, "stages on each position", default=2, minimum=1)
_HOP = KeyInfo("hop", Kind.NUMBER, "latency between two positions, as a share of the forward of a position", default=Fraction(0), minimum=0)
_SPLIT = KeyInfo("split", Kind.BOOL, "whether backwards may run in two halves", default=True)
_FILE = KeyInfo("file", Kind.STRING, "a file with one row of operations per position", required=True)


def _schedules() -> Iterator[CallInfo]:
    known = {"microbatches": _MICROBATCHES, "virtual": _VIRTUAL, "file": _FILE, "hop": _HOP, "split": _SPLIT}
    for family in FAMILIES.values():
        arguments = tuple(known[a] for a in family.arguments if a != "file")
        positional = (_FILE,) if "file" in family.arguments else ()
        yield CallInfo(family.name, family.summary, arguments, positional)


_LR = KeyInfo("lr", Kind.NUMBER, "peak learning rate", required=True, above=0)
_DECAY = KeyInfo("weight_decay", Kind.NUMBER, "decoupled decay of the weights", default=Fraction(0), minimum=0)
_BETAS = KeyInfo("betas", Kind.PAIR, "decay of the two moments, as [first, second]", default=(Fraction(9, 10), Fraction(999, 1000)))
_OPTIMIZERS = (
    CallInfo("adamw", "Adam with decoupled weight decay", (
        _LR, _BETAS,
        KeyInfo("eps", Kind.NUMBER, "added to the root of the second moment", default=Fraction(1, 10**8), above=0),
        KeyInfo("weight_decay", Kind.NUMBER, "decoupled decay of the weights", default=Fraction(1, 100), minimum=0),
    )),
    CallInfo("sgd", "gradient descent, with momentum if wanted", (
        _LR,
        KeyInfo("momentum", Kind.NUMBER, "share of the last update that is kept", default=Fraction(0), minimum=0),
        KeyInfo("nesterov", Kind.BOOL, "look ahead along the momentum", default=False),
        _DECAY,
    )),
)  # fmt: skip

_WARMUP = KeyInfo("warmup", Kind.INT, "steps over which the rate rises from 0", default=0, minimum=0)
_FLOOR = KeyInfo("floor", Kind.NUMBER, "share of the peak rate that is left at the end", default=Fraction(0), minimum=0)
_RATES = (
    CallInfo("constant", "the peak rate after the warm-up", (_WARMUP,)),
    CallInfo("linear", "falls in a straight line to the floor", (_WARMUP, _FLOOR)),
    CallInfo("cosine", "falls along half a cosine to the floor", (_WARMUP, _FLOOR)),
)

_OVER = KeyInfo(
    "over", Kind.CHOICE, "what the mean is taken over, in the whole global batch", default="samples", choices=("samples", "tokens")
)
_LOSSES = (CallInfo("mean", "the mean over the global batch", (_OVER,)), CallInfo("sum", "the sum over the global batch"))

_FROM = (
    KeyInfo("alpha", Kind.NUMBER, "share of the still active layers that may freeze at once", minimum=0),
    KeyInfo("every", Kind.PERIOD, "how often freezing is considered"),
)
_PREFIXES = (
    CallInfo("bound", "freezes at most a share of the active layers each period", _FROM),
    CallInfo("gradnorm", "freezes layers whose gradient norm is low against the others", _FROM),
    CallInfo("plateau", "freezes layers whose gradient norm has stopped falling", (
        *_FROM,
        KeyInfo("below", Kind.NUMBER, "relative change that counts as still", minimum=0),
        KeyInfo("steps", Kind.INT, "steps over which it is measured", minimum=1),
    )),
    CallInfo("at", "freezes at a fixed step", (
        KeyInfo("step", Kind.INT, "the step", required=True, minimum=0),
        KeyInfo("layers", Kind.INT, "layers that freeze then", minimum=1),
    )),
)  # fmt: skip
_REPACKS = (
    CallInfo("when", "re-packs when the condition holds", positional=(KeyInfo("gain", Kind.CONDITION, "expected gain in step time"),)),
)
_CACHES = (
    CallInfo(
        "host", "keeps outputs of the frozen prefix in host memory", (KeyInfo("limit", Kind.BYTES, "most bytes per node", minimum=0),)
    ),
)
_GUARDS = (
    CallInfo("unfreeze", "thaws when the loss gets worse", (
        KeyInfo("worse", Kind.NUMBER, "relative rise of the loss that is too much", minimum=0),
        KeyInfo("patience", Kind.INT, "evaluations in a row before it acts", minimum=1),
    )),
)  # fmt: skip
_SOURCES = (
    CallInfo(
        "source",
        "a factory with its arguments",
        positional=(KeyInfo("factory", Kind.STRING, "package.module:factory", required=True),),
        open=True,
    ),
)

_DOMAIN = (KeyInfo("nodes", Kind.INT, "how many nodes share one", required=True, minimum=1),)
_DOMAINS = (
    CallInfo("rack", "nodes of one rack", _DOMAIN),
    CallInfo("switch", "nodes behind one switch", _DOMAIN),
    CallInfo("zone", "nodes of one zone", _DOMAIN),
    CallInfo("host", "nodes on one machine, as simulated ones are", _DOMAIN),
)

LAYOUTS: Mapping[str, str] = MappingProxyType(
    {
        "replicate": "the whole parameter on every rank of the island",
        "fsdp": "split over the axes between uses, gathered for a layer's forward and backward; these axes split the batch too",
        "colwise": "split by output features over a tensor axis (Linear, Embedding)",
        "rowwise": "split by input features over a tensor axis (Linear, Embedding)",
        "sequence": "whole, in a module that works on a part of the sequence: the stream between the layers is split over a tensor axis",
    }
)
"""The calls that a shard rule may use. A rule may also list one slot per dim: `[tp, _]`."""

# --- blocks ---------------------------------------------------------------------------------------------------------------------------------

_FLOATS = ("fp32", "bf16", "fp16")

_TABLE = (
    BlockInfo("cluster", "the machines", implicit=True, keys=(
        KeyInfo("nodes", Kind.INT, "how many nodes", minimum=1),
        KeyInfo("ranks_per_node", Kind.INT, "ranks on each node; they die together", minimum=1),
        KeyInfo("device", Kind.CHOICE, "what a rank computes on", default="auto", choices=("auto", "cpu", "cuda")),
        KeyInfo("memory", Kind.BYTES, "memory of one device", above=0),
        KeyInfo("bandwidth", Kind.RATE, "bandwidth between two nodes, one direction", above=0),
        KeyInfo("latency", Kind.SECONDS, "latency of one message between two nodes", minimum=0),
        KeyInfo("mtbf", Kind.SECONDS, "mean time between failures of one node", above=0),
        KeyInfo("domain", Kind.CALL, "nodes that fail together, counted from node 0", calls=_DOMAINS),
    )),
    BlockInfo("mesh", "the axes, outermost first; their product is the number of ranks", Statements.AXES),
    BlockInfo("model", "the factory of the model and its arguments", Statements.ARGUMENTS, label='"package.module:factory"'),
    BlockInfo("shard", "ordered rules from parameter names to layouts; the first match wins", Statements.RULES),
    BlockInfo("pipeline", "the axis of the pipeline, its stages and its schedule", label="over AXIS", keys=(
        KeyInfo("stages", Kind.STAGES, "balanced, or stage items that list modules", default="balanced"),
        KeyInfo("schedule", Kind.CALL, "in which order a position runs its microbatches", required=True, calls=tuple(_schedules())),
    )),
    BlockInfo("precision", "number formats", implicit=True, keys=(
        KeyInfo("params", Kind.CHOICE, "format that layers compute in", default="fp32", choices=_FLOATS),
        KeyInfo("reduce", Kind.CHOICE, "format in which gradients are summed", default="fp32", choices=_FLOATS),
        KeyInfo("output", Kind.CHOICE, "format of the model's output", default="fp32", choices=_FLOATS),
    )),
    BlockInfo("memory", "what is traded for memory", implicit=True, keys=(
        KeyInfo("recompute", Kind.PATTERN, "modules whose activations are computed again in the backward pass"),
        KeyInfo("offload", Kind.CHOICE, "what waits in host memory", default="none", choices=("none", "optimizer", "params")),
        KeyInfo("reshard", Kind.CHOICE, "whether sharded layers are gathered again for the backward; auto: not in a pipeline", default="auto", choices=("auto", "true", "false")),
        KeyInfo("group", Kind.INT, "blocks that are gathered as one", default=1, minimum=1),
        KeyInfo("prefetch", Kind.INT, "units that are gathered ahead of their use", default=1, minimum=0),
        KeyInfo("sync", Kind.CHOICE, "after which microbatches sharded gradients are reduced", default="last", choices=("last", "every")),
    )),
    BlockInfo("fault_budget", "what the run survives", keys=(
        KeyInfo("unit", Kind.CHOICE, "what is lost as one; a rank takes its node along", default="node", choices=("node", "rank", "domain")),
        KeyInfo("lose", Kind.INT, "units that may be lost", default=0, minimum=0),
        KeyInfo("recover", Kind.CHOICES, "ways back, tried in this order", default=("reroute", "retemplate", "restore"), choices=("reroute", "retemplate", "restore")),
        KeyInfo("silence", Kind.SECONDS, "a unit that says nothing for so long is lost", default=Fraction(30), above=0),
        KeyInfo("spares", Kind.INT, "units that wait to replace a lost one", default=0, minimum=0),
        KeyInfo("restarts", Kind.COUNT_PER_TIME, "restarts before the run gives up", minimum=0),
    )),
    BlockInfo("freeze", "which layers stop training, and when", keys=(
        KeyInfo("prefix", Kind.CALL, "how the frozen prefix grows", calls=_PREFIXES),
        KeyInfo("keep", Kind.INT, "layers that never freeze", default=1, minimum=0),
        KeyInfo("repack", Kind.CALL, "when pipelines get shorter and more", calls=_REPACKS),
        KeyInfo("cache", Kind.CALL, "where outputs of the frozen prefix are kept", calls=_CACHES),
        KeyInfo("guard", Kind.CALL, "when freezing is taken back", calls=_GUARDS),
    )),
    BlockInfo("checkpoint", "what is saved, and how often", keys=(
        KeyInfo("path", Kind.STRING, "folder of the checkpoints", required=True),
        KeyInfo("every", Kind.INT, "steps from one to the next", default=500, minimum=1),
        KeyInfo("keep", Kind.INT, "how many are kept", default=3, minimum=1),
        KeyInfo("mode", Kind.CHOICE, "whether training waits", default="async", choices=("async", "sync")),
    )),
    BlockInfo("train", "data, batch, optimizer and length of the run", keys=(
        KeyInfo("data", Kind.SOURCE, "factory of the data", required=True, calls=_SOURCES),
        KeyInfo("batch", Kind.INT, "samples of one step over all ranks", required=True, minimum=1),
        KeyInfo("steps", Kind.INT, "updates of the weights", required=True, minimum=1),
        KeyInfo("optimizer", Kind.CALL, "how weights are updated", required=True, calls=_OPTIMIZERS),
        KeyInfo("accumulate", Kind.INT, "rounds of the schedule in one step", default=1, minimum=1),
        KeyInfo("last", Kind.CHOICE, "what becomes of a last batch that is not full", default="drop", choices=("drop", "pad")),
        KeyInfo("shared", Kind.NAMES, "entries of the data that every microbatch gets whole, not by rows", default=()),
        KeyInfo("rate", Kind.CALL, "the learning rate over the steps", default=CallValue("constant"), calls=_RATES),
        KeyInfo("clip", Kind.NUMBER, "largest global norm of the gradient", above=0),
        KeyInfo("loss", Kind.CALL, "how losses of samples are joined", default=CallValue("mean", (), (("over", "samples"),)), calls=_LOSSES),
        KeyInfo("objective", Kind.CHOICE, 'who computes the loss: the model, a named one, or "module:function"', default="model", choices=("model", "cross_entropy", "mse"), function=True),
        KeyInfo("seed", Kind.INT, "decides initial weights, order of samples and dropout", default=0, minimum=0),
        KeyInfo("compile", Kind.CHOICE, "whether layers are compiled with torch.compile; aot_eager traces them and needs no compiler of the machine", default="false", choices=("false", "true", "aot_eager")),
    )),
    BlockInfo("validate", "the loss on data that is not trained on", keys=(
        KeyInfo("data", Kind.SOURCE, "factory of the held-out data", required=True, calls=_SOURCES),
        KeyInfo("every", Kind.INT, "steps from one validation to the next; the last step is followed by one too", default=100, minimum=1),
        KeyInfo("samples", Kind.INT, "the first so many samples instead of all", minimum=1),
    )),
)  # fmt: skip

BLOCKS: Mapping[str, BlockInfo] = MappingProxyType({block.name: block for block in _TABLE})
"""All blocks by name, in the order in which a file usually has them."""


def leaf_paths() -> Iterator[tuple[str, KeyInfo]]:
    """Every key of every block by its dotted path, with its entry."""
    for block in _TABLE:
        for key in block.keys:
            yield f"{block.name}.{key.name}", key
