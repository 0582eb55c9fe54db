"""The ranks of the steady-cost benchmark: each takes one step whenever it is told to, and tells how long it took."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict

from pdsl.lowering.plan import Plan
from pdsl.runtime.elastic import ElasticSession
from pdsl.runtime.link import Link
from pdsl.runtime.report import Reporter
from pdsl.runtime.resilient_train import _DataSet
from pdsl.runtime.rows import read_rows, step_indices
from pdsl.runtime.session import Session, StepResult
from pdsl.runtime.train import make_dataset

__all__ = ["budgeted", "gates", "plain"]


def gates(folder: Path, side: str, ranks: int) -> None:
    """Make the pipes of one side: one to each rank, one from all of them."""
    for name in [f"{side}-{rank}" for rank in range(ranks)] + [f"{side}-done"]:
        os.mkfifo(folder / name)


def _serve(folder: str, side: str, rank: int, step: Callable[[], None]) -> None:
    """Take a step for each byte until the pipe closes. What is told: rank, begin, end, processor seconds of all threads."""
    go = os.open(f"{folder}/{side}-{rank}", os.O_RDONLY)
    done = os.open(f"{folder}/{side}-done", os.O_WRONLY)
    gc.collect()
    gc.freeze()
    while os.read(go, 1):
        begin, busy = time.perf_counter(), time.process_time()
        step()
        end, busy = time.perf_counter(), time.process_time() - busy
        os.write(done, f"{rank} {begin} {end} {busy}\n".encode())


def budgeted(plan: Plan, rank: int, link: Link, *, folder: str, side: str) -> None:
    """A rank of a run with a fault budget: the loop of `train_resilient` with steps on demand."""
    speaks = rank % plan.ranks_per_node == 0

    def told(result: StepResult) -> None:
        if speaks:
            link.tell({"event": "step", "generation": session.plan.generation, **asdict(result)})

    session = ElasticSession(plan, rank, link, _DataSet(plan), on_event=link.tell, on_step=told)
    session.start()
    _serve(folder, side, rank, session.step)
    link.done()


def plain(plan: Plan, rank: int, store: dist.Store, folder: str, side: str) -> None:
    """A rank of an ordinary run: the loop of `train_rank` with steps on demand."""
    torch.set_num_threads(1)
    data: Any = make_dataset(plan)
    told = Reporter(1 << 30, metrics=f"{folder}/{side}.jsonl", progress=False, generation=plan.generation, active=rank == 0)
    with Session(plan, rank, store) as session, told as reporter:

        def step() -> None:
            order = step_indices(plan.job.seed, session.steps_taken, len(data), plan.job.batch)
            ids = {m: [order[i] for i in places] for m, places in session.places.items()}
            reporter.step(session.step_rows({m: read_rows(data, part) for m, part in ids.items()}, ids))

        _serve(folder, side, rank, step)
