"""What the probe finds out of a forward beside its arithmetic: whose random numbers, which statistics, which memory is shared."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pdsl.lowering.facts import ModelFacts, Rowed
from pdsl.lowering.probe import probe
from pdsl.models import gpt
from tests import row_models

WIDTH = 8


class _Forward(nn.Module):
    """A model that does one thing."""

    def __init__(self, does) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.does(self.linear(x)).square().mean()
        return y


def facts_of(does) -> ModelFacts:  # type: ignore[no-untyped-def]
    return probe(lambda: _Forward(does), {}, batch={"x": torch.randn(4, 5, WIDTH)})


def drawn(does) -> list[tuple[str, str, Rowed, int]]:  # type: ignore[no-untyped-def]
    return [(d.function, d.operation, d.rowed, d.row_dim) for d in facts_of(does).draws]


def test_the_dim_of_the_rows_is_found_wherever_it_is() -> None:
    dropout = nn.functional.dropout
    assert drawn(dropout) == [("dropout", "bernoulli_", Rowed.ROWS, 0)]
    assert drawn(lambda x: dropout(x.transpose(0, 1))) == [("dropout", "bernoulli_", Rowed.ROWS, 1)]
    assert drawn(lambda x: dropout(x.flatten(0, 1))) == [("dropout", "bernoulli_", Rowed.ROWS, 0)]
    assert facts_of(lambda x: dropout(x.flatten(0, 1))).draws[0].dims == ((0, 5), (8, 0))


def test_what_has_no_rows_is_the_same_for_all() -> None:
    assert drawn(lambda x: x * torch.rand(WIDTH)) == [("rand", "rand", Rowed.SHARED, -1)]
    assert drawn(lambda x: x if torch.rand(()) < 2 else -x) == [("rand", "rand", Rowed.SHARED, -1)]


def test_what_mixes_rows_or_grows_with_their_square_is_opaque_and_told() -> None:
    assert drawn(lambda x: x[torch.randperm(len(x))]) == [("randperm", "randperm", Rowed.OPAQUE, -1)]
    facts = facts_of(lambda x: x * torch.rand(len(x), len(x)).mean())
    assert facts.draws[0].rowed is Rowed.OPAQUE
    assert [w for w in facts.warnings if w.startswith("the model draws random numbers (rand) that cannot be told apart by rows")]


def test_a_draw_is_told_by_the_module_and_the_segment_that_it_is_in() -> None:
    facts = probe(
        gpt,
        {"layers": 2, "width": 8, "heads": 2, "dropout": 0.1},
        batch={"tokens": torch.zeros(3, 8, dtype=torch.long), "targets": torch.zeros(3, 8, dtype=torch.long)},
    )
    assert [(d.segment, d.place, d.function) for d in facts.draws[:4]] == [
        (0, "dropout", "dropout"),
        (1, "layers.0.attn", "scaled_dot_product_attention"),
        (1, "layers.0.dropout", "dropout"),
        (1, "layers.0.dropout", "dropout"),
    ]


def test_running_statistics_are_buffers_that_the_forward_updates_though_torch_does_not_count_them() -> None:
    facts = probe(row_models.normed, {"blocks": 2}, batch=row_models.normed_rows().rows(range(4)))
    assert facts.statistics == ("stem_norm", "blocks.0.norm", "blocks.1.norm")
    assert {b.name for b in facts.updated if b.name.startswith("blocks.1")} == {
        f"blocks.1.norm.{b}" for b in ("running_mean", "running_var", "num_batches_tracked")
    }


class _Memory(nn.Module):
    """Parameters and buffers in one memory, in several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        table = torch.randn(10, WIDTH)
        if way == "snapshot before":
            self.register_buffer("copy", table)
        self.first = nn.Parameter(table[:6] if way == "overlap" else table[:, :4] if way == "columns" else table[:5])
        self.second = nn.Parameter(table[4:] if way == "overlap" else table[:, 4:] if way == "columns" else table[5:])
        if way == "snapshot":
            self.register_buffer("copy", self.first.data)
        if way == "clone":
            self.register_buffer("copy", self.first.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * (self.first.sum() + self.second.sum())


def test_memory_that_is_shared_is_told_and_parts_that_do_not_overlap_are_not() -> None:
    def shares(way: str) -> tuple[tuple[str, str], ...]:
        return probe(_Memory, {"way": way}, batch={"x": torch.randn(4, 2)}).shares

    assert shares("overlap") == (("second", "first"),)
    assert shares("snapshot") == shares("snapshot before") == (("copy", "first"),)
    assert shares("clone") == shares("parts") == shares("columns") == ()
