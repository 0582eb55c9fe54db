"""Checkpoints on disk, as owners with holdings: a transition takes what no rank has from here, under whatever plan.

A checkpoint is a folder `step-00000120`. Each rank of the plan writes `rank-00003.pt`, its share of the boxes (of copies one rank writes), and
`rank-00003.json`, which says what is in it, with a digest for each box. When all have, one rank writes `metadata.json`: before that file is
there, and whole, there is no checkpoint.

torch's distributed checkpoints are not underneath. Their table of boxes is a pickle, and nothing is unpickled from disk here; they carry no
checksums; and a save is a collective over torch's WORLD, which is one island: a lost rank would hold up all others. The files are written by
`torch.save`, and `torch.load(..., weights_only=True)` reads them without any of this.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen

from pdsl.grammar.errors import RunError
from pdsl.lowering.boxes import Box, box_shape
from pdsl.lowering.cells import box_text, intersect, subtract, volume
from pdsl.lowering.holdings import STORAGE, Holding, LogicalTensor
from pdsl.runtime.digest import digest

__all__ = [
    "FORMAT",
    "MARKER",
    "Checkpoint",
    "CheckpointDamaged",
    "StoredBox",
    "folder_of",
    "keep",
    "latest",
    "sealed",
    "stored_box",
    "sync_folder",
    "unsealed",
    "write_text",
]

FORMAT = 1
MARKER = "metadata.json"
_FOLDER = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"rank-\d{5,}\.pt")


class CheckpointDamaged(RunError):
    """A file of a checkpoint is not what was written; the message names the file, the tensor and what disagrees."""


@frozen
class StoredBox:
    """One box of one tensor in one file. `digest` is its part of the tensor's digest."""

    tensor: str
    box: Box
    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    group: str
    file: str
    digest: int


def folder_of(directory: str | Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return Path(directory) / f"step-{step:08d}"


def sealed(content: Mapping[str, Any]) -> str:
    """JSON text of an object with a SHA-256 of the rest of it, so that a torn or edited file is noticed."""
    body = json.dumps(content, sort_keys=True)
    return json.dumps({"content": json.loads(body), "sha256": hashlib.sha256(body.encode()).hexdigest()}, sort_keys=True)


def unsealed(path: Path) -> dict[str, Any] | None:
    """What `sealed` text in a file says; None if there is no such file, or it is not what was written."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        content = whole["content"]
        body = json.dumps(content, sort_keys=True)
        if whole["sha256"] != hashlib.sha256(body.encode()).hexdigest() or not isinstance(content, dict) or content.get("format") != FORMAT:
            return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return content


def write_text(path: Path, text: str) -> None:
    """Write a file that is either the old one or the new one, whatever happens, and on disk when this returns."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Names of files are on disk when this returns, where the system has that."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        return
    finally:
        os.close(handle)


@frozen(slots=False, eq=False)
class Checkpoint:
    """A committed checkpoint: after `step` committed steps, under the plan with hash `plan`. `metadata` is what the run said to `commit`."""

    folder: Path
    step: int
    plan: str
    metadata: Mapping[str, Any]
    boxes: tuple[StoredBox, ...]
    sizes: Mapping[str, int]
    _verified: set[tuple[str, Box]] = field(factory=set, init=False, repr=False)
    _open: dict[str, Mapping[str, torch.Tensor]] = field(factory=dict, init=False, repr=False)

    @cached_property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        """Every tensor that is there."""
        found = {b.tensor: LogicalTensor(b.tensor, b.shape, b.item_bytes, b.group) for b in self.boxes}
        return tuple(found.values())

    @cached_property
    def kinds(self) -> dict[str, tuple[str, ...]]:
        """For each parameter the kinds of its state that are there; a state that is not was not there when it was saved."""
        found: dict[str, list[str]] = {}
        for tensor in self._by_tensor:
            kind, _, name = tensor.partition("/")
            if kind != "buffer":
                found.setdefault(name, []).append(kind)
        return {name: tuple(kinds) for name, kinds in found.items()}

    @property
    def digests(self) -> dict[str, int]:
        """The digest of every tensor as a whole."""
        return {name: sum(b.digest for b in boxes) & ((1 << 64) - 1) for name, boxes in self._by_tensor.items()}

    def holdings(self, owner: int = STORAGE) -> tuple[Holding, ...]:
        """The rows of this storage, for a transition."""
        return tuple(Holding(owner, b.tensor, b.box, self.step) for b in self.boxes)

    def read(self, tensor: str, box: Box) -> torch.Tensor:
        """A box of a tensor, on the CPU. What is read for the first time is compared with its digest.

        Raises CheckpointDamaged if it is another than was written or a file is gone, KeyError for a tensor that is not there, ValueError for a box
        that is not in it.
        """
        stored = self._by_tensor[tensor]
        if any(b > n for (_, b), n in zip(box, stored[0].shape, strict=True)) or subtract(box, [s.box for s in stored]):
            raise ValueError(f"{tensor} {box_text(box)} is not in the checkpoint of step {self.step}")
        found = torch.empty(box_shape(box), dtype=getattr(torch, stored[0].dtype))
        for part in stored:
            shared = intersect(box, part.box)
            if shared is not None:
                found[_slices(shared, box)] = self._values(part)[_slices(shared, part.box)]
        return found

    def damages(self) -> tuple[str, ...]:
        """Read and compare everything: what is wrong, or nothing."""
        found = []
        for part in self.boxes:
            try:
                self._values(part)
            except CheckpointDamaged as error:
                found.append(str(error))
        return tuple(found)

    @cached_property
    def _by_tensor(self) -> dict[str, list[StoredBox]]:
        found: dict[str, list[StoredBox]] = {}
        for b in self.boxes:
            found.setdefault(b.tensor, []).append(b)
        return found

    def _values(self, part: StoredBox) -> torch.Tensor:
        where = f"{self.folder.name}/{part.file}"
        if part.file not in self._open:
            try:
                loaded = torch.load(self.folder / part.file, map_location="cpu", weights_only=True, mmap=True)
            except Exception as error:  # whatever torch makes of a damaged file
                raise CheckpointDamaged(
                    f"{where} cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
                ) from error
            self._open[part.file] = loaded if isinstance(loaded, dict) else {}
        values = self._open[part.file].get(part.tensor)
        if not isinstance(values, torch.Tensor) or tuple(values.shape) != box_shape(part.box) or values.dtype != getattr(torch, part.dtype):
            raise CheckpointDamaged(f"{where} does not hold {part.tensor} {box_text(part.box)} as {part.dtype}")
        key = (part.tensor, part.box)
        if key not in self._verified:
            if digest(values, part.box, part.shape) != part.digest:
                raise CheckpointDamaged(f"{where}: {part.tensor} {box_text(part.box)} is not what was written, its digest differs")
            self._verified.add(key)
        return values


def _slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))


