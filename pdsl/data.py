"""Data sets that need no download: rows by index, each a dict of tensors.

A data set has `len(d)` and `d[i]`, one row as a dict of tensors without a batch dim; with `rows(indices)` it may also make a batch at once.
Importing this module does not import torch.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Digits", "PythonSource", "digits", "python_source"]

# pure Python, long in the standard library, present in every build of it; in this order the text is the same wherever the version is
_MODULES = (
    "argparse", "ast", "bdb", "calendar", "cmd", "code", "codecs", "collections/__init__", "configparser", "contextlib", "copy", "csv", "dataclasses",
    "datetime", "difflib", "dis", "doctest", "enum", "filecmp", "fileinput", "fnmatch", "fractions", "ftplib", "functools", "getopt", "gettext", "glob",
    "gzip", "hashlib", "heapq", "hmac", "inspect", "io", "ipaddress", "json/decoder", "json/encoder", "locale", "logging/__init__", "lzma", "mailbox", "mimetypes",
    "netrc", "numbers", "optparse", "os", "pdb", "pickle", "pickletools", "platform", "plistlib", "posixpath", "pprint", "profile", "pstats", "pyclbr",
    "queue", "quopri", "random", "reprlib", "sched", "selectors", "shelve", "shlex", "shutil", "smtplib", "socket", "socketserver", "ssl", "statistics",
    "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize", "trace", "traceback", "types", "typing", "uuid",
    "warnings", "wave", "weakref", "zipfile",
)  # fmt: skip


class PythonSource:
    """The bytes of `text` in rows of `context` tokens; the targets are the tokens one place later. Rows do not overlap."""

    def __init__(self, text: bytes, context: int) -> None:
        import torch

        self.context = context
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self.context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One row: `tokens` and `targets`, int64 (context,) each."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return {name: value[0] for name, value in self.rows([index % len(self)]).items()}

    def rows(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """A batch: `tokens` and `targets`, int64 (len(indices), context) each."""
        import torch

        starts = torch.as_tensor(indices, dtype=torch.int64)[:, None] * self.context
        text = self._bytes[starts + torch.arange(self.context + 1)].long()
        return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def python_source(context: int = 64, vocabulary: str = "bytes", limit: int = 1_000_000) -> PythonSource:
    """The source text of Python's own standard library, for a model of the next byte: 256 tokens, nothing to download.

    `limit` is the most bytes that are taken. Raises FileNotFoundError where the sources are not installed and ValueError on wrong arguments.
    """
    if vocabulary != "bytes":
        raise ValueError(f'vocabulary is "{vocabulary}": python_source has "bytes", 256 tokens')
    if context < 1:
        raise ValueError(f"context is {context}: a row has at least one token")
    text = _library_text(Path(sysconfig.get_path("stdlib")), limit)
    if len(text) <= context:
        raise ValueError(f"{len(text)} bytes make no row of {context} tokens: raise limit or lower context")
    return PythonSource(text, context)


def _library_text(folder: Path, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    for module in _MODULES:
        path = folder / f"{module}.py"
        if path.is_file():
            parts.append(path.read_bytes())
            size += len(parts[-1])
        if size >= limit:
            break
    if not parts:
        raise FileNotFoundError(
            f"the sources of the standard library are not in {folder}: this Python came without them (a zipped or stripped build); use another data set or another Python"
        )
    return b"".join(parts)[:limit]


class Digits:
    """Images with their labels."""

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self._pixels, self._labels = pixels, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One row: `pixels`, float32 (1, image, image) from -1 to 1, and `labels`, an int64 scalar."""
        return {"pixels": self._pixels[index], "labels": self._labels[index]}

    def rows(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """A batch: the rows stacked."""
        import torch

        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return {"pixels": self._pixels[chosen], "labels": self._labels[chosen]}


def digits(split: str = "train", image: int = 8) -> Digits:
    """Handwritten digits of 8 x 8 pixels that come with scikit-learn: 1,500 for `train`, 297 for `test`. Other sizes of `image` are interpolated.

    Raises ImportError without scikit-learn and ValueError on wrong arguments.
    """
    if split not in {"train", "test"}:
        raise ValueError(f'split is "{split}": it is "train" or "test"')
    if image < 1:
        raise ValueError(f"image is {image}: an image has at least one pixel a side")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError('digits come with scikit-learn, which is not installed: pip install "pdsl[vision]"') from error
    import torch
    from torch.nn import functional as F

    found = load_digits()
    pixels = torch.from_numpy(found.images).float().div(8).sub(1)[:, None]
    labels = torch.from_numpy(found.target).long()
    if image != 8:
        pixels = F.interpolate(pixels, size=(image, image), mode="bilinear")
    part = slice(0, 1500) if split == "train" else slice(1500, None)
    return Digits(pixels[part], labels[part])
