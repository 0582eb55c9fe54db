"""Facts read from a model's own forward, and what is said where there is no chain, no module or no factory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pdsl
from pdsl.grammar.errors import ModelError, SpecError
from pdsl.lowering.facts import BoundaryTensor, LayerKind
from pdsl.lowering.precision import RunAs
from pdsl.lowering.probe import probe
from pdsl.lowering.spec import CallValue, PrecisionSpec
from pdsl.models import gpt, vit
from tests import chains


def shown(facts):
    """Layers by name, with the leaves that cross into each."""
    return {layer.name: tuple(t.leaf for t in layer.inputs) for layer in facts.layers}


# --- what is read -------------------------------------------------------------------------------------------------------------------------


def test_the_facts_of_a_decoder():
    arguments = {"layers": 3, "width": 16, "heads": 2, "context": 8, "vocabulary": 13}
    facts = probe("pdsl.models:gpt", arguments, batch=chains.batch_of())
    hidden = (BoundaryTensor(0, ((0, 1), (chains.LENGTH, 0), (16, 0)), "float32", differentiable=True),)
    assert [layer.name for layer in facts.layers] == ["tok_embeddings", "layers.0", "layers.1", "layers.2", "norm"]
    assert [layer.kind for layer in facts.layers] == [LayerKind.PROLOGUE, *[LayerKind.BLOCK] * 3, LayerKind.EPILOGUE]
    assert [layer.modules for layer in facts.layers] == [
        ("tok_embeddings",),
        ("layers.0",),
        ("layers.1",),
        ("layers.2",),
        ("norm", "output"),
    ]
    assert [layer.inputs for layer in facts.layers] == [(), *[hidden] * 4]
    assert [layer.cut_before for layer in facts.layers] == [""] * 5
    assert [layer.passthrough for layer in facts.layers] == [False, True, True, True, False]
    assert facts.layers[4].parameters == ("norm.weight", "output.weight")
    assert facts.inputs == ("tokens", "targets")
    assert facts.factory == "pdsl.models:gpt"
    assert facts.torch == str(torch.__version__)
    assert (facts.loss, facts.random, facts.sequential, facts.warnings) == (True, False, False, ())
    assert [p.name for p in facts.parameters] == [n for n, _ in gpt(**arguments).named_parameters()]
    assert facts.parameter("layers.1.attn.wq.weight").layers == (2,)
    assert facts.parameter("tok_embeddings.weight").module == "Embedding"
    assert facts.numel == sum(p.numel() for p in gpt(**arguments).parameters())


def test_flops_are_two_for_each_weight_and_token_and_those_of_attention():
    facts = probe(gpt, {"layers": 2, "width": 16, "heads": 2, "context": 8, "vocabulary": 13}, batch=chains.batch_of())
    tokens = chains.LENGTH
    assert facts.layers[0].flops == 0
    assert facts.layers[1].flops == facts.layers[2].flops == 2 * 12 * 16**2 * tokens + 4 * tokens**2 * 16
    assert facts.layers[3].flops == 2 * 13 * 16 * tokens


def test_activations_are_what_autograd_keeps_per_sample():
    facts = probe(chains.layers, {"sizes": (5, 7, 7, 3)}, batch={"input": torch.zeros(2, 5)})
    assert [layer.activation_bytes for layer in facts.layers] == [0, 28, 28, 28, 28]


def test_tied_weights_are_one_parameter_with_two_names():
    arguments = {"layers": 2, "width": 16, "heads": 2, "vocabulary": 13, "tie": True}
    facts = probe(gpt, arguments, batch=chains.batch_of())
    tied = facts.parameter("tok_embeddings.weight")
    assert (tied.aliases, tied.layers) == (("output.weight",), (0, 3))
    assert "output.weight" not in {p.name for p in facts.parameters}
    assert facts.layers[3].parameters == ("tok_embeddings.weight", "norm.weight")
    assert facts.numel == sum(p.numel() for p in gpt(**arguments).parameters())


def test_weights_that_share_memory_are_one_parameter_and_a_warning():
    def make():
        model = chains.plain(2)
        model.head.weight.data = model.embed.weight.data
        return model

    facts = probe(make, {}, batch=chains.batch_of())
    assert facts.parameter("embed.weight").aliases == ("head.weight",)
    assert facts.warnings == ("head.weight and embed.weight share memory but are two parameters; PDSL trains them as one",)


def test_bare_parameters_belong_to_the_layer_that_reads_them():
    facts = probe(
        vit, {"layers": 2, "width": 8, "heads": 2, "image": 4}, batch={"pixels": torch.zeros(2, 1, 4, 4), "labels": torch.zeros(2).long()}
    )
    assert facts.layers[0].parameters == ("cls_token", "position_embeddings", "patch_embeddings.weight", "patch_embeddings.bias")
    assert facts.layers[0].modules == ("patch_embeddings",)


def test_a_learned_bias_for_all_blocks_crosses_and_a_mask_does_not():
    facts = probe(chains.Shared, {}, batch=chains.batch_of())
    first = facts.layers[1].inputs
    assert [t.shape(5) for t in first] == [(5, chains.LENGTH, chains.WIDTH), (chains.LENGTH, chains.LENGTH)]
    assert all(t.differentiable for t in first)
    assert [len(layer.inputs) for layer in facts.layers] == [0, 2, 2, 2, 2, 1]


def test_a_parameter_handed_to_every_block_is_used_in_all_and_does_not_cross():
    facts = probe(chains.HandedParameter, {}, batch=chains.batch_of())
    assert facts.parameter("bias").layers == (1, 2, 3)
    assert [len(layer.inputs) for layer in facts.layers] == [0, 1, 1, 1, 1]


def test_what_a_block_made_crosses_from_then_on():
    facts = probe(chains.Tuples, {}, batch=chains.batch_of())
    assert [len(layer.inputs) for layer in facts.layers] == [0, 1, 2, 2, 2, 2]
    assert facts.layers[2].inputs[1].shape(3) == (chains.WIDTH, 3, chains.LENGTH)


def test_two_lists_of_one_length_are_one_chain_in_the_order_of_calls():
    facts = probe(chains.EncoderDecoder, {}, batch=chains.batch_of())
    assert [layer.name for layer in facts.layers] == ["shared", "encoder.0", "encoder.1", "decoder.0", "decoder.1", "(epilogue)"]
    assert facts.layers[2].modules == ("encoder.1", "norm", "shared")
    assert [len(layer.inputs) for layer in facts.layers] == [0, 1, 1, 2, 2, 1]
    assert facts.parameter("shared.weight").layers == (0, 2, 5)


def test_what_stands_between_two_blocks_belongs_to_the_first():
    facts = probe(chains.Glue, {}, batch=chains.batch_of())
    assert [layer.modules for layer in facts.layers] == [
        ("embed",),
        ("blocks.0", "norms.n0"),
        ("blocks.1", "norms.n1"),
        ("blocks.2",),
        ("head",),
    ]
    assert facts.buffers == ("embed.scale",)


def test_a_tensor_that_is_written_into_is_marked():
    assert all(t.mutated for layer in probe(chains.InPlace, {}, batch=chains.batch_of()).layers[1:4] for t in layer.inputs)
    assert not any(t.mutated for layer in probe(chains.plain, {}, batch=chains.batch_of()).layers for t in layer.inputs)


def test_the_layers_of_a_sequence_are_its_children():
    facts = probe(chains.layers, {}, batch={"pixels": torch.zeros(3, 5), "labels": torch.zeros(3)})
    assert [layer.name for layer in facts.layers] == ["0", "1", "2", "3", "4"]
    assert [layer.parameters for layer in facts.layers] == [("0.weight", "0.bias"), (), ("2.weight", "2.bias"), (), ("4.weight", "4.bias")]
    assert [tuple(t.shape(2) for t in layer.inputs) for layer in facts.layers] == [(), ((2, 7),), ((2, 7),), ((2, 7),), ((2, 7),)]
    assert (facts.sequential, facts.loss, facts.inputs) == (True, False, ("pixels",))


def test_one_module_at_two_places_of_a_sequence_is_used_in_both():
    facts = probe(chains.twice, {}, batch=torch.zeros(2, 5))
    weight = facts.parameter("0.weight")
    assert (weight.aliases, weight.layers) == (("2.weight",), (0, 2))
    assert facts.inputs == ("input",)


def test_frozen_and_unused_parameters():
    facts = probe(chains.Frozen, {}, batch=chains.batch_of())
    assert not facts.parameter("embed.weight").trainable
    assert facts.layers[1].inputs[0].differentiable
    assert [w for w in facts.warnings if "pooler.weight is not used" in w]
    assert facts.parameter("pooler.weight").layers == (3,)


def test_batch_statistics_are_told_by_path():
    facts = probe(chains.Normed, {}, batch=chains.batch_of())
    assert [w.split(" normalises")[0] for w in facts.warnings] == ["blocks.0.bn (BatchNorm1d)", "blocks.1.bn (BatchNorm1d)"]


def test_a_parameter_that_is_read_outside_of_its_module_is_marked():
    facts = probe(chains.Gained, {}, batch=chains.batch_of())
    assert {p.name for p in facts.parameters if p.outside} == {f"blocks.{i}.{leaf}" for i in range(3) for leaf in ("gain", "row")}
    for factory in (chains.plain, chains.HandedParameter, chains.EncoderDecoder, chains.NoList, chains.Recomputing, chains.layers):
        batch = chains.batch_of() if factory is not chains.layers else {"input": torch.zeros(2, 5)}
        assert not [p.name for p in probe(factory, {}, batch=batch).parameters if p.outside], factory


def test_hooks_on_gradients_are_told():
    def hooked():
        model = chains.plain()
        model.head.weight.register_hook(lambda grad: grad * 2)
        return model

    assert probe(hooked, {}, batch=chains.batch_of()).warnings == (
        "head.weight has hooks on its gradient: they run once a microbatch, and not at all where it is sharded",
    )


def test_a_buffer_that_the_forward_updates_is_told():
    class Counting(chains.Chain):
        def __init__(self):
            super().__init__([chains.Plain(), chains.Plain()])
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("scale", torch.ones(()))

        def run(self, x, tokens):
            self.calls += 1
            return super().run(x * self.scale, tokens)

    (warning,) = probe(Counting, {}, batch=chains.batch_of()).warnings
    assert warning.startswith("buffer calls is updated by the forward pass: once a microbatch")
    assert len(probe(chains.Normed, {}, batch=chains.batch_of()).warnings) == 2  # one for each norm, none for its buffers


def test_dropout_is_noticed():
    assert probe(gpt, {"layers": 2, "width": 8, "heads": 2, "dropout": 0.1}, batch=chains.batch_of()).random


def test_a_model_that_reads_its_weights_while_it_is_built():
    assert len(probe(chains.ReadsItsWeights, {}, batch=chains.batch_of()).layers) == 4


def test_a_big_model_is_probed_without_its_memory():
    arguments = {"layers": 2, "width": 1024, "heads": 8, "vocabulary": 13, "context": 2_000_000, "positions": "learned"}
    facts = probe(gpt, arguments, batch={k: t[:, :2] for k, t in chains.batch_of().items()})
    assert facts.numel == 2_000_000 * 1024 + 2 * 12 * 1024**2 + 2 * 13 * 1024 + 5 * 1024


def test_the_callers_random_numbers_are_left_alone():
    before = torch.get_rng_state()
    probe(gpt, {"layers": 2, "width": 8, "heads": 2, "dropout": 0.1}, batch=chains.batch_of())
    assert torch.equal(before, torch.get_rng_state())


# --- where a chain ends -------------------------------------------------------------------------------------------------------------------


def test_a_loss_that_reads_inside_earlier_blocks_forbids_the_cuts_that_it_passes():
    facts = probe(chains.Supervised, {}, batch=chains.batch_of())
    reason = "what follows also reads earlier results than those it is given (made with blocks.0.up.bias)"
    assert [layer.cut_before for layer in facts.layers] == ["", "", reason, reason, reason]


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (chains.Repeated, "blocks.0 is called more than once"),
        (chains.NoList, "there is no list of at least two modules of one class; a method pdsl_chain may name the blocks"),
        (
            lambda: chains.Recomputing("reentrant"),
            "blocks.0 runs without autograd on tensors that need a gradient, as under checkpoint(..., use_reentrant=True)",
        ),
    ],
)
def test_without_a_chain_the_model_is_one_layer_and_the_reason_is_told(factory, reason):
    facts = probe(factory, {}, batch=chains.batch_of())
    (layer,) = facts.layers
    assert layer.name == "(model)"
    assert set(layer.parameters) == {p.name for p in facts.parameters}
    assert layer.flops > 0
    assert facts.warnings[0] == f"no chain of blocks, so the model can be sharded but not cut into stages: {reason}"


def test_a_model_may_list_its_chain():
    facts = probe(chains.Listed, {}, batch=chains.batch_of())
    assert shown(facts) == {"embed": (), "middle": (0,), "head": (0,)}
    assert shown(probe(chains.NoList, {}, batch=chains.batch_of(), chain=["middle"])) == {"embed": (), "middle": (0,), "head": (0,)}


def test_a_list_in_a_chain_stands_for_its_children():
    facts = probe(chains.plain, {"blocks": 2}, batch=chains.batch_of(), chain=["embed", "blocks", "head"])
    assert [layer.name for layer in facts.layers] == ["embed", "blocks.0", "blocks.1", "head"]


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (["embed", "block.0"], "the chain lists block.0, and there is no such module; did you mean blocks.0"),
        (["blocks.0", "blocks"], "the chain lists blocks.0 twice"),
        ([], "the chain is empty"),
        (["blocks.0", "blocks.0.up"], "the listed modules are no chain: blocks.0.up is called inside blocks.0"),
    ],
)
def test_a_wrong_list_is_refused(chain, message):
    with pytest.raises(ModelError) as caught:
        probe(chains.plain, {"blocks": 2}, batch=chains.batch_of(), chain=chain)
    assert message in str(caught.value)


def test_a_typing_error_in_the_models_own_list_is_told():
    with pytest.raises(ModelError, match="the chain lists middel, and there is no such module; did you mean middle"):
        probe(chains.Mistyped, {}, batch=chains.batch_of())


def test_without_data_the_structure_is_known_and_the_boundaries_are_not():
    facts = probe(gpt, {"layers": 2, "width": 8, "heads": 2}, batch=None)
    assert [layer.name for layer in facts.layers] == ["tok_embeddings", "layers.0", "layers.1", "norm"]
    assert facts.layers[3].parameters == ("norm.weight", "output.weight")
    assert all(layer.inputs == () for layer in facts.layers)
    assert "was not run" in facts.warnings[0]
    tied = probe(gpt, {"layers": 2, "width": 8, "heads": 2, "tie": True}, batch=None)
    assert tied.parameter("tok_embeddings.weight").layers == (0, 3)
    sequence = probe(chains.layers, {}, batch=None)
    assert [layer.name for layer in sequence.layers] == ["0", "1", "2", "3", "4"]


# --- what goes wrong ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "arguments", "message"),
    [
        ("pdsl.models.gpt", {}, '"pdsl.models.gpt" names no factory: expected "package.module:factory"'),
        ("pdsl.modles:gpt", {}, '"pdsl.modles:gpt": pdsl has no module modles; did you mean pdsl.models'),
        ("pdsl.models:gtp", {}, '"pdsl.models:gtp": pdsl.models has no gtp; did you mean gpt'),
        ("pdsl.models.gpt:IGNORED", {}, "pdsl.models.gpt:IGNORED is no factory: it is a int, which cannot be called"),
        (
            "pdsl.models:gpt",
            {"layer": 4},
            "got an unexpected keyword argument 'layer' (layer: did you mean layers); it takes (layers=4, width=128",
        ),
        ("pdsl.models:gpt", {"width": 10}, "pdsl.models:gpt raised ValueError: width 10 is not a multiple of heads 4 (pdsl/models/gpt.py:"),
        ("tests.chains:broken", {}, "tests.chains:broken raised KeyError: 'no such preset: tiny' (tests/chains.py:"),
        ("tests.chains:forgetful", {}, "tests.chains:forgetful returned a NoneType: expected a torch.nn.Module"),
    ],
)
def test_a_factory_that_is_none_or_fails(factory, arguments, message):
    with pytest.raises(ModelError) as caught:
        probe(factory, arguments, batch=chains.batch_of())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_forward_that_raises_is_told_with_the_users_line_and_the_shapes():
    with pytest.raises(ModelError) as caught:
        probe(chains.Fails, {}, batch=chains.batch_of())
    message = str(caught.value)
    assert message.startswith(
        "tests.chains:Fails: the forward pass failed on a batch of tokens: int64 (2, 6), targets: int64 (2, 6): RuntimeError: shape '[-1, 7]'"
    )
    assert "(tests/chains.py:" in message


def test_a_batch_that_the_model_does_not_take():
    with pytest.raises(ModelError, match=r"forward takes \(tokens, targets=None\) and the data gives pixels, labels"):
        probe(gpt, {"layers": 2}, batch={"pixels": torch.zeros(2, 1), "labels": torch.zeros(2)})


def test_a_target_that_the_forward_does_not_take_is_left_to_the_objective():
    class Outputs(chains.Chain):
        def forward(self, tokens):
            return self.head(self.run(self.embed(tokens), tokens))

    facts = probe(lambda: Outputs([chains.Plain(), chains.Plain()]), {}, batch=chains.batch_of())
    assert facts.inputs == ("tokens",)
    assert not facts.loss
    assert len(facts.layers) == 4


def test_modules_are_found_in_the_directory_of_the_spec(tmp_path):
    for folder, width in (("a", 3), ("b", 4)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mymodel.py").write_text(
            f"from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear({width}, 2), nn.Linear(2, 2))\n"
        )
        facts = probe("mymodel:make", {}, batch=torch.zeros(2, width), directory=str(tmp_path / folder))
        assert facts.parameter("0.weight").shape == (2, width)
    with pytest.raises(ModelError, match=r"there is no module mymodell in .*; did you mean mymodel"):
        probe("mymodell:make", {}, batch=None, directory=str(tmp_path / "a"))


def test_a_module_whose_import_fails_is_told_with_its_line(tmp_path):
    (tmp_path / "needy.py").write_text("import os\nimport einnops\n")
    with pytest.raises(
        ModelError, match=r'"needy:make": importing needy failed: ModuleNotFoundError: No module named .einnops. \(.*needy\.py:2\)'
    ):
        probe("needy:make", {}, batch=None, directory=str(tmp_path))
    (tmp_path / "garbled.py").write_text("def make(:\n")
    with pytest.raises(ModelError, match=r"importing garbled failed: SyntaxError: .*garbled\.py:1"):
        probe("garbled:make", {}, batch=None, directory=str(tmp_path))


def test_a_lazy_module_is_refused():
    with pytest.raises(ModelError, match="parameter weight of LazyLinear has no shape yet"):
        probe(lambda: nn.Sequential(nn.LazyLinear(3)), {}, batch=None)


@pytest.mark.parametrize(
    ("objective", "label", "fits"), [("cross_entropy", (), True), ("cross_entropy", (2,), False), ("mse", (3,), True), ("mse", (), False)]
)
def test_shapes_of_output_and_target_are_held_against_the_objective(objective, label, fits):
    spec = pdsl.load(
        'pdsl 1\nmesh { axis dp = 2 }\nmodel "x:y" {}\ntrain { data = "x:z"; batch = 4; steps = 1; optimizer = sgd(lr = 0.1); objective = '
        f"{objective} }}"
    )
    floats = objective == "mse"
    rows = {"x": torch.randn(4, 6), "label": torch.zeros(4, *label, dtype=torch.float32 if floats else torch.int64)}
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    if fits:
        plan = pdsl.compile(spec, model=model, batch=rows)
        assert (plan.facts.output, plan.facts.target) == (((0, 1), (3, 0)), label)
        return
    with pytest.raises(SpecError, match="PDL803") as caught:
        pdsl.compile(spec, model=model, batch=rows)
    assert [d.help for d in caught.value.diagnostics] == [("a target of (rows,)" if not floats else "a target of (rows, 3)",)]


class Switching(nn.Module):
    """Four blocks; in eval mode the second is left out, or the first result is added behind the last."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.start, self.how = nn.Linear(6, 6), how
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.start(x)
        for i, layer in enumerate(self.layers):
            x = x if self.how == "skips" and not self.training and i == 1 else layer(x)
        return (x + first if self.how == "adds" and not self.training else x).square().mean()


@pytest.mark.parametrize(
    ("how", "why"),
    [("plain", ""), ("adds", "what follows also reads earlier results than those it is given"), ("skips", "layers.1 was not called")],
)
@pytest.mark.parametrize("precision", [PrecisionSpec(), PrecisionSpec(params="bf16")], ids=["fp32", "bf16"])
def test_a_model_that_is_validated_is_cut_only_where_it_can_be_in_eval_mode_too(how, why, precision):
    held_out = RunAs(precision, held_out=CallValue("source", ("x:y",)))
    batch = {"x": torch.zeros(4, 6)}
    trained = probe(lambda: Switching(how), {}, batch=batch, run_as=RunAs(precision))
    found = probe(lambda: Switching(how), {}, batch=batch, run_as=held_out)
    assert [layer.cut_before for layer in trained.layers[1:]] == [""] * (len(trained.layers) - 1)
    cuts = [layer.cut_before for layer in found.layers[1:]]
    assert cuts == [""] * len(cuts) if not why else all(c.startswith("in eval mode, ") and why in c for c in cuts)
