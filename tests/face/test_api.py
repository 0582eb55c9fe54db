from __future__ import annotations

import pytest
import torch
from attrs import evolve
from torch import nn

import pdsl
from pdsl.lowering.facts_cache import cached_facts
from pdsl.models import gpt
from tests.plans import facts as made_up_facts

ARGUMENTS = "layers = 2; width = 16; heads = 2; context = 8"
TEXT = f"""\
pdsl 1
mesh {{ axis pp = 2 }}
model "pdsl.models:gpt" {{ {ARGUMENTS} }}
shard {{ "**" => replicate() }}
pipeline over pp {{ schedule = one_f_one_b(microbatches = 2) }}
train {{
  data = source("pdsl.data:python_source", context = 8)
  batch = 4; steps = 6
  optimizer = sgd(lr = 0.5)
}}
"""
ALONE = """\
pdsl 1
model "pdsl.models:gpt" { layers = 1; width = 16; heads = 2; context = 8 }
shard { "**" => replicate() }
train { data = source("pdsl.data:python_source", context = 8); batch = 4; steps = 6; optimizer = sgd(lr = 0.5) }
"""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PDSL_CACHE", str(tmp_path_factory.getbasetemp() / "api-cache"))


@pytest.fixture
def spec():
    return pdsl.load(TEXT)


# --- check and load -------------------------------------------------------------------------------------------------------------------------


def test_a_text_and_a_file_are_checked_alike(tmp_path):
    (tmp_path / "job.pdsl").write_text(TEXT.replace("batch = 4", "batch = 3"))
    from_file = pdsl.check(tmp_path / "job.pdsl", model=False)
    from_text = pdsl.check(TEXT.replace("batch = 4", "batch = 3"), model=False)
    assert [(d.code, d.message) for d in from_file] == [(d.code, d.message) for d in from_text]
    assert "PDL404" in {d.code for d in from_text}


