"""What a terminal can show, and the little text code that tables and pictures share.

No dependency: a table library costs more time to import than `pdsl check` may take, and its output could not be compared byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TextIO

from attrs import frozen

__all__ = [
    "PLAIN", "Terminal", "bar", "binary", "clip", "count", "decimal", "join_list", "numbers", "percent", "plural", "ranges", "table", "visible", "wrapped",
]  # fmt: skip

_CODES = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
    "forward": "34",
    "backward": "33",
}
_RESET = "\x1b[0m"


@frozen
class Terminal:
    """What may be written to a stream: `width` in columns, box characters or ASCII only, colours or none."""

    width: int = 100
    unicode: bool = False
    colour: bool = False

    @classmethod
    def of(cls, stream: TextIO, environ: Mapping[str, str], *, width: int = 100) -> Terminal:
        """Read off a stream and the environment.

        Colour needs a terminal, unless FORCE_COLOR is set; NO_COLOR (not empty) wins over both. Box characters need an encoding that has them.
        """
        encoding = (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "").replace("_", "")
        isatty = getattr(stream, "isatty", None)
        on_screen = bool(isatty and isatty()) and environ.get("TERM") != "dumb"
        forced = environ.get("FORCE_COLOR", "") not in {"", "0"}
        colour = not environ.get("NO_COLOR") and (on_screen or forced)
        return cls(width, encoding.startswith("utf"), colour)

    def paint(self, text: str, *styles: str) -> str:
        """The text in the given styles (`bold`, `dim`, a colour, `forward`, `backward`), or as it is where there is no colour."""
        if not self.colour or not text or not styles:
            return text
        return f"\x1b[{';'.join(_CODES[s] for s in styles)}m{text}{_RESET}"

    def heading(self, text: str) -> str:
        return self.paint(text, "bold")

    def symbol(self, fancy: str, plain: str) -> str:
        """The box character, or what stands for it in ASCII."""
        return fancy if self.unicode else plain


PLAIN = Terminal()


def visible(text: str) -> int:
    """Columns that a text takes, colour codes not counted."""
    length, inside = 0, False
    for character in text:
        if character == "\x1b":
            inside = True
        elif inside:
            inside = character != "m"
        else:
            length += 1
    return length


def clip(text: str, width: int) -> str:
    """The text cut to a width, `..` where something was left out. Without colour codes."""
    return text if len(text) <= width else text[: max(0, width - 2)].rstrip() + ".."[:width]


def table(
    rows: Sequence[Sequence[str]], *, align: str = "", indent: int = 2, gap: int = 2, width: int = 100, elastic: int | None = None
) -> list[str]:
    """Rows of cells as aligned lines; the first row is the head.

    `align` has one character a column, `<` or `>`; missing ones are `<`. `elastic` is the column that is clipped when a line would be
    wider than `width`. Columns that are empty in every row but the head are dropped.
    """
    kept = [c for c in range(len(rows[0])) if any(row[c] for row in rows[1:])]
    widths = {c: max(visible(row[c]) for row in rows) for c in kept}
    excess = indent + sum(widths.values()) + gap * (len(kept) - 1) - width
    if elastic in widths and excess > 0:
        widths[elastic] = max(len(rows[0][elastic]), widths[elastic] - excess, 8)
    lines = []
    for row in rows:
        cells = []
        for c in kept:
            cell = clip(row[c], widths[c]) if c == elastic else row[c]
            space = " " * (widths[c] - visible(cell))
            cells.append(space + cell if align[c : c + 1] == ">" else cell + space)
        lines.append((" " * indent + (" " * gap).join(cells)).rstrip())
    return lines


def bar(parts: Sequence[tuple[int, str]], full: int, width: int) -> str:
    """A bar of `width` cells for `full`, made of parts (value, character). Parts above zero that round to nothing keep no cell."""
    if full <= 0:
        return ""
    text, total = "", 0
    for value, character in parts:
        total += value
        text += character * (min(width, (total * width + full // 2) // full) - len(text))
    return text


def binary(size: int | Fraction) -> str:
    """Bytes in binary units with three digits: 512 B, 1.50 KiB, 23.4 MiB."""
    if size < 1024:
        return f"{int(size)} B"
    value = Fraction(size)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1000 or unit == "TiB":
            return f"{_three(value)} {unit}"
    raise AssertionError


def count(number: int) -> str:
    """A count with three digits: 512, 1.05 k, 23.4 M."""
    if number < 1000:
        return str(number)
    value = Fraction(number)
    for unit in ("k", "M", "G", "T"):
        value /= 1000
        if value < 1000 or unit == "T":
            return f"{_three(value)} {unit}"
    raise AssertionError


def _three(value: Fraction) -> str:
    number = float(value)
    if number < 9.995:
        return f"{number:.2f}"
    return f"{number:.1f}" if number < 99.95 else f"{number:.0f}"


def decimal(value: Fraction, places: int = 2) -> str:
    """A fraction as a decimal, without zeros at its end."""
    text = f"{float(value):.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: Fraction) -> str:
    """A share of one as a percentage with one digit."""
    return f"{float(share) * 100:.1f} %"


def plural(number: int, word: str, many: str = "") -> str:
    """`1 layer`, `2 layers`."""
    return f"{number} {word if number == 1 else many or word + 's'}"


def ranges(values: Iterable[int], limit: int = 6) -> str:
    """Sorted whole numbers as runs: `0-3, 8, 10-11`; beyond `limit` runs the numbers left out are counted: `0-3, 8, +14`."""
    runs: list[tuple[int, int]] = []
    for value in sorted(set(values)):
        if runs and runs[-1][1] == value - 1:
            runs[-1] = (runs[-1][0], value)
        else:
            runs.append((value, value))
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    if len(texts) > limit:
        left = sum(b - a + 1 for a, b in runs[limit - 1 :])
        texts = [*texts[: limit - 1], f"+{left}"]
    return ", ".join(texts)


def numbers(shape: Sequence[int]) -> str:
    """A shape: `[512, 128]`."""
    return "[" + ", ".join(map(str, shape)) + "]"


def join_list(words: Sequence[str], last: str = "and") -> str:
    """`a, b and c`."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def wrapped(text: str, width: int, lead: str = "  - ") -> list[str]:
    """A text as lines of at most `width`, the first behind `lead`, the others indented as far."""
    lines, line = [], lead
    for word in text.split():
        if len(line) + len(word) > width:
            lines.append(line.rstrip())
            line = " " * len(lead)
        line += word + " "
    return [*lines, line.rstrip()]
