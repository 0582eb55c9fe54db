"""From ordered rules to the layout of each parameter."""

from __future__ import annotations

import pdsl
from pdsl.lowering.facts import ModelFacts, ParameterFacts
from pdsl.lowering.layouts import parameter_layouts

TEXT = """pdsl 1
mesh { axis a = 2 }
shard { "*.weight" => fsdp(a); "**" => replicate() }
train { data = "m:d"; batch = 4; steps = 1; optimizer = sgd(lr = 1) }
"""


def layouts(*shapes: tuple[int, ...], shard_size: int = 2) -> list[bool]:
    parameters = tuple(ParameterFacts(f"{i}.weight", shape, "float32", True, (0,), "Linear") for i, shape in enumerate(shapes))
    rules = pdsl.load(TEXT).shard
    found = parameter_layouts(ModelFacts("m:f", (), parameters), rules, shard_size=shard_size, tensor_size=1)
    return [layout.sharded for layout in found]


def test_what_has_rows_is_split_and_the_rest_is_whole() -> None:
    assert layouts((4, 8), (1,), (), (0, 8)) == [True, True, False, False]


def test_a_bias_is_split_as_the_outputs_of_its_module_are() -> None:
    """In slots too: torch splits the bias of a column-wise Linear however the layout of the weight is written."""
    weight, bias = (ParameterFacts(f"up.{n}", s, "float32", True, (0,), "Linear") for n, s in (("weight", (8, 4)), ("bias", (8,))))
    for layout, dims in (("colwise(a)", [0, 0]), ("rowwise(a)", [1, None]), ("[a, _]", [0, 0]), ("[_, a]", [1, None])):
        rules = pdsl.load(TEXT.replace('"*.weight" => fsdp(a)', f'"*.weight" => {layout}')).shard
        found = parameter_layouts(ModelFacts("m:f", (), (weight, bias)), rules, shard_size=1, tensor_size=2)
        assert [f.tensor_dim for f in found] == dims, layout


def test_what_is_read_outside_of_its_module_is_whole() -> None:
    gain = ParameterFacts("0.weight", (8,), "float32", True, (0,), "Block", outside=True)
    rules = pdsl.load(TEXT).shard
    (layout,) = parameter_layouts(ModelFacts("m:f", (), (gain,)), rules, shard_size=2, tensor_size=1)
    assert not layout.sharded


def test_on_an_axis_of_one_nothing_is_split() -> None:
    assert layouts((4, 8), shard_size=1) == [False]