@pytest.mark.parametrize(
    "text", ["\n", "}{\n", "mesh {\n", "\x00\n\ufffd", "pdsl 1\n" * 50, "a = " + "(" * 3000 + "\n", TEXT * 2, TEXT[: len(TEXT) // 2]]
)
def test_no_text_raises(text):
    assert isinstance(pdsl.check(text, model=False), list)


def test_a_sound_spec_has_no_error():
    assert not [d for d in pdsl.check(TEXT) if d.severity is pdsl.Severity.ERROR]


def test_check_tells_a_missing_file_from_a_bad_spec():
    with pytest.raises(FileNotFoundError):
        pdsl.check("no/such/file.pdsl")


def test_a_bad_spec_cannot_be_loaded():
    with pytest.raises(pdsl.SpecError) as caught:
        pdsl.load(TEXT.replace("microbatches = 2", "microbatches = two"))
    assert "PDL101" in [d.code for d in caught.value.diagnostics]
    assert isinstance(caught.value, pdsl.PdslError)


def test_what_depends_on_the_ranks_is_an_error_of_compile():
    spec = pdsl.load(TEXT.replace("microbatches = 2", "microbatches = 1"))
    with pytest.raises(pdsl.SpecError) as caught:
        pdsl.compile(spec)
    assert [d.code for d in caught.value.diagnostics if d.severity is pdsl.Severity.ERROR] == ["PDL402"]


def test_a_batch_that_fits_unequal_pipelines_alone_is_no_error_of_load():
    spec = pdsl.load(TEXT.replace("microbatches = 2", "microbatches = 7"))
    plan = pdsl.compile(spec, world_size=3, pipelines=[(1, 1), (2, 3)])
    assert [len(p.microbatches) for p in plan.pipelines] == [1, 3]


def test_overrides_and_profiles_are_applied():
    spec = pdsl.load(TEXT + "profile small { train.batch = 2 }\n", profile="small", overrides=["train.steps=9"])
    assert spec.train is not None
    assert (spec.train.batch, spec.train.steps) == (2, 9)


# --- compile --------------------------------------------------------------------------------------------------------------------------------


def test_a_spec_becomes_a_plan_that_survives_its_json_form(spec):
    plan = pdsl.compile(spec)
    assert plan.world_size == 2
    assert [s.position for s in plan.templates[0].stages] == [0, 1]
    again = pdsl.Plan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash


def test_facts_that_were_read_before_are_not_read_again(spec):
    facts = pdsl.compile(spec).facts
    renamed = evolve(facts, factory="somewhere:else")
    assert pdsl.compile(spec, facts=renamed).facts.factory == "somewhere:else"


def test_facts_are_cached_for_the_next_compile(spec):
    plan = pdsl.compile(spec)
    assert spec.model is not None
    assert spec.train is not None
    assert cached_facts(spec.model.factory, spec.model.arguments, data=spec.train.data) == plan.facts


def test_a_module_in_place_of_the_factory_is_copied_and_left_alone(spec):
    model = gpt(layers=2, width=16, heads=2, context=8)
    before = {name: p.clone() for name, p in model.named_parameters()}
    plan = pdsl.compile(spec, model=model)
    assert plan.facts.factory == "pdsl.models.gpt:GPT"
    assert plan.facts.parameters == pdsl.compile(spec).facts.parameters
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_callable_in_place_of_the_factory_takes_the_arguments_of_the_spec(spec):
    def larger(**arguments):
        return gpt(**{**arguments, "width": 32})

    assert pdsl.compile(spec, model=larger).facts.parameter("tok_embeddings.weight").shape == (256, 32)


def test_a_batch_of_ones_own_stands_for_the_data():
    spec = pdsl.load(TEXT.replace("pdsl.data:python_source", "no_such_package:data"))
    rows = torch.zeros(3, 8, dtype=torch.int64)
    plan = pdsl.compile(spec, batch={"tokens": rows, "targets": rows})
    assert plan.facts.inputs == ("tokens", "targets")
    with pytest.raises(pdsl.ModelError, match="no_such_package"):
        pdsl.compile(spec)


def test_rules_on_the_model_hold_in_compile_too():
    spec = pdsl.load(TEXT.replace('"**" =>', '"layers.9.**", "**" =>').replace('"layers.9.**", "**"', '"nothing.**"'))
    with pytest.raises(pdsl.SpecError) as caught:
        pdsl.compile(spec)
    assert {"PDL301", "PDL302"} <= {d.code for d in caught.value.diagnostics}


def test_pipelines_of_unequal_length_are_planned():
    spec = pdsl.load(TEXT.replace("batch = 4", "batch = 16"))
    plan = pdsl.compile(spec, pipelines=[(2, 3), (3, 5)])
    assert plan.world_size == 5
    assert [len(p.islands) for p in plan.pipelines] == [2, 3]
    assert [p.microbatches for p in plan.pipelines] == [(0, 1, 2), (3, 4, 5, 6, 7)]


def test_unequal_pipelines_keep_the_axes_inside_their_islands():
    text = (
        TEXT.replace("axis pp = 2", "axis dp = 2; axis pp = 2; axis sh = 2")
        .replace("replicate()", "fsdp(sh)")
        .replace("batch = 4", "batch = 24")
    )
    plan = pdsl.compile(pdsl.load(text), pipelines=[(1, 1), (2, 2)])
    assert plan.shard_size == 2
    assert [p.islands for p in plan.pipelines] == [((0, 1),), ((2, 3), (4, 5))]


def test_the_world_settles_what_the_spec_leaves_open():
    spec = pdsl.load(TEXT.replace("axis pp = 2", "axis dp = rest; axis pp = 2"))
    assert pdsl.compile(spec, world_size=4).world_size == 4
    with pytest.raises(pdsl.PlanError, match="say the number of ranks"):
        pdsl.compile(spec)
    with pytest.raises(pdsl.SpecError, match="PDL201"):
        pdsl.compile(spec, world_size=3)


def test_a_spec_without_a_model_takes_one():
    text = TEXT.replace(f'model "pdsl.models:gpt" {{ {ARGUMENTS} }}\n', "")
    with pytest.raises(pdsl.ModelError, match="names no model"):
        pdsl.compile(pdsl.load(text))
    assert pdsl.compile(pdsl.load(text), model=gpt(layers=2, width=16, heads=2, context=8)).job.factory == "pdsl.models.gpt:GPT"


def test_made_up_facts_are_enough_for_a_plan(spec):
    assert len(pdsl.compile(spec, facts=made_up_facts(4)).facts.layers) == 6


# --- session --------------------------------------------------------------------------------------------------------------------------------


def batches(steps):
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        rows = torch.randint(256, (4, 9), generator=generator)
        yield {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def test_a_loop_of_ones_own_equals_plain_torch():
    plan = pdsl.compile(pdsl.load(ALONE))
    made = gpt(layers=1, width=16, heads=2, context=8)
    ours = gpt(layers=1, width=16, heads=2, context=8)
    ours.load_state_dict(made.state_dict())
    with pdsl.session(plan, model=ours) as session:
        losses = [session.step(batch).loss for batch in batches(3)]
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    expected = []
    for batch in batches(3):
        optimizer.zero_grad()
        loss = made(**batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-6)


def test_a_session_of_many_ranks_says_how_to_start_it(spec):
    with pytest.raises(pdsl.RunError, match="torchrun --nproc-per-node 2"), pdsl.session(pdsl.compile(spec)):
        pass


def test_a_module_of_ones_own_in_a_session_is_an_nn_module():
    plan = pdsl.compile(pdsl.load(ALONE))
    with pdsl.session(plan) as session:
        assert isinstance(session.model, nn.Module)


# --- misuse -----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipelines", "told"),
    [
        ([], "there is no pipeline"),
        ([(0, 1)], r"\(0, 1\) is no pipeline: give \(stages, microbatches\)"),
        ("ab", r"\('a',\) is no pipeline"),
        ([(1, 2), (1, 2)], "these pipelines need 2 ranks, the job has 5"),
    ],
)
def test_pipelines_that_make_no_plan(spec, pipelines, told):
    with pytest.raises(pdsl.PlanError, match=told):
        pdsl.compile(spec, pipelines=pipelines, world_size=5, facts=made_up_facts(4))


def test_one_override_may_be_given_as_it_is():
    assert pdsl.load(ALONE, overrides="train.batch=8").train.batch == 8


def test_a_model_may_be_a_class_and_no_number():
    spec = pdsl.load(ALONE)
    with pytest.raises(pdsl.ModelError, match="model is a int: expected a module, or a function that makes one"):
        pdsl.compile(spec, model=3)

    class Table(torch.nn.Module):
        def __init__(self, **sizes):
            super().__init__()
            self.scores = torch.nn.Embedding(256, 256)

        def forward(self, tokens, targets):
            return torch.nn.functional.cross_entropy(self.scores(tokens).flatten(0, 1), targets.flatten())

    assert [p.name for p in pdsl.compile(spec, model=Table).facts.parameters] == ["scores.weight"]


def test_no_steps_are_refused():
    plan = pdsl.compile(pdsl.load(ALONE))
    for call in (pdsl.run, pdsl.verify):
        with pytest.raises(pdsl.RunError, match="steps is 0: at least one is taken"):
            call(plan, steps=0)


def test_a_session_says_what_it_cannot_take():
    plan = pdsl.compile(pdsl.load(ALONE))
    (batch,) = batches(1)
    wrong = {
        "the batch is a NoneType": None,
        'batch entry "tokens" is a list': {name: t.tolist() for name, t in batch.items()},
        'batch entry "tokens" is a tensor without dims': {**batch, "tokens": torch.tensor(3)},
        'batch entry "tokens" has 2 rows, the plan is made for a batch of 4': {name: t[:2] for name, t in batch.items()},
        "the batch has no targets": {"tokens": batch["tokens"]},
    }
    with pdsl.session(plan) as session:
        for told, rows in wrong.items():
            with pytest.raises(pdsl.RunError, match=told):
                session.step(rows)
        with pytest.raises(pdsl.RunError, match="there are 2 sample ids for a batch of 4"):
            session.step(batch, ids=[1, 2])
        assert session.step(batch).step == 0
    with pytest.raises(pdsl.RunError, match="the session is closed"):
        session.step(batch)
    with pytest.raises(pdsl.RunError, match="the optimizer's function gave a NoneType"), pdsl.session(plan, optimizer=lambda _: None):
        pass
