"""Saving checkpoints: each rank its share, in the background, and one rank the marker that makes a checkpoint of the shares.

Of copies of a box one rank writes, chosen from the plan alone, so that no rank has to ask another. A save that fails is told and forgotten: the
run goes on, and the checkpoint before it stays the newest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from attrs import asdict

from pdsl.lowering.boxes import Box
from pdsl.lowering.cells import box_text, subtract, volume
from pdsl.lowering.holdings import SCALARS, Need, demand
from pdsl.lowering.plan import Plan
from pdsl.runtime.checkpoint import FORMAT, MARKER, StoredBox, folder_of, sealed, stored_box, sync_folder, unsealed, write_text
from pdsl.runtime.digest import digest

__all__ = ["Save", "commit", "save", "share_of"]


class Save:
    """One rank's share on its way to disk. `error` is empty, or says why it did not get there, once `done`."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.error = ""
        self.bytes = 0
        self._thread: Thread | None = None

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is done, at most so long. Returns whether the share is on disk."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self.done and not self.error


def share_of(plan: Plan, rank: int) -> tuple[Need, ...]:
    """The boxes of weights that a rank writes; the state of the optimizer goes with them.

    Of the ranks that hold a box the one writes it that has least to write so far, the largest boxes first.
    """
    return _shares(plan).get(rank, ())


@lru_cache(maxsize=4)
def _shares(plan: Plan) -> dict[int, tuple[Need, ...]]:
    holders: dict[tuple[str, Box], list[int]] = {}
    for need in demand(plan, ("weight",)):
        holders.setdefault((need.tensor, need.box), []).append(need.owner)
    load: dict[int, int] = {}
    shares: dict[int, list[Need]] = {}
    for (tensor, where), ranks in sorted(holders.items(), key=lambda h: (-volume(h[0][1]), h[0])):
        writer = min(ranks, key=lambda r: (load.get(r, 0), r))
        load[writer] = load.get(writer, 0) + volume(where)
        shares.setdefault(writer, []).append(Need(writer, tensor, where))
    return {rank: tuple(rows) for rank, rows in shares.items()}


def save(directory: str | Path, step: int, plan: Plan, rank: int, state: Mapping[str, torch.Tensor], *, asynchronous: bool = True) -> Save:
    """Write a rank's share of the state after `step` committed steps. Returns at once if asynchronous, with the state copied.

    `state` holds the local boxes by tensor name (`weight/<parameter>`, `exp_avg/<parameter>`, `buffer/<name>`), more than the share if need be.
    Buffers are written by every rank that has them, and the lowest rank's is kept. A checkpoint of the same step that is there already is replaced, unless this rank's share of
    it is the same to the bit. Never raises for what goes wrong with files: see `Save.error`.
    """
    handle = Save(step)
    try:
        chosen = _chosen(plan, rank, state)
        copied = {b.tensor: state[b.tensor].detach().to("cpu", copy=True).contiguous() for b in chosen}
    except (RuntimeError, ValueError) as error:
        handle.error = f"the state of rank {rank} cannot be copied: {error}"
        return handle
    handle.bytes = sum(t.numel() * t.element_size() for t in copied.values())

    def write() -> None:
        try:
            _write(folder_of(directory, step), step, plan, rank, chosen, copied)
        except Exception as error:  # noqa: BLE001 - a full disk, a folder that is gone, whatever torch says of either: no reason to end a run
            handle.error = f"rank {rank} could not save step {step}: {type(error).__name__}: {error}"

    if not asynchronous:
        write()
        return handle
    handle._thread = Thread(target=write, name=f"pdsl-save-{step}", daemon=True)
    handle._thread.start()
    return handle


def _chosen(plan: Plan, rank: int, state: Mapping[str, torch.Tensor]) -> tuple[StoredBox, ...]:
    """What a rank writes, without digests. Raises ValueError if a tensor has other sizes than its box."""
    boxes = {need.tensor.partition("/")[2]: need.box for need in share_of(plan, rank)}
    parameters = {p.name: p for p in plan.facts.parameters}
    file = f"rank-{rank:05d}.pt"
    absent = sorted(name for name in boxes if f"weight/{name}" not in state)
    if absent:
        raise ValueError(f"it lacks weight/{absent[0]}, which this rank is to write")
    found = []
    for name in sorted(state):
        kind, _, of = name.partition("/")
        values = state[name]
        if kind == "buffer":
            where, shape = tuple((0, n) for n in values.shape), tuple(values.shape)
        elif of in boxes:
            where, shape = ((), ()) if kind in SCALARS else (boxes[of], parameters[of].shape)
        elif of in parameters:
            continue
        else:
            raise ValueError(f"{name} is no state of a parameter of the plan")
        if tuple(values.shape) != tuple(b - a for a, b in where):
            raise ValueError(f"{name} has sizes {tuple(values.shape)}, and its box is {box_text(where)}")
        if not volume(where):
            continue
        group = of if kind != "buffer" else name
        found.append(StoredBox(name, where, shape, str(values.dtype).removeprefix("torch."), values.element_size(), group, file, 0))
    return tuple(found)


