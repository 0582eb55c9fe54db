from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankDied, RankFailed, RankStuck
from tests.tree import ROOT


def start_gloo(rank, world, store):
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def describe(rank, world, store, word, *, suffix=""):
    return rank, world, word + suffix, os.getpid(), torch.get_num_threads()


def add_up(rank, world, store, value):
    start_gloo(rank, world, store)
    total = value * (rank + 1)
    dist.all_reduce(total)
    return {"total": total, "group": dist.get_world_size()}


def rows_of_a_table(rank, world, store):
    table = torch.arange(1_000_000.0).reshape(1000, 1000)
    return torch.nn.Parameter(table)[rank], torch.nn.Parameter(table[:1, :2].t())


def raise_on(rank, world, store, culprit):
    start_gloo(rank, world, store)
    dist.barrier()
    if rank == culprit:
        raise ValueError(f"rank {rank} does not like it")
    dist.all_reduce(torch.ones(4))


class Stubborn(Exception):
    def __init__(self, first, second):
        super().__init__(first)
        self.second = second


def raise_unpicklable(rank, world, store):
    raise Stubborn("cannot", "travel")


def exit_quietly(rank, world, store):
    raise SystemExit(0)


def die_on(rank, world, store, culprit, how):
    start_gloo(rank, world, store)
    dist.barrier()
    if rank == culprit and how == "exit":
        os._exit(7)
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


def wait_for_nothing(rank, world, store, culprit):
    if rank == culprit:
        threading.Event().wait()


def wait_in_cpp(rank, world, store):
    start_gloo(rank, world, store)
    if rank == 0:
        dist.recv(torch.ones(1), src=1)
    store.get("a key that nobody sets")


def stop_reacting(rank, world, store):
    os.kill(os.getpid(), signal.SIGSTOP)


def leave_things_behind(rank, world, store):
    start_gloo(rank, world, store)
    store.set("left", "behind")
    os.environ["LEFT"] = "behind"
    torch.set_default_dtype(torch.float64)
    torch.rand(5)


def look_for_things(rank, world, store):
    return dist.is_initialized(), store.check(["left"]), os.environ.get("LEFT"), torch.ones(1).dtype, torch.rand(2)


def fail_in_order(rank, world, store):
    """Rank 1 fails first for a reason of its own; rank 0 sees the connection closed and raises something unrelated from it."""
    start_gloo(rank, world, store)
    dist.barrier()
    if rank == 1:
        raise KeyError("the first cause")
    try:
        dist.all_reduce(torch.ones(4))
    except RuntimeError as error:
        raise LookupError("a consequence") from error


def test_results_come_back_in_the_order_of_the_ranks(pool):
    results = pool.run(describe, 3, "wo", suffix="rd")
    assert [r[:3] for r in results] == [(0, 3, "word"), (1, 3, "word"), (2, 3, "word")]
    assert len({r[3] for r in results} | {os.getpid()}) == 4
    assert [r[4] for r in results] == [1, 1, 1]


def test_ranks_reach_each_other_over_gloo(pool):
    results = pool.run(add_up, 2, torch.tensor([1.0, 10.0]))
    for result in results:
        assert result["group"] == 2
        torch.testing.assert_close(result["total"], torch.tensor([3.0, 30.0]), rtol=0, atol=0)


def test_tensors_come_back_plain_and_without_the_storage_they_were_a_view_of(pool):
    row, corner = pool.run(rows_of_a_table, 2)[1]
    assert type(row) is torch.Tensor
    assert not row.requires_grad
    assert row.untyped_storage().nbytes() == 4000
    assert torch.equal(row, torch.arange(1000.0, 2000.0))
    assert type(corner) is torch.Tensor
    assert corner.tolist() == [[0.0], [1.0]]


def test_workers_are_used_again_and_the_pool_grows_on_demand(pool):
    few = {r[3] for r in pool.run(describe, 2, "")}
    more = {r[3] for r in pool.run(describe, 4, "")}
    assert few < more
    assert {r[3] for r in pool.run(describe, 4, "")} == more


