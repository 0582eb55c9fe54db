"""Patterns over dotted names: `*` inside one segment, `**` any depth, `{a,b}` either, `[low..high]` a half-open range of indices.

`layers[0..2]` means the children of `layers` whose names are integers in the range: `layers.0` and `layers.1`. Matching walks the segments of
name and pattern together and remembers where it has been, so its time is bounded by their product, whatever the pattern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache

from attrs import field, frozen

from pdsl.grammar.source import Span

__all__ = ["Pattern", "PatternError", "parse_pattern"]

_MOST_ALTERNATIVES = 1000

_LONGEST = 1000
_RANGE = re.compile(r"\[([^\]\[.]*)(?:(\.\.)([^\]\[.]*))?\]")
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_*\-]")


class PatternError(ValueError):
    """A pattern is malformed. `offset` counts characters from the start of the pattern."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message, offset)
        self.message = message
        self.offset = offset

    def __str__(self) -> str:
        return self.message


@frozen
class _Indices:
    """A segment that is an integer in [low, high); None is open."""

    low: int | None
    high: int | None

    def matches(self, segment: str) -> bool:
        if not (segment.isascii() and segment.isdigit()) or len(segment) > 18 or (segment[0] == "0" and segment != "0"):
            return False
        at = int(segment)
        return (self.low is None or self.low <= at) and (self.high is None or at < self.high)


_Segment = str | _Indices
_ANY_DEPTH = "**"


@frozen
class Pattern:
    """A parsed pattern: its text, where it was written, and its alternatives as rows of segments."""

    text: str
    alternatives: tuple[tuple[_Segment, ...], ...]
    span: Span | None = field(default=None, eq=False)

    def matches(self, name: str) -> bool:
        """Whether the whole dotted name matches."""
        segments = tuple(name.split("."))
        return any(_reaches(row, segments)[-1] for row in self.alternatives)

    def covers_module(self, name: str) -> bool:
        """Whether the pattern matches the module or one of its ancestors: `layers[0..2]` covers `layers.0.attn`."""
        segments = tuple(name.split("."))
        return any(any(_reaches(row, segments)[1:]) for row in self.alternatives)

    def __str__(self) -> str:
        return self.text


@lru_cache(maxsize=4096)
def _reaches(row: tuple[_Segment, ...], segments: tuple[str, ...]) -> tuple[bool, ...]:
    """For each prefix of the name, of length 0 to all, whether the whole row matches it."""
    places = [True] + [False] * len(segments)
    for part in row:
        if part == _ANY_DEPTH:
            for i in range(len(segments)):
                places[i + 1] = places[i + 1] or places[i]
            continue
        places = [False] + [places[i] and _one(part, segment) for i, segment in enumerate(segments)]
    return tuple(places)


def _one(part: _Segment, segment: str) -> bool:
    return part.matches(segment) if isinstance(part, _Indices) else fnmatchcase(segment, part)


def parse_pattern(text: str, names: Mapping[str, int], span: Span | None = None) -> Pattern:
    """Read a pattern. `names` are the integers that may stand in index ranges. Raises PatternError."""
    if not text:
        raise PatternError("the pattern is empty", 0)
    if len(text) > _LONGEST:
        raise PatternError(f"the pattern is longer than {_LONGEST} characters", _LONGEST)
    rows = tuple(dict.fromkeys(_row(choice, names) for choice in _expand(text)))
    return Pattern(text, rows, span)


@frozen
class _Choice:
    """A pattern with one alternative taken at each pair of braces, and for each of its characters (and its end) the offset in the pattern."""

    text: str
    offsets: tuple[int, ...]

    def add(self, text: str, offset: int) -> _Choice:
        return _Choice(self.text + text, (*self.offsets[: len(self.text)], *range(offset, offset + len(text) + 1)))


def _expand(text: str) -> list[_Choice]:
    """Every choice of the braces; nesting is not part of the language."""
    found = [_Choice("", (0,))]
    at = 0
    while at < len(text):
        opened = text.find("{", at)
        stray = text.find("}", at)
        if stray >= 0 and (opened < 0 or stray < opened):
            raise PatternError("`}` without `{`", stray)
        if opened < 0:
            return [f.add(text[at:], at) for f in found]
        closed = text.find("}", opened)
        if closed < 0:
            raise PatternError("`{` is never closed", opened)
        choices = _alternatives(text, opened + 1, closed)
        if len(found) * len(choices) > _MOST_ALTERNATIVES:
            raise PatternError(f"the braces stand for more than {_MOST_ALTERNATIVES} patterns", opened)
        found = [f.add(text[at:opened], at).add(choice, offset) for f in found for choice, offset in choices]
        at = closed + 1
    return found


def _alternatives(text: str, start: int, stop: int) -> list[tuple[str, int]]:
    """What stands between the commas of a pair of braces, blanks removed, with its offset."""
    found = []
    for piece in text[start:stop].split(","):
        if "{" in piece:
            raise PatternError("braces cannot be nested", start + piece.index("{"))
        if not piece.strip():
            raise PatternError("an alternative between braces is empty", start)
        found.append((piece.strip(), start + len(piece) - len(piece.lstrip())))
        start += len(piece) + 1
    return found


def _row(choice: _Choice, names: Mapping[str, int]) -> tuple[_Segment, ...]:
    row: list[_Segment] = []
    start = 0
    for part in _split(choice.text):
        offsets = choice.offsets[start:]
        start += len(part) + 1
        head = part.partition("[")[0]
        if not part:
            raise PatternError("a segment is empty: two dots meet, or one stands at an end", offsets[0])
        bad = _FORBIDDEN.search(head)
        if bad is not None:
            raise PatternError(f"{bad[0]!r} cannot stand in a pattern", offsets[bad.start()])
        if "**" in head and head != _ANY_DEPTH:
            raise PatternError("`**` stands for whole segments; inside one write `*`", offsets[head.index("**")])
        if head:
            row.append(head)
        at = len(head)
        while at < len(part):
            match = _RANGE.match(part, at)
            if match is None:
                raise PatternError("expected an index range such as [0..4], [2..] or [3]", offsets[at])
            row.append(_indices(match, names, offsets))
            at = match.end()
    return tuple(row)


def _split(text: str) -> list[str]:
    """Segments between dots, leaving the dots inside brackets alone."""
    return re.split(r"\.(?![^\[\]]*\])", text)


def _indices(match: re.Match[str], names: Mapping[str, int], offsets: tuple[int, ...]) -> _Indices:
    low = _integer(match, 1, names, offsets)
    if not match[2]:
        if low is None:
            raise PatternError("an index range is empty: write [0..4], [2..], [..4] or [3]", offsets[match.start()])
        return _Indices(low, low + 1)
    high = _integer(match, 3, names, offsets)
    if low is not None and high is not None and low >= high:
        raise PatternError(f"the range {low}..{high} holds no index; its end does not belong to it", offsets[match.start()])
    return _Indices(low, high)


def _integer(match: re.Match[str], group: int, names: Mapping[str, int], offsets: tuple[int, ...]) -> int | None:
    """One end of a range; None where it is left open."""
    text = match[group].strip()
    if not text:
        return None
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return int(text)
    if text in names:
        return names[text]
    at = match.start(group) + match[group].index(text)
    raise PatternError(f"{text!r} is no integer and no name of one", offsets[at])
