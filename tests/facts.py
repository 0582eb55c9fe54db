"""Facts of small models, made by hand, so that rules are tested without torch."""

from __future__ import annotations

from attrs import evolve

from pdsl.lowering.facts import BufferFacts, DrawFacts, LayerFacts, LayerKind, ModelFacts, ParameterFacts, Rowed
from pdsl.lowering.tensor_facts import TensorFacts, TensorProblem

__all__ = ["FACTS", "gpt_facts", "probed"]


def gpt_facts(*, layers: int = 4, width: int = 64, vocab: int = 256, tied: bool = False, cut_before: str = "") -> ModelFacts:
    """A decoder with embedding `tok`, blocks `layers.N`, `norm` and `head`. With `tied` the head shares the weight of the embedding."""
    parameters: list[ParameterFacts] = []
    chain: list[LayerFacts] = []

    def parameter(name: str, shape: tuple[int, ...], layer: int, module: str = "Linear") -> str:
        parameters.append(ParameterFacts(name, shape, "float32", True, (layer,), module))
        return name

    last = layers + 1
    if tied:
        parameters.append(ParameterFacts("tok.weight", (vocab, width), "float32", True, (0, last), "Embedding", ("head.weight",)))
        chain.append(LayerFacts("tok", LayerKind.PROLOGUE, ("tok",), ("tok.weight",), 0, 4 * width))
    else:
        chain.append(
            LayerFacts("tok", LayerKind.PROLOGUE, ("tok",), (parameter("tok.weight", (vocab, width), 0, "Embedding"),), 0, 4 * width)
        )
    for n in range(layers):
        at = f"layers.{n}"
        names = [parameter(f"{at}.attn.w{p}.weight", (width, width), n + 1) for p in "qkvo"]
        names.append(parameter(f"{at}.mlp.w1.weight", (4 * width, width), n + 1))
        names.append(parameter(f"{at}.mlp.w2.weight", (width, 4 * width), n + 1))
        names += [parameter(f"{at}.norm{i}.weight", (width,), n + 1, "RMSNorm") for i in (1, 2)]
        why = cut_before if n == layers - 1 else ""
        chain.append(LayerFacts(at, LayerKind.BLOCK, (at,), tuple(names), 24 * width * width, 64 * width, cut_before=why))
    ends = [parameter("norm.weight", (width,), last, "RMSNorm")]
    ends.append("tok.weight" if tied else parameter("head.weight", (vocab, width), last))
    chain.append(LayerFacts("norm", LayerKind.EPILOGUE, ("norm", "head"), tuple(ends), 2 * width * vocab, 4 * vocab))
    return ModelFacts("pdsl.models:gpt", tuple(chain), tuple(parameters), inputs=("tokens",), loss=True)


def probed(kind: str, module: str, text: str, parameter: str = "") -> ModelFacts:
    """The decoder, of which a tensor probe has found one problem."""
    return evolve(gpt_facts(), tensor=TensorFacts((TensorProblem(kind, module, text, parameter),)))


FACTS = {
    "gpt": gpt_facts(),
    "gpt_tied": gpt_facts(tied=True),
    "gpt_frozen": evolve(gpt_facts(), parameters=tuple(evolve(p, trainable=False) for p in gpt_facts().parameters)),
    "gpt_large_head": gpt_facts(layers=1, vocab=50_000, tied=True),
    "gpt_dropout": evolve(gpt_facts(), random=True),
    "gpt_heads": probed("heads", "layers.0.attn", "32 features are seen as 2 x 16, and 2 % 4 = 2", "layers.0.attn.wk.weight"),
    "gpt_fused": probed(
        "differs",
        "layers.0.attn",
        "chunk of (2, 16, 192) has (2, 16, 96) on a tensor rank, and gives (2, 16, 32), which is no part of the whole result (2, 16, 64)",
        "layers.0.attn.wq.weight",
    ),
    "gpt_subclass": probed(
        "module", "", "layers.0.attn.wq is a lora.Linear: only torch's own Linear and Embedding can be split", "layers.0.attn.wq.weight"
    ),
    "gpt_pieces": probed(
        "gradient",
        "layers.0.attn",
        "a tensor that is whole on every rank is used by mul together with what lies split, and elsewhere with what is whole",
    ),
    "gpt_odd": probed("sequence", "layers.0", "a sequence of 5 is split over tp = 2: 5 % 2 = 1"),
    "gpt_again": evolve(gpt_facts(), recomputed=tuple(f"layers.{n}" for n in range(4))),
    "gpt_writes": evolve(gpt_facts(), recomputed=("layers.0",), unrepeatable=("layers.0 writes into what it is given",)),
    "gpt_low": evolve(gpt_facts(), parameters=tuple(evolve(p, dtype="bfloat16") for p in gpt_facts().parameters)),
    "gpt_two_formats": evolve(
        gpt_facts(),
        parameters=tuple(evolve(p, dtype="bfloat16") if p.name.endswith("w2.weight") else p for p in gpt_facts().parameters),
    ),
    "gpt_table": evolve(
        gpt_facts(),
        refuses="expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16; its buffer layers.0.attn.table of Attention stays in float32",
    ),
    "gpt_mixing": evolve(
        gpt_facts(),
        random=True,
        draws=(
            DrawFacts(1, "bernoulli_", "dropout", "layers.0", ((0, 1), (64, 0)), Rowed.ROWS, 0),
            DrawFacts(2, "randperm", "randperm", "layers.1", ((0, 1),), Rowed.OPAQUE),
        ),
    ),
    "gpt_normed": evolve(
        gpt_facts(),
        statistics=("layers.0.norm1", "layers.1.norm1"),
        updated=tuple(
            BufferFacts(f"layers.{n}.norm1.{b}", (64,), "float32", (n + 1,)) for n in (0, 1) for b in ("running_mean", "running_var")
        ),
    ),
    "gpt_untold": evolve(gpt_facts(), loss=False, entries=("tokens", "answers")),
    "gpt_told": evolve(gpt_facts(), loss=False, entries=("tokens", "labels")),
    "gpt_scores": evolve(gpt_facts(), loss=False, entries=("tokens", "labels"), output=((0, 1), (10, 0)), target=(3,)),
    "gpt_twenty": evolve(gpt_facts(), samples=20),
    "gpt_counting": evolve(gpt_facts(), buffers=("calls",), updated=(BufferFacts("calls", (), "int64", (0,)),)),
    "gpt_counting_again": evolve(
        gpt_facts(), buffers=("layers.0.calls",), updated=(BufferFacts("layers.0.calls", (), "int64", (1,)),), recomputed=("layers.0",)
    ),
    "gpt_snapshot": evolve(gpt_facts(), buffers=("snapshot",), shares=(("snapshot", "tok.weight"),)),
    "gpt_writing": evolve(gpt_facts(), layers=tuple(evolve(x, writes="seen" if x.name == "layers.2" else "") for x in gpt_facts().layers)),
    "gpt_overlapping": evolve(gpt_facts(), shares=(("layers.1.attn.wq.weight", "layers.0.attn.wq.weight"),)),
    "gpt_uncut": gpt_facts(cut_before="a mask made in layers.2 is used here"),
}
"""The facts that fixtures name."""
