"""Rows from a file compute what one process computes, whatever order and placement they have."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.equality import FSDP, WHOLE, check_against_one_process, compile_text, one_process, spec_text
from tests.pool import Pool

BATCH = 32

ROWS = {
    # halves and whole backwards side by side
    "mixed": ("0F0,0F1,,0I0,0F2,0B1,0W0,0F3,0I2,0B3,0W2\n1F0,1B0,1F1,1I1,1F2,1W1,1I2,1F3,1W2,1B3\n", (0, 1)),
    # microbatches in an order of their own, which is another one on the way back
    "shuffled": ("0F2,0F0,0F3,0F1,0B0,0B2,0B1,0B3\n1F2,1F0,1B0,1B2,1F1,1F3,1B1,1B3\n", (0, 1)),
    # two stages on the first position, one on the second, there and back and there again
    "ping-pong": ("0F0,0F1,2F0,2I0,2F1,2I1,2W0,0B0,2W1,0B1\n1F0,1F1,1B0,1B1\n", (0, 1, 0)),
}  # fmt: skip


@lru_cache(maxsize=1)
def reference() -> dict[str, Any]:
    return one_process(11, BATCH)


def text_of(tmp_path: Path, rows: str, axes: dict[str, int], accumulate: int = 1) -> str:
    file = tmp_path / "rows.csv"
    file.write_text(rows, encoding="utf-8")
    return spec_text(axes, FSDP if "fsdp" in axes else WHOLE, schedule=f'rows("{file.as_posix()}")', accumulate=accumulate, batch=BATCH)


@pytest.mark.parametrize(
    ("name", "axes", "accumulate"), [("mixed", {"pp": 2, "fsdp": 2}, 1), ("shuffled", {"dp": 2, "pp": 2}, 1), ("ping-pong", {"pp": 2}, 2)]
)
def test_rows_of_a_file_equal_one_process(pool: Pool, tmp_path: Path, name: str, axes: dict[str, int], accumulate: int) -> None:
    rows, placement = ROWS[name]
    plan = compile_text(text_of(tmp_path, rows, axes, accumulate))
    assert plan.templates[0].schedule.placement == placement
    check_against_one_process(pool, plan, reference())


def test_rows_that_torch_wrote_with_its_communication_equal_one_process(pool: Pool, tmp_path: Path) -> None:
    from torch.distributed.pipelining import _schedule_visualizer as torch_schedules  # noqa: TID251

    theirs = torch_schedules.get_schedule_ops("DualPipeV", 2, 4, 2, with_comms=True)
    rows = "\n".join(",".join(map(str, row)) for row in theirs)
    assert "OVERLAP_F_B" in rows
    assert "RECV_B" in rows
    check_against_one_process(pool, compile_text(text_of(tmp_path, rows, {"pp": 2})), reference())