def test_nothing_leaks_into_the_next_call(pool):
    fresh = pool.run(look_for_things, 2)
    pool.run(leave_things_behind, 2)
    for before, after in zip(fresh, pool.run(look_for_things, 2), strict=True):
        assert after[:4] == (False, False, None, torch.float32)
        assert torch.equal(before[4], after[4])


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exception_is_raised_with_the_traceback_of_its_rank(pool, culprit):
    before = time.monotonic()
    with pytest.raises(ValueError, match=f"^rank {culprit} does not like it") as caught:
        pool.run(raise_on, 2, culprit)
    assert time.monotonic() - before < 20
    note = "\n".join(caught.value.__notes__)
    assert f"raise_on on rank {culprit} of 2" in note
    assert "in raise_on" in note
    assert f"rank {1 - culprit} " in note


def test_the_first_cause_is_reported_not_what_followed(pool):
    with pytest.raises(KeyError, match="the first cause") as caught:
        pool.run(fail_in_order, 2)
    assert "LookupError: a consequence" in "\n".join(caught.value.__notes__)


def test_an_exception_that_cannot_travel_is_reported_as_text(pool):
    with pytest.raises(RankFailed) as caught:
        pool.run(raise_unpicklable, 1)
    assert "Stubborn: cannot" in "\n".join(caught.value.__notes__)


def test_sys_exit_in_a_rank_is_a_failure(pool):
    with pytest.raises(RankFailed) as caught:
        pool.run(exit_quietly, 1)
    assert "SystemExit: 0" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize(("how", "ending"), [("exit", "ended with exit status 7"), ("kill", "was killed by SIGKILL")])
def test_a_worker_that_dies_fails_the_call_promptly_and_is_replaced(pool, how, ending):
    victim = {r[0]: r[3] for r in pool.run(describe, 2, "")}[1]
    before = time.monotonic()
    with pytest.raises(RankDied, match=f"rank 1 of 2: the process {ending}"):
        pool.run(die_on, 2, 1, how)
    assert time.monotonic() - before < 20
    after = pool.run(describe, 2, "")
    assert victim not in {r[3] for r in after}


def test_a_worker_that_died_between_calls_is_replaced(pool):
    victim = pool.run(describe, 1, "")[0][3]
    os.kill(victim, signal.SIGKILL)
    assert connection.wait([pool._workers[0].process.sentinel], timeout=10.0)
    assert pool.run(describe, 1, "")[0][3] != victim


def test_the_deadline_names_the_stuck_ranks_with_their_stacks(pool):
    pids = [r[3] for r in pool.run(describe, 3, "")]
    with pytest.raises(RankStuck, match=r"no answer from rank 1 within 1 s") as caught:
        pool.run(wait_for_nothing, 3, 1, deadline=1.0)
    assert "in wait_for_nothing" in str(caught.value)
    after = [r[3] for r in pool.run(describe, 3, "")]
    assert pids[1] not in after
    assert {pids[0], pids[2]} <= set(after)


def test_the_deadline_reaches_ranks_that_wait_inside_the_library(pool):
    with pytest.raises(RankStuck) as caught:
        pool.run(wait_in_cpp, 2, deadline=2.0)
    assert str(caught.value).count("in wait_in_cpp") == 2


def test_a_stopped_process_is_killed_at_the_deadline(pool):
    with pytest.raises(RankStuck, match="does not react to signals"):
        pool.run(stop_reacting, 1, deadline=1.0)
    assert pool.run(describe, 1, "")[0][0] == 0


def test_more_ranks_than_the_pool_has_are_refused(pool):
    with pytest.raises(ValueError, match="1 to 8 ranks"):
        pool.run(describe, 9, "")


def test_a_closed_pool_leaves_no_process():
    own = Pool(limit=2)
    own.run(describe, 2, "")
    pids = own.pids
    own.close()
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


KILLED = """
import os, signal, sys
from tests.pool import Pool
from tests.test_pool import describe

if __name__ == "__main__":
    pool = Pool()
    pool.run(describe, 2, "")
    print(*pool.pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_when_the_test_process_is_killed(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    limit = time.monotonic() + 10
    alive = [int(pid) for pid in done.stdout.split()]
    assert len(alive) == 2
    while alive and time.monotonic() < limit:
        alive = [pid for pid in alive if Path(f"/proc/{pid}").exists()]
    assert alive == []
