"""Being one rank of many that torchrun started: who this process is, where it meets the others, and which rank speaks when the run fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from attrs import frozen

from pdsl.grammar.errors import PeerError, RankError, RunError
from pdsl.lowering.plan import Plan
from pdsl.runtime.faults import outcome_of, reason_of

__all__ = ["Membership", "join", "membership", "one_voice"]

_GRACE = 2.0  # seconds in which the rank that failed by itself must have told so, after a follower did


@frozen
class Membership:
    """This process as one rank of many, as torchrun's environment says."""

    rank: int
    local_rank: int
    world_size: int


def membership() -> Membership | None:
    """What torchrun set, or None outside it. Raises RunError if the variables make no sense."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return Membership(rank, int(os.environ.get("LOCAL_RANK", rank)), world)
    except ValueError as error:
        raise RunError(f"RANK, LOCAL_RANK and WORLD_SIZE must be integers: {error}") from None


def join(plan: Plan, member: Membership) -> Any:
    """The store through which the ranks of a torchrun job meet. Raises RunError if the job has another size than the plan, or does not meet."""
    import torch.distributed as dist

    if member.world_size != plan.world_size:
        raise RunError(f"torchrun started {member.world_size} processes, the plan needs {plan.world_size}")
    try:
        store, _, _ = next(dist.rendezvous("env://", member.rank, member.world_size, timeout=timedelta(seconds=plan.silence)))
    except (ValueError, dist.DistError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RunError(f"rank {member.rank} does not meet the others at {where}, as torchrun says: {str(error).splitlines()[0]}") from error
    return dist.PrefixStore("pdsl", store)


@contextmanager
def one_voice(store: Any, rank: int) -> Iterator[None]:
    """Around the work of one rank under torchrun: the first rank that fails for a reason of its own says so.

    Raises RankError in that rank, and PeerError in those that follow it. If none knows a reason, as when a process was killed, the first that
    noticed speaks.
    """
    try:
        yield
    except Exception as error:
        outcome = outcome_of(error)
        first = _first_failure(store, rank, follows=outcome["follows"])
        if first != rank:
            raise PeerError(f"rank {first} failed first and says why") from error
        raise RankError(rank, reason_of(outcome), outcome["traceback"]) from error


def _first_failure(store: Any, rank: int, *, follows: bool) -> int:
    """The rank that speaks: the first that said so in the store. A follower waits a moment for the one it follows."""
    import torch.distributed as dist

    with suppress(dist.DistError):  # the store goes when torchrun ends the job; then this rank has only itself
        if follows:
            with suppress(dist.DistStoreError):
                store.wait(["failure"], timedelta(seconds=_GRACE))
        return int(store.compare_set("failure", "", str(rank)).decode())
    return rank
