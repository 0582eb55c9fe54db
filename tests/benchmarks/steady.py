"""The steady cost of a fault budget: step time of a run that can survive losses, over that of the same plan without.

    python tests/benchmarks/steady.py [--steps N] [--case CASE] [--control] [--json FILE]

Both sides train the same pipelines: one under agents, through an ElasticSession that tells its launcher of every step; the other as an ordinary
run. They step in turn (A B, B A, ...); the figure that counts is the median over pairs of the one's time divided by the other's. A step lasts from
the first rank that begins to the last that ends. With `--control` both sides are ordinary runs, which shows what of a ratio is noise.

Exit status 1 if a ratio is above the bound.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import argparse
import gc
import json
import select
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _recovery import ROOT

os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
)  # the ranks import from here

import torch.distributed as dist
from _steady import gates, plain
from attrs import evolve, frozen

import pdsl
from pdsl.lowering.plan import Plan
from pdsl.runtime.resilient import Cluster

BOUND = 1.02
WARM_UP = 8
DEADLINE = 60.0  # seconds that one step may take


@frozen
class Case:
    """What is trained: the mesh, and the nodes that it takes."""

    words: str
    nodes: int
    per_node: int
    mesh: str
    shard: str
    pipeline: bool


CASES = {
    "pp": Case("2 pipelines of 2 stages, 4 ranks", 4, 1, "axis dp = rest; axis pp = 2 to 3", "replicate()", pipeline=True),
    "copies": Case("2 copies of the model, 2 ranks", 2, 1, "axis dp = rest", "replicate()", pipeline=False),
    "fsdp": Case("2 copies, each sharded over the 2 ranks of a node", 2, 2, "axis dp = rest; axis fsdp = 2", "fsdp(fsdp)", pipeline=False),
}


def planned(case: Case) -> Plan:
    """The plan of a case, with its budget."""
    return pdsl.compile(
        pdsl.load(f"""
pdsl 1
cluster {{ nodes = {case.nodes}; ranks_per_node = {case.per_node}; device = cpu }}
mesh {{ {case.mesh} }}
model "pdsl.models:gpt" {{ layers = 2; width = 128; heads = 4; context = 32 }}
shard {{ "**" => {case.shard} }}
{"pipeline over pp { schedule = one_f_one_b(microbatches = 4) }" if case.pipeline else ""}
fault_budget {{ lose = 1; silence = 60s }}
train {{
  data      = source("pdsl.data:python_source", context = 32)
  batch     = 16
  steps     = 100000
  optimizer = adamw(lr = 0.001)
  seed      = 3
}}
""")
    )


class Ranks:
    """One side, as the benchmark holds it: takes a step on demand."""

    def __init__(self, folder: Path, side: str, ranks: int) -> None:
        self._done = os.open(folder / f"{side}-done", os.O_RDWR)  # also for writing: no end of file before the ranks come
        self._go = [os.open(folder / f"{side}-{rank}", os.O_RDWR) for rank in range(ranks)]
        self._rest = b""

    def step(self) -> tuple[float, float]:
        """Seconds from the first rank that begins to the last that ends, and processor seconds of all ranks. Raises TimeoutError."""
        for go in self._go:
            os.write(go, b"!")
        told: list[list[float]] = []
        while len(told) < len(self._go):
            ready, _, _ = select.select([self._done], [], [], DEADLINE)
            if not ready:
                raise TimeoutError(f"a step took more than {DEADLINE:g} s")
            *lines, self._rest = (self._rest + os.read(self._done, 1 << 16)).split(b"\n")
            told += [[float(word) for word in line.split()] for line in lines]
        return max(t[2] for t in told) - min(t[1] for t in told), sum(t[3] for t in told)


def _forked(plan: Plan, folder: Path, side: str, stack: ExitStack) -> None:
    """The ranks of an ordinary run, as the launcher's agent forks them."""
    context = get_context("fork")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stack.callback(lambda: store)  # it lives as long as they do

    def work(rank: int) -> None:
        try:
            mine = dist.TCPStore("127.0.0.1", store.port, is_master=False)
            plain(plan, rank, mine, str(folder), side)
        except BaseException:  # noqa: BLE001  nobody is left to whom it could be told otherwise
            traceback.print_exc()
        finally:
            os._exit(1)

    for rank in plan.ranks:
        worker = context.Process(target=work, args=(rank,), daemon=True)
        worker.start()
        stack.callback(worker.join)
        stack.callback(worker.kill)


def measure(plan: Plan, steps: int, *, control: bool) -> dict[str, Any]:
    """Run `steps` pairs."""
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        for side in "ab":
            gates(folder, side, plan.world_size)
        ours, theirs = (Ranks(folder, side, plan.world_size) for side in "ab")
        bare = evolve(plan, budget=None)
        gc.collect()
        gc.freeze()
        if control:
            _forked(bare, folder, "a", stack)
        _forked(bare, folder, "b", stack)
        if not control:
            stack.enter_context(Cluster(plan, "_steady:budgeted", {"folder": name, "side": "a"}, threads=1))
        pairs = []
        for pair in range(WARM_UP + steps):
            order: Sequence[Callable[[], tuple[float, float]]] = (ours.step, theirs.step)
            found = [take() for take in (order if pair % 2 == 0 else order[::-1])]
            pairs.append(found if pair % 2 == 0 else found[::-1])
    pairs = pairs[WARM_UP:]
    ratios = [a[0] / b[0] for a, b in pairs]
    return {
        "ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4)[::2],
        "seconds": [statistics.median(p[side][0] for p in pairs) for side in (0, 1)],
        "processor_ratio": statistics.median(p[0][1] for p in pairs) / statistics.median(p[1][1] for p in pairs),
        "ratios": ratios,
    }


HEAD = f"{'case':<10}{'pairs':>6}{'with ms':>9}{'without':>9}{'ratio':>8}  {'quartiles':<14}{'CPU':>6}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Step time with a fault budget over that without, for the same pipelines.")
    parser.add_argument("--steps", type=int, default=150, help="pairs of steps for each case (default: 150)")
    parser.add_argument("--case", choices=CASES, action="append", help="only this case; may be given several times")
    parser.add_argument("--control", action="store_true", help="compare ordinary runs with each other")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    options = parser.parse_args()
    chosen = options.case or list(CASES)
    print("\n".join(f"{name:<10}{CASES[name].words}" for name in chosen))
    print(f"\n{HEAD}\n{'-' * len(HEAD)}")
    records, begin = {}, time.monotonic()
    for name in chosen:
        found = records[name] = measure(planned(CASES[name]), options.steps, control=options.control)
        low, high = found["quartiles"]
        print(
            f"{name:<10}{options.steps:>6}{found['seconds'][0] * 1e3:>9.1f}{found['seconds'][1] * 1e3:>9.1f}{found['ratio']:>8.3f}  "
            f"{f'{low:.3f} {high:.3f}':<14}{found['processor_ratio']:>6.3f}",
            flush=True,
        )
    print(f"\nmedians over pairs; CPU: processor time of all threads of all ranks in a step; {time.monotonic() - begin:.0f} s in all")
    if options.json:
        Path(options.json).write_text(json.dumps({"control": options.control, "cases": records}, indent=1))
    above = [name for name in chosen if records[name]["ratio"] > BOUND]
    if above:
        print(f"above {BOUND:g}: {', '.join(above)}", file=sys.stderr)
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
