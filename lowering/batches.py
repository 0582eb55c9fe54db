"""How a global batch is divided: into microbatches, over shards, over unequal pipelines. Everything in whole samples."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from math import isqrt

from pdsl.grammar.errors import PlanError
from pdsl.lowering.schedule import Number

__all__ = ["BatchError", "distribute", "divisors", "split_batch", "valid_microbatches"]


class BatchError(PlanError, ValueError):
    """A batch cannot be divided as asked; the message names the counts that would do."""


def divisors(n: int) -> tuple[int, ...]:
    """All positive divisors of n >= 1, ascending."""
    low = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return tuple(low + [n // d for d in reversed(low) if d * d != n])


def valid_microbatches(samples: int, shards: int = 1) -> tuple[int, ...]:
    """Counts of microbatches into which `samples` can be cut so that each of `shards` replicas or shards gets whole, equal microbatches.

    12 samples on 2 shards: 6 each, so 1, 2, 3 or 6. Empty if the shards do not divide the samples.
    """
    if samples < 1 or shards < 1 or samples % shards:
        return ()
    return divisors(samples // shards)


def split_batch(samples: int, microbatches: int, shards: int = 1) -> int:
    """Samples of one microbatch on one shard.

    Raises BatchError with the remainder and the counts that divide: 8 samples over 3 microbatches leave 2; 1, 2, 4, 8 would do.
    """
    for name, count in (("samples", samples), ("microbatches", microbatches), ("shards", shards)):
        if count < 1:
            raise BatchError(f"{name} must be at least 1, not {count}")
    if samples % shards:
        raise BatchError(
            f"a batch of {samples} does not divide over {shards} shards: {samples} % {shards} = {samples % shards}; "
            f"the nearest that do are {_nearest_multiples(samples, shards)}"
        )
    each = samples // shards
    if each % microbatches:
        share = f"{samples}" if shards == 1 else f"{each} ({samples} over {shards} shards)"
        raise BatchError(
            f"a batch of {share} does not divide into {microbatches} microbatches: {each} % {microbatches} = {each % microbatches}; "
            f"valid: {', '.join(map(str, divisors(each)))}"
        )
    return each // microbatches


def _nearest_multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return " and ".join(str(n) for n in (below, below + unit) if n > 0)


def distribute(microbatches: int, weights: Sequence[Number], fill: Sequence[Number] | None = None) -> tuple[int, ...]:
    """Share out microbatches over pipelines so that the slowest is as fast as possible: least max of weights[i] * count[i] + fill[i].

    `weights` are times per microbatch (of the slowest stage), `fill` times to fill and drain, 0 by default. Each pipeline gets at least one and
    the counts sum to `microbatches`. Giving each next one to the pipeline that would end first is optimal, because the ends only grow; on a tie
    the first pipeline gets it. Raises BatchError for fewer microbatches than pipelines.
    """
    count = len(weights)
    if not count:
        raise BatchError("there is no pipeline to take microbatches")
    if microbatches < count:
        raise BatchError(f"{count} pipelines need at least {count} microbatches, but there are {microbatches}")
    if min(weights) <= 0:
        raise BatchError(f"the time per microbatch must be positive: {tuple(weights)}")
    fills: Sequence[Number] = (0,) * count if fill is None else fill
    if len(fills) != count:
        raise BatchError(f"{len(fills)} fill times for {count} pipelines")
    shares = [1] * count
    ends = [(2 * weight + fills[i], i) for i, weight in enumerate(weights)]
    heapify(ends)
    for _ in range(microbatches - count):
        _, i = ends[0]
        shares[i] += 1
        heapreplace(ends, (weights[i] * (shares[i] + 1) + fills[i], i))
    return tuple(shares)
