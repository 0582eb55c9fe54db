"""Which samples a step takes, in which order, and which of them a rank reads.

The order is a function of (seed, epoch, position) alone: neither the number of ranks nor the plan enters, so a change of plan repeats and skips
nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import torch

from pdsl.grammar.errors import RunError
from pdsl.lowering.plan import Plan
from pdsl.lowering.probe_rows import read_rows

__all__ = ["Batch", "Samples", "rank_rows", "read_rows", "row_hash", "split_batch", "step_indices", "steps_per_epoch"]

Batch = Mapping[str, torch.Tensor]


class Samples(Protocol):
    """Where the rows of a step come from, on any rank and as often as asked."""

    def ids(self, step: int, places: Sequence[int]) -> Sequence[int]:
        """Sample ids at places of the global batch of a step."""
        ...

    def rows(self, ids: Sequence[int]) -> Batch:
        """The rows of samples."""
        ...


def steps_per_epoch(size: int, batch: int) -> int:
    """Whole batches in one pass over the data; what is left over is dropped. Raises RunError if there is not even one."""
    if size < batch:
        raise RunError(f"the data has {size} samples, fewer than one batch of {batch}")
    return size // batch


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63))
    return tuple(torch.randperm(size, generator=generator).tolist())


def step_indices(seed: int, step: int, size: int, batch: int) -> tuple[int, ...]:
    """Sample indices of a 0-based step, in the order in which one process would take them."""
    per_epoch = steps_per_epoch(size, batch)
    epoch, index = divmod(step, per_epoch)
    return _permutation(seed, epoch, size)[index * batch : (index + 1) * batch]


def rank_rows(plan: Plan, rank: int) -> dict[int, range]:
    """For each microbatch of the rank's pipeline (by global id) the places in the global batch that the rank's shard coordinate takes."""
    at = plan.coordinate(rank)
    rows, part = plan.rows_per_microbatch, plan.rows_per_rank
    starts = {m: m * rows + at.shard * part for m in plan.pipelines[at.pipeline].microbatches}
    return {m: range(a, a + part) for m, a in starts.items()}


def split_batch(batch: Batch, places: range) -> dict[str, torch.Tensor]:
    """The rows of a global batch that lie in `places`."""
    return {name: tensor[places.start : places.stop] for name, tensor in batch.items()}


def row_hash(index: int) -> int:
    """A 63-bit hash of a sample id; the digest of a step is the sum over its samples, whatever their order."""
    return int.from_bytes(hashlib.blake2b(index.to_bytes(8, "little", signed=True), digest_size=8).digest(), "little") >> 1
