"""Plans and facts made by hand, for tests that need a plan and no model.

The model is a chain `embed, blocks.0 .. blocks.N-1, head` of matrices with bias and norm. Each block is `width x width` twice; everything is fp32.
"""

from __future__ import annotations

from fractions import Fraction

from attrs import evolve

from pdsl.lowering.facts import BoundaryTensor, LayerFacts, LayerKind, ModelFacts, ParameterFacts
from pdsl.lowering.plan import Job, MeshAxis, ParameterLayout, Pipeline, Plan, StageCut, Template
from pdsl.lowering.schedule import Schedule
from pdsl.lowering.schedules import SCHEDULES, single
from pdsl.lowering.spec import CallValue

__all__ = ["ACTIVATION", "CONTEXT", "VOCABULARY", "WIDTH", "facts", "heterogeneous", "job", "rectangular"]

WIDTH, CONTEXT, VOCABULARY = 8, 4, 20
ACTIVATION = 1000  # bytes that autograd saves per sample and block


def facts(blocks: int = 4, *, tied: bool = False, width: int = WIDTH) -> ModelFacts:
    """Facts of a chain of `blocks` blocks between an embedding and a head; `tied` makes the head's weight the embedding's."""
    last = blocks + 1
    hidden = (BoundaryTensor(0, ((0, 1), (CONTEXT, 0), (width, 0)), "float32", differentiable=True),)
    layers = [LayerFacts("embed", LayerKind.PROLOGUE, ("embed",), ("embed.weight",), 10, 100)]
    parameters = [
        ParameterFacts(
            "embed.weight",
            (VOCABULARY, width),
            "float32",
            trainable=True,
            layers=(0, last) if tied else (0,),
            module="Embedding",
            aliases=("head.weight",) if tied else (),
        )
    ]
    for i in range(blocks):
        name = f"blocks.{i}"
        held = (f"{name}.norm.weight", f"{name}.up.weight", f"{name}.down.weight", f"{name}.down.bias")
        layers.append(LayerFacts(name, LayerKind.BLOCK, (name,), held, 1000, ACTIVATION, inputs=hidden))
        parameters += [
            ParameterFacts(held[0], (width,), "float32", trainable=True, layers=(i + 1,), module="LayerNorm"),
            ParameterFacts(held[1], (4 * width, width), "float32", trainable=True, layers=(i + 1,), module="Linear"),
            ParameterFacts(held[2], (width, 4 * width), "float32", trainable=True, layers=(i + 1,), module="Linear"),
            ParameterFacts(held[3], (width,), "float32", trainable=True, layers=(i + 1,), module="Linear"),
        ]
    head = "embed.weight" if tied else "head.weight"
    layers.append(LayerFacts("head", LayerKind.EPILOGUE, ("head",), (head,), 500, 200, inputs=hidden))
    if not tied:
        parameters.append(ParameterFacts(head, (VOCABULARY, width), "float32", trainable=True, layers=(last,), module="Linear"))
    return ModelFacts("tests.models:chain", tuple(layers), tuple(parameters), inputs=("tokens",), loss=True, torch="2.13.0")


def job(batch: int = 16, optimizer: CallValue | None = None) -> Job:
    return Job(
        factory="tests.models:chain",
        arguments=(("blocks", 4),),
        data=CallValue("pdsl.data:python_source"),
        batch=batch,
        steps=10,
        accumulate=1,
        optimizer=optimizer or CallValue("adamw", (), (("lr", Fraction(1, 1000)),)),
        rate=CallValue("constant"),
        clip=1.0,
        loss=CallValue("mean", (), (("over", "samples"),)),
        objective="model",
        last="drop",
        seed=0,
    )


def _schedule(name: str, positions: int, microbatches: int, virtual: int) -> Schedule:
    if positions == 1 and virtual == 1:
        return single(microbatches)
    return SCHEDULES[name].build(positions, microbatches, virtual)


def _template(model: ModelFacts, positions: int, microbatches: int, schedule: str = "one_f_one_b", virtual: int = 1) -> Template:
    """Layers spread over the stages as evenly as counts allow, the longer runs first."""
    made = _schedule(schedule, positions, microbatches, virtual)
    each, more = divmod(len(model.layers), made.stages)
    bounds = [0]
    for stage in range(made.stages):
        bounds.append(bounds[-1] + each + (stage < more))
    return Template(tuple(StageCut(bounds[i], bounds[i + 1], made.placement[i]) for i in range(made.stages)), made)


def _layouts(model: ModelFacts, shard: int, tensor: int) -> tuple[ParameterLayout, ...]:
    made = []
    for p in model.parameters:
        dim = {"up": 0, "down": 1}.get(p.name.split(".")[-2]) if tensor > 1 and p.name.endswith("weight") else None
        word = {0: "colwise(tp) + ", 1: "rowwise(tp) + "}.get(dim, "") if dim is not None else ""
        line = 12 if dim is not None else 14
        made.append(
            ParameterLayout(
                p.name, sharded=shard > 1, tensor_dim=dim, style=word + ("fsdp(fsdp)" if shard > 1 else "replicate()"), line=line
            )
        )
    return tuple(made)


def rectangular(
    *,
    replicas: int = 1,
    positions: int = 2,
    shard: int = 2,
    tensor: int = 1,
    microbatches: int = 4,
    batch: int = 16,
    schedule: str = "one_f_one_b",
    virtual: int = 1,
    model: ModelFacts | None = None,
    optimizer: CallValue | None = None,
    ranks_per_node: int | None = None,
) -> Plan:
    """Equal pipelines over the axes dp, pp, fsdp, tp, outermost first."""
    model = model or facts()
    size = shard * tensor
    pipelines = tuple(
        Pipeline(
            0,
            tuple(tuple(range((p * positions + i) * size, (p * positions + i + 1) * size)) for i in range(positions)),
            tuple(range(p * microbatches, (p + 1) * microbatches)),
        )
        for p in range(replicas)
    )
    axes = (("dp", replicas, "replica"), ("pp", positions, "pipeline"), ("fsdp", shard, "shard"), ("tp", tensor, "tensor"))
    return Plan(
        name="job.pdsl",
        axes=tuple(MeshAxis(name, n, role) for name, n, role in axes if n > 1),
        shard_size=shard,
        tensor_size=tensor,
        ranks_per_node=ranks_per_node or size,
        device="cpu",
        facts=model,
        layouts=_layouts(model, shard, tensor),
        templates=(_template(model, positions, microbatches, schedule, virtual),),
        pipelines=pipelines,
        microbatches=replicas * microbatches,
        job=job(batch, optimizer),
    )


def heterogeneous(lengths: tuple[tuple[int, int], ...] = ((2, 3), (3, 5)), *, batch: int = 16, model: ModelFacts | None = None) -> Plan:
    """Pipelines of unequal length, (stages, microbatches) each, on islands of one rank."""
    model = model or facts()
    order = list(dict.fromkeys(lengths))
    pipelines, rank, first = [], 0, 0
    for positions, microbatches in lengths:
        islands = tuple((rank + i,) for i in range(positions))
        pipelines.append(Pipeline(order.index((positions, microbatches)), islands, tuple(range(first, first + microbatches))))
        rank, first = rank + positions, first + microbatches
    base = rectangular(replicas=1, positions=1, shard=1, model=model, batch=batch)
    return evolve(
        base,
        axes=(),
        ranks_per_node=1,
        templates=tuple(_template(model, n, m) for n, m in order),
        pipelines=tuple(pipelines),
        microbatches=first,
    )