def _write(folder: Path, step: int, plan: Plan, rank: int, chosen: Sequence[StoredBox], copied: Mapping[str, torch.Tensor]) -> None:
    boxes = [{**asdict(b), "digest": digest(copied[b.tensor], b.box, b.shape)} for b in chosen]
    path = folder / f"rank-{rank:05d}.pt"
    table = path.with_suffix(".json")
    content: dict[str, Any] = {"format": FORMAT, "step": step, "plan": plan.hash, "rank": rank, "ranks": list(plan.ranks), "boxes": boxes}
    before = unsealed(table)
    if (
        before is not None
        and {**before, "size": 0} == {**_plain(content), "size": 0}
        and path.is_file()
        and path.stat().st_size == before["size"]
    ):
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).unlink(missing_ok=True)
    table.unlink(missing_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with fresh.open("wb") as file:
            torch.save(dict(copied), file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    sync_folder(folder)
    write_text(table, sealed({**content, "size": path.stat().st_size}))


def _plain(content: Mapping[str, Any]) -> dict[str, Any]:
    """As it is after a way through JSON."""
    boxes = [{**b, "box": [list(e) for e in b["box"]], "shape": list(b["shape"])} for b in content["boxes"]]
    return {**content, "boxes": boxes}


def commit(directory: str | Path, step: int, metadata: Mapping[str, Any]) -> str:
    """Make a checkpoint of the shares, by one rank, after all ranks of the plan have said that theirs are on disk.

    `metadata` is kept with it: plain values that JSON has. Returns an empty text, or why there is no checkpoint: a share that is missing, from
    another plan, or shares that together are not the whole state. Raises nothing for what goes wrong with files.
    """
    folder = folder_of(directory, step)
    try:
        return _commit(folder, step, metadata)
    except (OSError, KeyError, TypeError, ValueError) as error:
        return f"step {step} could not be committed: {type(error).__name__}: {error}"


def _commit(folder: Path, step: int, metadata: Mapping[str, Any]) -> str:
    shares = [found for path in sorted(folder.glob("rank-*.json")) if (found := unsealed(path)) is not None]
    if not shares:
        return f"no rank has saved step {step}"
    newest = max(shares, key=lambda s: (sum(t["plan"] == s["plan"] for t in shares), s["plan"]))
    plan, ranks = newest["plan"], newest["ranks"]
    mine = {s["rank"]: s for s in shares if s["plan"] == plan and s["step"] == step}
    missing = [r for r in ranks if r not in mine]
    if missing:
        return f"step {step} is not whole: no share of rank {', '.join(map(str, missing))}"
    boxes: dict[tuple[str, Box], StoredBox] = {}
    for entry in (e for r in ranks for e in mine[r]["boxes"]):
        stored = stored_box(entry)
        first = boxes.setdefault((stored.tensor, stored.box), stored)
        if first.digest != stored.digest and not stored.tensor.startswith("buffer/"):  # of buffers the lowest rank's is kept
            return f"{first.file} and {stored.file} hold different values of {stored.tensor}"
    gap = _gap(list(boxes.values()))
    if gap:
        return f"step {step} is not whole: {gap}"
    sizes = {f"rank-{r:05d}.pt": mine[r]["size"] for r in ranks}
    content = {
        "format": FORMAT,
        "step": step,
        "plan": plan,
        "metadata": dict(metadata),
        "sizes": sizes,
        "boxes": [asdict(b) for b in boxes.values()],
    }
    write_text(folder / MARKER, sealed(content))
    return ""


def _gap(boxes: Sequence[StoredBox]) -> str:
    by_tensor: dict[str, list[StoredBox]] = {}
    for b in boxes:
        by_tensor.setdefault(b.tensor, []).append(b)
    for name, parts in by_tensor.items():
        if len({(p.shape, p.dtype) for p in parts}) > 1:
            return f"the shares disagree about shape or dtype of {name}"
        whole = tuple((0, n) for n in parts[0].shape)
        left = subtract(whole, [p.box for p in parts])
        if left:
            return f"no share holds {name} {box_text(left[0])}"
        if sum(volume(p.box) for p in parts) > volume(whole):
            return f"two shares hold a part of {name}"
    return ""
