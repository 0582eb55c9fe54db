"""From text to Spec: defaults, precedence, origins, imports, and that nothing raises."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsl.grammar.diagnostics import DiagnosticSink, has_errors
from pdsl.grammar.parser import parse
from pdsl.grammar.source import Source
from pdsl.lowering.check import check
from pdsl.lowering.resolve import resolve
from pdsl.lowering.spec import REST, AxisSpec, CallValue, LayoutCall, LayoutSlots, OriginKind, Quantity, SizeRange

TEXT = """pdsl 1
param layers: int = 4
param name: string = "gpt"
let half = layers / 2
cluster { memory = 16GiB; bandwidth = 25GB/s; latency = 5us }
mesh { axis dp = rest; axis pp = 2 to 4 @inter; axis tp = 2 @intra; axis fsdp = half }
model "pdsl.models:gpt" { layers = layers; dropout = 0.0; bias = false; name = name; sizes = [1, half] }
shard {
  "head.weight" => [(tp), _] + fsdp(fsdp)
  "layers[0..half].**", "tok.weight" => colwise(tp)
  "**" => replicate()
}
pipeline over pp {
  stage first { "tok", "layers[0..half]" }
  stage last { "layers[half..]", "norm", "head" }
  schedule = interleaved_1f1b(microbatches = 2 * layers)
}
fault_budget { lose = 1; recover = [restore]; silence = 1min; restarts = 5 per 24h }
freeze { prefix = bound(alpha = 1/3, every = 1 epoch); repack = when(gain > 5%); cache = host(limit = 8GiB); guard = unfreeze(worse = 0.5%) }
train {
  data = source("pdsl.data:digits", split = "train", limit = layers)
  batch = 64; steps = 10
  optimizer = sgd(lr = 1/10, nesterov = true)
  rate = cosine(warmup = 2, floor = 10%)
  clip = 1
  loss = sum
  objective = "mine.losses:focal"
}
profile small { mesh.fsdp = 1; train.batch = 32; pipeline.schedule.microbatches = 4; cluster.device = cpu; layers = 8 }
"""


def spec_of(text: str, **how):
    sink = DiagnosticSink()
    found = resolve(parse(Source("jobs/x.pdsl", text), sink), sink=sink, **how)
    assert found is not None, [f"{d.span}: {d.code} {d.message}" for d in sink.diagnostics]
    return found


def findings(text: str, **how) -> list[str]:
    sink = DiagnosticSink()
    assert resolve(parse(Source("x.pdsl", text), sink), sink=sink, **how) is None
    return [f"{d.code} {d.message}" for d in sink.diagnostics]


def test_every_kind_of_value_arrives_in_the_spec():
    spec = spec_of(TEXT)
    assert (spec.name, spec.directory) == ("x", "jobs")
    assert spec.mesh.axes == (
        AxisSpec("dp", REST),
        AxisSpec("pp", SizeRange(2, 4), "inter"),
        AxisSpec("tp", 2, "intra"),
        AxisSpec("fsdp", 2),
    )
    assert (spec.cluster.memory, spec.cluster.bandwidth, spec.cluster.latency) == (16 * 2**30, 25 * 10**9, Fraction(5, 10**6))
    assert spec.model.factory == "pdsl.models:gpt"
    assert spec.model.arguments == (("layers", 4), ("dropout", Fraction(0)), ("bias", False), ("name", "gpt"), ("sizes", (1, 2)))
    assert spec.shard[0].terms == (LayoutSlots((("tp",), ())), LayoutCall("fsdp", ("fsdp",)))
    assert [p.text for p in spec.shard[1].patterns] == ["layers[0..half].**", "tok.weight"]
    assert spec.shard[1].matches("layers.1.attn.wq.weight")
    assert not spec.shard[1].matches("layers.2.attn.wq.weight")
    assert [s.name for s in spec.pipeline.stages] == ["first", "last"]
    assert spec.pipeline.schedule == CallValue("interleaved_1f1b", (), (("microbatches", 8), ("virtual", 2)))
    assert (spec.pipeline.microbatches, spec.pipeline.virtual) == (8, 2)
    assert (spec.fault_budget.silence, spec.fault_budget.recover) == (Fraction(60), ("restore",))
    assert spec.fault_budget.restarts == CallValue("per", (5, Quantity(Fraction(86400), "seconds")))
    assert spec.freeze.prefix == CallValue("bound", (), (("alpha", Fraction(1, 3)), ("every", Quantity(Fraction(1), "epochs"))))
    assert spec.freeze.repack == CallValue("when", (CallValue(">", ("gain", Fraction(1, 20))),))
    assert spec.train.data == CallValue("source", ("pdsl.data:digits",), (("split", "train"), ("limit", 4)))
    assert spec.train.optimizer == CallValue(
        "sgd", (), (("lr", Fraction(1, 10)), ("momentum", Fraction(0)), ("nesterov", True), ("weight_decay", Fraction(0)))
    )
    assert spec.train.rate == CallValue("cosine", (), (("warmup", 2), ("floor", Fraction(1, 10))))
    assert (spec.train.clip, spec.train.loss, spec.train.objective) == (Fraction(1), CallValue("sum"), "mine.losses:focal")


def test_what_is_not_written_has_its_default():
    spec = spec_of('pdsl 1\ntrain { data = "a:b"; batch = 4; steps = 1; optimizer = adamw(lr = 1) }\n')
    train = spec.train
    assert train.data == CallValue("source", ("a:b",))
    assert (train.last, train.accumulate, train.clip, train.objective, train.seed) == ("drop", 1, None, "model", 0)
    assert train.rate == CallValue("constant", (), (("warmup", 0),))
    assert train.loss == CallValue("mean", (), (("over", "samples"),))
    assert dict(train.optimizer.keywords) == {
        "lr": 1, "betas": (Fraction(9, 10), Fraction(999, 1000)), "eps": Fraction(1, 10**8), "weight_decay": Fraction(1, 100)
    }  # fmt: skip
    assert (spec.cluster.device, spec.precision.params, spec.memory.offload) == ("auto", "fp32", "none")
    assert (spec.model, spec.pipeline, spec.fault_budget, spec.freeze, spec.checkpoint) == (None,) * 5


def test_set_beats_profile_and_profile_beats_file():
    spec = spec_of(
        TEXT, profile="small", overrides=["train.batch=16", "pipeline.schedule.virtual=4", "train.optimizer.lr=1e-2", "name=vit"]
    )
    assert (spec.train.batch, spec.train.steps) == (16, 10)
    assert (spec.mesh.axis("fsdp").size, spec.mesh.axis("tp").size) == (1, 2)
    assert (spec.pipeline.microbatches, spec.pipeline.virtual) == (4, 4)
    assert spec.cluster.device == "cpu"
    assert spec.train.optimizer.get("lr") == Fraction(1, 100)
    assert dict(spec.model.arguments) | {"sizes": 0} == {"layers": 8, "dropout": 0, "bias": False, "name": "vit", "sizes": 0}


def test_every_value_knows_where_it_came_from():
    spec = spec_of(TEXT, profile="small", overrides=["train.batch=16", "layers=6"])
    line = {path: str(spec.origin(path)) for path, _ in spec.origins}
    assert line["train.batch"] == "--set train.batch=16"
    assert line["train.steps"] == "line 22"
    assert line["train.seed"] == "default"
    assert line["mesh.fsdp"] == "profile small, line 29"
    assert line["mesh.pp"] == "line 6"
    assert line["pipeline.schedule"] == "line 16"
    assert line["pipeline.schedule.microbatches"] == "profile small, line 29"
    assert line["pipeline.schedule.virtual"] == "default"
    assert line["train.optimizer.lr"] == "line 23"
    assert line["train.optimizer.momentum"] == "default"
    assert line["cluster.device"] == "profile small, line 29"
    assert spec.origin("model.layers").detail == "--set layers=6"
    assert spec.origin("train.batch").kind is OriginKind.SET
    assert {"model.layers", "mesh.dp", "fault_budget.lose", "checkpoint.path"} - set(line) == {"checkpoint.path"}


def test_of_two_set_for_one_value_the_last_counts():
    assert spec_of(TEXT, overrides=["train.batch=16", "train.batch=8"]).train.batch == 8


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.bacth=1", "PDL104 there is no train.bacth to override"),
        ("checkpoint.every=1", "PDL104 there is no checkpoint.every to override"),
        ("model.width=1", "PDL104 there is no model.width to override"),
        ("half=1", "PDL104 half is no param"),
        ("train.optimizer.momentun=1", "PDL104 there is no train.optimizer.momentun to override: sgd has no argument momentun"),
        ("train.batch.size=1", "PDL104 there is no train.batch.size to override: train.batch is no call here"),
        ("a.b.c.d=1", "PDL104 there is no a.b.c.d to override"),
        ("train.batch", "PDL104 --set train.batch is no setting"),
        ("=4", "PDL104 --set =4 is no setting"),
        ("train.batch=many", "PDL101 unknown name many"),
        ("train.batch=4 4", 'PDL102 train.batch takes a whole number, "4 4" is a string'),
        ("layers=2.5", "PDL102 param layers takes a whole number, not 2.5"),
    ],
)
def test_overrides_of_nothing_and_of_the_wrong_type(setting, message):
    assert findings(TEXT, overrides=[setting]) == [message]


def test_imports_are_relative_to_the_importing_file_and_can_be_nested():
    files = {
        "jobs/hw/a.pdsl": 'pdsl 1\nimport "../b.pdsl" as more\nparam nodes: int = 2\nlet ranks = nodes * more.per_node\n',
        "jobs/b.pdsl": "pdsl 1\nlet per_node = 8\n",
    }
    spec = spec_of('pdsl 1\nimport "hw/a.pdsl" as hw\nmesh { axis dp = hw.ranks; axis tp = hw.more.per_node }\n', loader=files.get)
    assert [a.size for a in spec.mesh.axes] == [16, 8]
    wrong = findings('pdsl 1\nimport "jobs/hw/a.pdsl" as hw\nmesh { axis dp = hw.rank }\n', loader=files.get)
    assert wrong == ["PDL101 jobs/hw/a.pdsl has no name rank"]


def test_an_error_in_an_imported_file_is_told_there():
    sink = DiagnosticSink()
    files = {"hw.pdsl": "pdsl 1\nlet nodes = 4 / 0\n"}
    file = parse(Source("x.pdsl", 'pdsl 1\nimport "hw.pdsl" as hw\nmesh { axis dp = hw.nodes }\n'), sink)
    assert resolve(file, loader=files.get, sink=sink) is None
    (found,) = sink.diagnostics
    assert str(found.span) == "hw.pdsl:2:13"


def test_a_let_may_hold_a_call():
    text = "pdsl 1\nlet plan = gpipe(microbatches = 2)\nmesh { axis pp = 2 }\npipeline over pp { schedule = plan }\n"
    assert spec_of(text).pipeline.schedule == CallValue("gpipe", (), (("microbatches", 2),))
    assert spec_of(text, overrides=["pipeline.schedule.microbatches=8"]).pipeline.microbatches == 8


def test_an_assertion_sees_values_of_blocks():
    text = 'pdsl 1\nmesh { axis pp = 2 }\nassert mesh.pp == 3, "three stages"\n'
    assert findings(text) == ["PDL190 three stages"]
    assert spec_of(text, overrides=["mesh.pp=3"]).mesh.axis("pp").size == 3


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("mesh { axis a = 0 }", "PDL102 mesh.a must be at least 1, not 0"),
        ("mesh { axis a = 1.5 }", "PDL102 mesh.a takes a whole number, not 1.5"),
        ("mesh { axis a = 2 @fast }", "PDL101 unknown link fast"),
        ("mesh { a = 2 }", "PDL102 mesh holds axes: axis NAME = SIZE"),
        ("mesh main { axis a = 2 }", "PDL102 mesh takes no label"),
        ('model "pdsl.models" { }', 'PDL102 "pdsl.models" names no factory'),
        ("model gpt { }", 'PDL102 model takes the name of its factory: model "package.module:factory" { ... }'),
        ('shard { "**" => split(a) }', "PDL101 unknown layout split"),
        ('mesh { axis a = 2 }\nshard { "**" => fsdp() }', "PDL102 fsdp() needs an axis"),
        (
            'mesh { axis a = 2 }\nshard { "**" => replicate(a) }',
            "PDL102 replicate() takes no axis: a parameter is whole along every axis that its rule does not name",
        ),
        (
            "mesh { axis a = 2 }\npipeline { schedule = gpipe(microbatches = 1) }",
            "PDL102 pipeline names its axis: pipeline over AXIS { ... }",
        ),
        ("mesh { axis a = 2 }\npipeline over a { schedule = gpipe(4) }", "PDL102 gpipe takes its arguments by name"),
        ("mesh { axis a = 2 }\npipeline over a { schedule = 4 }", "PDL102 pipeline.schedule takes a call, not 4"),
        ('cluster { device = "tpu" }', 'PDL102 cluster.device takes one of auto, cpu, cuda, not "tpu"'),
        ("fault_budget { recover = [restore, restore] }", "PDL102 fault_budget.recover lists restore twice"),
        ("freeze { repack = when(loss > 5%) }", "PDL102 freeze.repack.gain takes a comparison of gain"),
        ("param n: integer = 4", "PDL101 unknown type integer"),
        ("param n: time = 4", "PDL102 param n is a time and needs a unit, 4 has none"),
        ("checkpoint { path = 4 }", "PDL102 checkpoint.path takes a string, 4 is a number"),
        ("assert 1", "PDL102 assert takes a comparison, 1 is a number"),
    ],
)
def test_statements_that_say_nothing_sound(statement, message):
    assert message in findings(f"pdsl 1\n{statement}\n")
    if "assert" not in statement:
        assert len(findings(f"pdsl 1\n{statement}\n")) == 1


def test_a_syntax_error_causes_no_other_finding():
    healthy = TEXT.replace("axis tp = 2 @intra", "axis tp 2 @intra")
    assert [m.split()[0] for m in findings(healthy)] == ["PDL001"]
    for bad in ("let half = / 2", "let = layers"):
        found = findings(TEXT.replace("let half = layers / 2", bad))
        assert {m.split()[0] for m in found} == {"PDL001"}


WORDS = st.sampled_from(sorted({*re.findall(r"\w+|[^\w\s]|\n", TEXT), "1/0", "1e999", "rest", "=>", "9" * 60, "{", "}", '"', "\n"}))


@given(st.lists(st.tuples(st.integers(0, len(TEXT)), st.integers(0, 6), WORDS), min_size=1, max_size=6))
def test_no_text_makes_the_checker_raise(changes):
    text = TEXT
    for at, length, word in changes:
        text = text[:at] + word + text[at + length :]
    found = check(Source("x.pdsl", text), world=16, overrides=["train.batch=8"], profile="small", loader=lambda _: text)
    assert (found.spec is None) is has_errors(found.diagnostics)
    keys = [d.sort_key for d in found.diagnostics]
    assert keys == sorted(keys)


@given(st.lists(WORDS, max_size=40).map(" ".join))
def test_no_setting_makes_the_checker_raise(value):
    check(Source("x.pdsl", TEXT), overrides=[f"train.batch={value}", f"layers={value}", value])
