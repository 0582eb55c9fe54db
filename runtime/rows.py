"""Which samples a step takes, in which order, and which of them a rank reads.

The order is a function of (seed, epoch, position) alone: neither the number of ranks nor the plan enters, so a change of plan repeats and skips
nothing.

A batch that is not full is dealt like a full one: places that have no sample are cut off. A microbatch with some of its rows runs with as many
as there are, one without any runs with rows that stand in for them and weigh nothing, since the ranks of an island gather and reduce together.
So nothing has to be taken out of a loss again, whoever computes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import torch
from attrs import frozen

from pdsl.grammar.errors import RunError
from pdsl.lowering.plan import Plan
from pdsl.lowering.probe_rows import read_rows

__all__ = [
    "Batch",
    "Samples",
    "Share",
    "StepRows",
    "rank_rows",
    "read_rows",
    "real_places",
    "row_hash",
    "shares",
    "split_batch",
    "step_indices",
    "steps_per_epoch",
]

Batch = Mapping[str, torch.Tensor]


@frozen(eq=False)
class Share:
    """What a rank reads of one microbatch: `size` rows. They all count, or all stand in for rows that there are not. `tokens` are the targets that count,
    where the loss is a mean over them.
    """

    batch: Batch
    size: int
    counts: bool = True
    tokens: int = 0


@frozen(eq=False)
class StepRows:
    """What a rank reads for one step, by microbatch. `samples` are those of the whole step, over all ranks."""

    shares: Mapping[int, Share]
    samples: int


class Samples(Protocol):
    """Where the rows of steps come from, on any rank and as often as asked. Steps are 0-based, places are those of the global batch."""

    def count(self, step: int) -> int:
        """Samples of a step, the same on every rank: a batch, fewer in one that is not full, none if the data ended before."""
        ...

    def consumed(self, steps: int) -> int:
        """Samples of the first so many steps together."""
        ...

    def ids(self, step: int, places: Mapping[int, range]) -> dict[int, Sequence[int]]:
        """Ids of the samples at the places of each microbatch."""
        ...

    def take(self, step: int, places: Mapping[int, range]) -> StepRows:
        """The rows at the places of each microbatch."""
        ...


def real_places(places: range, samples: int) -> range:
    """The places that have a sample if only the first `samples` of the batch do."""
    return range(min(places.start, samples), min(places.stop, samples))


def shares(places: Mapping[int, range], samples: int, read: Callable[[Sequence[int]], Batch]) -> StepRows:
    """The rows of a step that has `samples` of them. `read` gives those at places; the last stands in where a microbatch has none."""
    found = {}
    for microbatch, part in places.items():
        real = real_places(part, samples)
        chosen: Sequence[int] = real or [samples - 1] * len(part)
        found[microbatch] = Share(read(chosen), len(chosen), counts=bool(real))
    return StepRows(found, samples)


def steps_per_epoch(size: int, batch: int, *, pad: bool = False) -> int:
    """Batches in one pass over the data; what is left over is dropped, or with `pad` makes one more. Raises RunError if there is not even one."""
    if size == 0:
        raise RunError("the data has no samples")
    if pad:
        return -(-size // batch)
    if size < batch:
        raise RunError(f"the data has {size} samples, fewer than one batch of {batch}; train {{ last = pad }} takes them all")
    return size // batch


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63))
    return tuple(torch.randperm(size, generator=generator).tolist())


def step_indices(seed: int, step: int, size: int, batch: int, *, pad: bool = False) -> tuple[int, ...]:
    """Sample indices of a 0-based step, in the order in which one process would take them. With `pad` the last of an epoch may be fewer."""
    per_epoch = steps_per_epoch(size, batch, pad=pad)
    epoch, index = divmod(step, per_epoch)
    return _permutation(seed, epoch, size)[index * batch : (index + 1) * batch]


def rank_rows(plan: Plan, rank: int) -> dict[int, range]:
    """For each microbatch of the rank's pipeline (by global id) the places in the global batch that the rank's shard coordinate takes."""
    at = plan.coordinate(rank)
    rows, part = plan.rows_per_microbatch, plan.rows_per_rank
    starts = {m: m * rows + at.shard * part for m in plan.pipelines[at.pipeline].microbatches}
    return {m: range(a, a + part) for m, a in starts.items()}


def split_batch(batch: Batch, places: Sequence[int], shared: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """The rows of a global batch that lie in `places`; entries that are shared as they are."""
    at = slice(places.start, places.stop) if isinstance(places, range) and places.step == 1 else list(places)
    return {name: tensor if name in shared else tensor[at] for name, tensor in batch.items()}


def row_hash(index: int) -> int:
    """A 63-bit hash of a sample id; the digest of a step is the sum over its samples, whatever their order."""
    return int.from_bytes(hashlib.blake2b(index.to_bytes(8, "little", signed=True), digest_size=8).digest(), "little") >> 1