def latest(directory: str | Path, *, before: int | None = None, verify: bool = False) -> Checkpoint | None:
    """The newest committed checkpoint, of a step below `before` if given; None if there is none.

    Folders without the marker, with a damaged one, or with files that are missing or have other sizes than were written are passed over. Bytes
    are looked at only with `verify`; else when they are read.
    """
    for step, folder in sorted(_folders(directory), reverse=True):
        if before is not None and step >= before:
            continue
        found = _opened(folder, step)
        if found is not None and not (verify and found.damages()):
            return found
    return None


def keep(directory: str | Path, count: int) -> tuple[int, ...]:
    """Delete all but the newest `count` committed checkpoints, and what was never committed and is older than the newest of them.

    Returns the steps whose folders were deleted. What cannot be deleted stays, without an error. The marker goes first, so that one that is
    half deleted is none.
    """
    if count < 1:
        raise ValueError(f"{count} checkpoints are to be kept: at least one is")
    folders = sorted(_folders(directory), reverse=True)
    whole = [step for step, folder in folders if _opened(folder, step) is not None]
    kept = whole[:count]
    gone = []
    for step, folder in folders:
        if not kept or step in kept or step > kept[0]:
            continue
        try:
            (folder / MARKER).unlink(missing_ok=True)
            shutil.rmtree(folder)
        except OSError:
            continue
        gone.append(step)
    return tuple(sorted(gone))


def _folders(directory: str | Path) -> Iterator[tuple[int, Path]]:
    try:
        entries = sorted(Path(directory).iterdir())
    except OSError:
        return
    for path in entries:
        match = _FOLDER.fullmatch(path.name)
        if match is not None and path.is_dir():
            yield int(match[1]), path


def _opened(folder: Path, step: int) -> Checkpoint | None:
    content = unsealed(folder / MARKER)
    if content is None:
        return None
    try:
        boxes = tuple(stored_box(entry) for entry in content["boxes"])
        found = Checkpoint(folder, content["step"], content["plan"], content["metadata"], boxes, content["sizes"])
        whole = found.step == step and all(
            _FILE.fullmatch(name) and (folder / name).stat().st_size == size for name, size in found.sizes.items()
        )
        named = all(b.file in found.sizes for b in boxes)
    except (KeyError, TypeError, ValueError, AttributeError, OSError):
        return None
    return found if whole and named else None


def stored_box(entry: Mapping[str, Any]) -> StoredBox:
    """A box as JSON has it. Raises KeyError, TypeError or ValueError if it is none."""
    box = tuple((int(a), int(b)) for a, b in entry["box"])
    shape = tuple(int(n) for n in entry["shape"])
    if len(box) != len(shape) or any(not 0 <= a < b <= n for (a, b), n in zip(box, shape, strict=True)) or not volume(box):
        raise ValueError(f"{entry['tensor']}: {box} is no box of {shape}")
    if not isinstance(getattr(torch, entry["dtype"]), torch.dtype):
        raise TypeError(f"{entry['tensor']}: {entry['dtype']} is no dtype")
    return StoredBox(
        str(entry["tensor"]),
        box,
        shape,
        entry["dtype"],
        int(entry["item_bytes"]),
        str(entry["group"]),
        str(entry["file"]),
        int(entry["digest"]),
    )
