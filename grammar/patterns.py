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

_RANGE = re.compile(r"\[\s*([^\]\[.]*?)\s*(?:(\.\.)\s*([^\]\[.]*?)\s*)?\]")
_ALLOWED = re.compile(r"[A-Za-z0-9_*\-]*")


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
        if not (segment.isascii() and segment.isdigit()) or len(segment) > 18:
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
    rows = tuple(dict.fromkeys(_row(expanded, text, names) for expanded in _expand(text)))
    return Pattern(text, rows, span)


def _expand(text: str) -> list[str]:
    """Every choice of the braces; nesting is not part of the language."""
    found = [""]
    at = 0
    while at < len(text):
        opened = text.find("{", at)
        stray = text.find("}", at)
        if stray >= 0 and (opened < 0 or stray < opened):
            raise PatternError("`}` without `{`", stray)
        if opened < 0:
            return [f + text[at:] for f in found]
        closed = text.find("}", opened)
        if closed < 0:
            raise PatternError("`{` is never closed", opened)
        choices = text[opened + 1 : closed].split(",")
        if any("{" in c for c in choices):
            raise PatternError("braces cannot be nested", opened)
        if any(not c.strip() for c in choices):
            raise PatternError("an alternative between braces is empty", opened)
        if len(found) * len(choices) > _MOST_ALTERNATIVES:
            raise PatternError(f"the braces stand for more than {_MOST_ALTERNATIVES} patterns", opened)
        found = [f + text[at:opened] + c.strip() for f in found for c in choices]
        at = closed + 1
    return found


def _row(text: str, whole: str, names: Mapping[str, int]) -> tuple[_Segment, ...]:
    row: list[_Segment] = []
    for part in _split(text):
        head, bracket, _ = part.partition("[")
        offset = max(0, whole.find(part))
        if not head and not bracket:
            raise PatternError("a segment is empty: two dots meet, or one stands at an end", offset)
        if head:
            if _ALLOWED.fullmatch(head) is None:
                bad = next(c for c in head if _ALLOWED.fullmatch(c) is None)
                raise PatternError(f"{bad!r} cannot stand in a pattern", max(0, whole.find(bad)))
            if "**" in head and head != _ANY_DEPTH:
                raise PatternError("`**` stands for whole segments; inside one write `*`", offset)
            row.append(head)
        rest = part[len(head) :]
        while rest:
            match = _RANGE.match(rest)
            if match is None:
                raise PatternError("expected an index range such as [0..4], [2..] or [3]", max(0, whole.find("[")))
            row.append(_indices(match, names, max(0, whole.find(match[0]))))
            rest = rest[match.end() :]
    return tuple(row)


def _split(text: str) -> list[str]:
    """Segments between dots, leaving the dots inside brackets alone."""
    return re.split(r"\.(?![^\[\]]*\])", text)


def _indices(match: re.Match[str], names: Mapping[str, int], offset: int) -> _Indices:
    low, dots, high = match[1], match[2], match[3]
    if not dots:
        at = _integer(low, names, offset)
        if at is None:
            raise PatternError("an index range is empty: write [0..4], [2..], [..4] or [3]", offset)
        return _Indices(at, at + 1)
    bounds = _Indices(_integer(low, names, offset), _integer(high, names, offset))
    if bounds.low is not None and bounds.high is not None and bounds.low >= bounds.high:
        raise PatternError(f"the range {bounds.low}..{bounds.high} holds no index; its end does not belong to it", offset)
    return bounds


def _integer(text: str, names: Mapping[str, int], offset: int) -> int | None:
    if not text:
        return None
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return int(text)
    if text in names:
        return names[text]
    raise PatternError(f"{text!r} is no integer and no name of one", offset)
