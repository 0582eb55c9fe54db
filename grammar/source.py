"""Source texts and spans: where something was written.

A `Span` holds character offsets only; lines and columns are computed when somebody prints them, so that parsing stays cheap and spans
compare by position.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property

from attrs import field, frozen

__all__ = ["Position", "Source", "Span"]


@frozen(order=True)
class Position:
    """A place in a text: 1-based line and 1-based column, both counted in characters."""

    line: int
    column: int


@frozen(slots=False)
class Source:
    """One text with the name it is reported under."""

    name: str
    text: str = field(repr=False)

    @cached_property
    def _line_starts(self) -> tuple[int, ...]:
        return (0, *(i + 1 for i, c in enumerate(self.text) if c == "\n"))

    @property
    def line_count(self) -> int:
        return len(self._line_starts)

    def position(self, offset: int) -> Position:
        """Line and column of a character offset; offsets beyond the end give the end."""
        offset = max(0, min(offset, len(self.text)))
        line = bisect_right(self._line_starts, offset)
        return Position(line, offset - self._line_starts[line - 1] + 1)

    def line(self, number: int) -> str:
        """The text of a 1-based line, without its line end."""
        start = self._line_starts[number - 1]
        stop = self._line_starts[number] if number < self.line_count else len(self.text)
        return self.text[start:stop].rstrip("\r\n")


@frozen
class Span:
    """A half-open range of characters of one source."""

    source: Source
    start: int
    stop: int

    @property
    def begin(self) -> Position:
        return self.source.position(self.start)

    @property
    def end(self) -> Position:
        return self.source.position(self.stop)

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.stop]

    def to(self, other: Span) -> Span:
        """The range from the start of this span to the end of another one of the same source."""
        return Span(self.source, self.start, max(self.stop, other.stop))

    def __str__(self) -> str:
        where = self.begin
        return f"{self.source.name}:{where.line}:{where.column}"
