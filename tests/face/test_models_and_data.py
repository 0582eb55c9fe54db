"""The models and data sets that ship."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

import pdsl.data
from pdsl.data import digits, python_source
from pdsl.models import gpt, vit

TOKENS = torch.randint(256, (3, 20), generator=torch.Generator().manual_seed(0))


# --- models -------------------------------------------------------------------------------------------------------------------------------


def test_the_default_decoder_has_about_a_million_parameters_under_the_usual_names():
    model = gpt()
    names = {n for n, _ in model.named_parameters()}
    block = {f"layers.3.{n}.weight" for n in ("attn.wq", "attn.wk", "attn.wv", "attn.wo", "mlp.w1", "mlp.w2", "attn_norm", "mlp_norm")}
    assert sum(p.numel() for p in model.parameters()) == 853_120
    assert {n for n in names if n.startswith("layers.3.")} == block
    assert {n for n in names if not n.startswith("layers.")} == {"tok_embeddings.weight", "norm.weight", "output.weight"}


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_decoder_does_not_look_ahead_but_knows_positions(positions):
    torch.manual_seed(0)
    model = gpt(layers=2, width=32, positions=positions)
    changed = TOKENS.clone()
    changed[:, 10:] = 0
    whole, other = model(TOKENS), model(changed)
    torch.testing.assert_close(whole[:, :10], other[:, :10])
    assert not torch.allclose(whole[:, 10:], other[:, 10:])
    swapped = TOKENS.clone()
    swapped[:, [3, 4]] = swapped[:, [4, 3]]
    assert not torch.allclose(model(swapped)[:, 10:], whole[:, 10:])


def test_rotary_attention_depends_on_distances_alone():
    torch.manual_seed(0)
    model = gpt(layers=2, width=32)
    shifted = model(torch.cat((TOKENS[:, :1], TOKENS), 1))
    from pdsl.models.gpt import rotate, rotation_table

    cos, sin = rotation_table(12, 8, torch.device("cpu"))
    q, k = torch.randn(8), torch.randn(8)
    scores = [rotate(q, cos[i], sin[i]) @ rotate(k, cos[i + 3], sin[i + 3]) for i in range(8)]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(8))
    assert shifted.shape == (3, 21, 256)


def test_the_loss_is_the_mean_over_targets_that_count():
    model = gpt(layers=1, width=32)
    targets = TOKENS.roll(-1, 1)
    targets[:, -5:] = -100
    expected = F.cross_entropy(model(TOKENS)[:, :-5].flatten(0, 1), targets[:, :-5].flatten())
    torch.testing.assert_close(model(TOKENS, targets), expected)
    assert abs(model(TOKENS, targets).item() - torch.tensor(256.0).log().item()) < 0.2


def test_a_rank_with_half_of_the_heads_computes_half_of_the_attention():
    torch.manual_seed(0)
    attention = gpt(layers=1, width=32, positions="learned").layers[0].attn
    x = torch.randn(2, 5, 32)
    whole = attention(x, None)
    parts = []
    for half in (slice(0, 16), slice(16, 32)):
        part = gpt(layers=1, width=32, positions="learned").layers[0].attn
        for name in ("wq", "wk", "wv"):
            getattr(part, name).weight = torch.nn.Parameter(getattr(attention, name).weight[half])
        part.wo.weight = torch.nn.Parameter(attention.wo.weight[:, half])
        parts.append(part(x, None))
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_tied_tables_are_one_parameter():
    model = gpt(tie=True)
    assert model.output.weight is model.tok_embeddings.weight


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (gpt, {"positions": "absolute"}, 'positions is "absolute": it is "rotary" or "learned"'),
        (gpt, {"width": 30, "heads": 4}, "width 30 is not a multiple of heads 4"),
        (gpt, {"width": 12, "heads": 4}, "width / heads is 3, it must be even"),
        (vit, {"width": 30, "heads": 4}, "width 30 is not a multiple of heads 4"),
        (vit, {"image": 9}, "image 9 is not a multiple of patch 2"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(make, arguments, message):
    with pytest.raises(ValueError) as caught:
        make(**arguments)
    assert message in str(caught.value)


def test_a_sequence_beyond_the_context_is_refused():
    with pytest.raises(ValueError, match="a sequence of 20 tokens is longer than the context of 8"):
        gpt(layers=1, context=8)(TOKENS)


def test_the_image_model_learns_digits():
    torch.manual_seed(0)
    model, data = vit(layers=1, width=32, patch=4), digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        loss = model(**data.rows(range(step % 30 * 50, step % 30 * 50 + 50)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(2.3, abs=0.2)
    assert sum(losses[-5:]) / 5 < 1.5
    assert model(data.rows([0])["pixels"]).shape == (1, 10)


# --- data -----------------------------------------------------------------------------------------------------------------------------------


def test_source_text_is_cut_into_rows_whose_targets_come_one_later():
    data = python_source(context=16, limit=1000)
    assert len(data) == 62
    first, second = data[0], data[1]
    assert bytes(first["tokens"].tolist()).startswith(b"# Author")
    assert first["tokens"].dtype == torch.int64
    assert torch.equal(first["targets"][:-1], first["tokens"][1:])
    assert first["targets"][-1] == second["tokens"][0]
    assert torch.equal(data.rows([1, 0])["tokens"], torch.stack([second["tokens"], first["tokens"]]))
    assert torch.equal(data[-1]["tokens"], data[61]["tokens"])
    with pytest.raises(IndexError):
        data[62]


def test_source_text_is_the_same_every_time():
    a, b = python_source(), python_source()
    assert len(a) == len(b) == 15624
    assert torch.equal(a.rows(range(100))["tokens"], b.rows(range(100))["tokens"])


def test_a_library_without_sources_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(pdsl.data.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="the sources of the standard library are not in"):
        python_source()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"vocabulary": "words"}, "vocabulary is"), ({"context": 0}, "context is 0"), ({"limit": 10}, "10 bytes make no row")],
)
def test_source_text_with_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        python_source(**arguments)


def test_digits_come_in_two_parts_and_any_size():
    train, test = digits(), digits(split="test", image=16)
    assert (len(train), len(test)) == (1500, 297)
    assert train[0]["pixels"].shape == (1, 8, 8)
    assert test[0]["pixels"].shape == (1, 16, 16)
    assert train.rows([0, 1])["pixels"].shape == (2, 1, 8, 8)
    assert (train[0]["labels"].item(), train[0]["labels"].dtype) == (0, torch.int64)
    assert (train.rows(range(1500))["pixels"].min(), train.rows(range(1500))["pixels"].max()) == (-1, 1)
    with pytest.raises(ValueError, match='split is "all"'):
        digits(split="all")


def test_digits_without_scikit_learn_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r'pip install "pdsl\[vision\]"'):
        digits()


def test_data_is_imported_without_torch():
    code = "import sys, pdsl.data; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout == "False\n"
