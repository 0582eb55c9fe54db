"""Step time of PDSL against the same plan written by hand with torch alone: DDP, FSDP2, torch's own pipeline schedules, and all of it together.

    python tests/benchmarks/step_time.py [--case CASE] [--size SIZE] [--steps N] [--control] [--json FILE]

Both sides live in the same processes and step in turn (A B, B A, ...); the figure that counts is the median over pairs of PDSL's time divided by
torch's. Exit status 1 if the two disagree about a loss by more than 1e-5: then they did not do the same work. With `--control` the
hand-written side is compared with a second copy of itself, which shows what of a ratio is noise.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a plain checkout will do

import torch
import torch.distributed as dist
from _handwritten import Handwritten, handwritten
from _jobs import CASES, MODELS, Job
from _pairs import Cancelled, Measurement, Side, measure
from attrs import evolve

from pdsl.data import python_source

if TYPE_CHECKING:
    from pdsl.lowering.plan import Plan

TOLERANCE = 1e-5
PAIRS = {"1M": 50, "10M": 14}

Batch = dict[str, torch.Tensor]


class ByHand:
    """The hand-written side, on rows read before the clock runs."""

    def __init__(self, side: Handwritten, batches: Sequence[Batch]) -> None:
        self._side = side
        self._rows = [(side.rows(b["tokens"]), side.rows(b["targets"])) for b in batches]

    def step(self, batch: int) -> float:
        return self._side.step(*self._rows[batch % len(self._rows)])


class Declared:
    """PDSL's side: a session of the plan, on rows read before the clock runs."""

    def __init__(self, plan: Plan, rank: int, store: dist.Store, batches: Sequence[Batch]) -> None:
        from pdsl.runtime.rows import split_batch
        from pdsl.runtime.session import Session

        self._session = Session(plan, rank, store)
        places = self._session.places
        self._rows = [{m: split_batch(b, where) for m, where in places.items()} for b in batches]
        self._ids = {m: list(where) for m, where in places.items()}

    def step(self, batch: int) -> float:
        return self._session.step_rows(self._rows[batch % len(self._rows)], self._ids).loss


def planned(job: Job) -> tuple[Job, Plan]:
    """The plan of a job, and the job with the plan's cut."""
    import pdsl

    plan = pdsl.compile(pdsl.load(job.spec()))
    return evolve(job, cuts=_blocks_before(plan)), plan


def _blocks_before(plan: Plan) -> tuple[int, ...]:
    """How many blocks there are before each stage but the first."""
    from pdsl.lowering.facts import LayerKind

    stages = plan.templates[0].stages
    return tuple(sum(layer.kind is LayerKind.BLOCK for layer in plan.facts.layers[: s.start]) for s in stages[1:])


def run_job(job: Job, steps: int, *, control: bool) -> Measurement:
    """Measure one job. Raises Cancelled if it could not be measured."""
    plan = None
    if control:
        job = evolve(job, cuts=tuple(job.model["layers"] * i // job.stages for i in range(1, job.stages)))
    else:
        job, plan = planned(job)
    data = python_source(context=job.model["context"])
    batches = [data.rows(range(i * job.batch, (i + 1) * job.batch)) for i in range(32)]

    def make(which: int, rank: int, store: dist.Store) -> Side:
        if which == 0 and plan is not None:
            return Declared(plan, rank, store, batches)
        return ByHand(handwritten(job, rank, store), batches)

    return measure(make, job.ranks, steps)


# --- telling -------------------------------------------------------------------------------------------------------------------------------

HEAD = f"{'case':<18}{'pairs':>6}{'PDSL ms':>10}{'torch ms':>10}{'ratio':>8}  {'quartiles':<14}{'CPU':>6}{'collectives':>13}{'messages':>11}{'MB':>15}  {'loss differs':<12}"


def row(job: Job, m: Measurement) -> str:
    low, middle, high = m.quartiles
    ours, theirs = m.traffic
    return (
        f"{job.name:<18}{len(m.ours):>6}{statistics.median(m.ours) * 1e3:>10.1f}{statistics.median(m.theirs) * 1e3:>10.1f}{middle:>8.3f}  "
        f"{f'{low:.3f} {high:.3f}':<14}{m.work[0] / m.work[1]:>6.3f}{f'{ours.collectives} / {theirs.collectives}':>13}{f'{ours.messages} / {theirs.messages}':>11}"
        f"{f'{ours.bytes / 1e6:.2f} / {theirs.bytes / 1e6:.2f}':>15}  {m.deviation:<12.1e}"
    )


def record(job: Job, m: Measurement) -> dict[str, object]:
    low, middle, high = m.quartiles
    names = ("pdsl", "torch")
    return {
        "case": job.case, "size": job.size, "ranks": job.ranks, "pairs": len(m.ours), "ratio": middle, "quartiles": [low, high],
        "seconds": {"pdsl": statistics.median(m.ours), "torch": statistics.median(m.theirs)},
        "processor_ratio": m.work[0] / m.work[1],
        "loss_deviation": m.deviation,
        "traffic": {n: {"collectives": t.collectives, "messages": t.messages, "bytes": t.bytes} for n, t in zip(names, m.traffic, strict=True)},
        "calls": dict(zip(names, m.calls, strict=True)),
        "ratios": list(m.ratios),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Step time of PDSL over that of hand-written torch, for the same plan.")
    parser.add_argument("--case", choices=CASES, action="append", help="only this case; may be given several times")
    parser.add_argument("--size", choices=MODELS, action="append", help="only this model; may be given several times")
    parser.add_argument("--steps", type=int, help="pairs of steps for each job (default: 50 of the small model, 14 of the large one)")
    parser.add_argument("--control", action="store_true", help="compare the hand-written side with itself")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    options = parser.parse_args()
    jobs = [Job(case, size) for size in options.size or MODELS for case in options.case or CASES]
    print("\n".join(f"{case:<18}{words}" for case, words in CASES.items()))
    print(f"\n{HEAD}\n{'-' * len(HEAD)}")
    records, failed = [], False
    begin = time.monotonic()
    for job in jobs:
        steps = options.steps or PAIRS[job.size]
        try:
            found = run_job(job, steps, control=options.control)
        except Cancelled as error:
            print(f"{job.name:<18}not measured: {error}", file=sys.stderr)
            failed = True
            continue
        print(row(job, found), flush=True)
        if found.deviation > TOLERANCE:
            step = next(i for i, (a, b) in enumerate(found.losses) if abs(a - b) > TOLERANCE * abs(b))
            print(f"{job.name}: the losses of step {step} are {found.losses[step]}: not the same work", file=sys.stderr)
            failed = True
        records.append(record(job, found))
    print(
        f"\nPDSL / torch, medians over pairs; CPU: processor time of all ranks; calls, messages and bytes of one step over all ranks; {time.monotonic() - begin:.0f} s in all"
    )
    if options.json:
        Path(options.json).write_text(json.dumps({"torch": torch.__version__, "control": options.control, "jobs": records}, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
