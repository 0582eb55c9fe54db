"""Checkpoints as one rank sees them: when to save, when a checkpoint is whole, and which one to go back to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from pdsl.grammar.errors import RunError
from pdsl.lowering.plan import Plan, Saving
from pdsl.runtime.checkpoint import Checkpoint, keep, latest
from pdsl.runtime.groups import CrossGroup
from pdsl.runtime.saving import Save, commit, save

__all__ = ["Keeper"]


class Keeper:
    """`saving` is None if the spec asks for no checkpoints; then nothing is saved and nothing found. `consumed` tells the samples of so many steps."""

    def __init__(self, saving: Saving | None, rank: int, on_event: Callable[..., None], consumed: Callable[[int], int]) -> None:
        self._saving, self._rank, self._on_event, self._consumed = saving, rank, on_event, consumed
        self._under_way: Save | None = None
        self._started = 0
        self._marked = 0
        self._marking: Thread | None = None
        self._owed = False

    @property
    def saved(self) -> int:
        """The newest step of which this rank's share is on disk, or of which it will never be: nobody waits for a failed save."""
        handle = self._under_way
        if handle is None or not handle.done:
            return 0
        return 0 if handle.error else handle.step

    def after(self, steps: int, plan: Plan, state: Callable[[], Mapping[str, torch.Tensor]], *, now: bool = False) -> None:
        """Save if it is time, or at once. A save that is still under way is not doubled: then the next time is waited for.

        What was wanted at once and could not be begun is begun after the next step: a save of this step may be under way with a rank that is lost,
        and will never be whole. It is not begun again, for a node that was only silent may yet write its old share of it.
        """
        self._owed |= now
        due = self._saving is not None and steps > 0 and steps != self._started and (self._owed or steps % self._saving.every == 0)
        if not due or self._saving is None or (self._under_way is not None and not self._under_way.done):
            return
        if self._under_way is not None and self._under_way.error:
            self._on_event("unsaved", reason=self._under_way.error)
        self._started, self._owed = steps, False
        self._under_way = save(self._saving.path, steps, plan, self._rank, state(), asynchronous=self._saving.asynchronous)

    def agreed(self, saved: int, plan: Plan) -> None:
        """All ranks have their shares of step `saved` on disk: one of them makes a checkpoint of it."""
        if self._saving is None or saved <= self._marked:
            return
        self._marked = saved
        if self._rank != plan.ranks[0]:
            return
        self._marking = Thread(
            target=self._mark,
            args=(self._saving, saved, {"seed": plan.job.seed, "batch": plan.job.batch, "samples": self._consumed(saved)}),
            daemon=True,
        )
        self._marking.start()

    def _mark(self, saving: Saving, step: int, metadata: Mapping[str, Any]) -> None:
        reason = commit(saving.path, step, metadata)
        if reason:
            self._on_event("unsaved", reason=reason)
            return
        keep(saving.path, saving.keep)
        self._on_event("saved", saved=step)

    def finish(self, group: CrossGroup | None, plan: Plan) -> None:
        """After the last step: wait for what is under way, here and on the other ranks of the group."""
        if self._saving is None:
            return
        self._wait(plan.silence)
        mine = torch.tensor([self.saved])
        everyone = [mine] if group is None else group.gather(mine.to(group.device))
        self.agreed(min(int(s) for s in everyone), plan)
        self._wait(plan.silence)

    def _wait(self, seconds: float) -> None:
        if self._under_way is not None:
            self._under_way.wait(seconds)
        if self._marking is not None:
            self._marking.join(seconds)

    def find(self, store: dist.Store, *, tells: bool) -> Checkpoint | None:
        """The newest whole checkpoint, the same on all ranks: the one that `tells` looks, the others take its step.

        Raises RunError if as many steps of this run take another number of samples: it would repeat some, or skip some.
        """
        if self._saving is None:
            return None
        if tells:
            found = latest(self._saving.path, verify=True)
            store.set("checkpoint", str(found.step if found is not None else -1))
        step = int(store.get("checkpoint"))
        self._marked = self._started = max(step, 0)
        self._under_way = None
        found = latest(self._saving.path, before=step + 1) if step >= 0 else None
        if found is not None and found.metadata.get("samples", self._consumed(found.step)) != self._consumed(found.step):
            raise RunError(
                f"the checkpoint of step {found.step} was written after {found.metadata['samples']} samples, and {found.step} steps of this run take "
                f"{self._consumed(found.step)}: samples would be repeated or skipped; batch, last and data must be those of the run that wrote it"
            )
        return found
