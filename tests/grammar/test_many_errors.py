"""Several mistakes in one text: each damaged line is reported in one run, and no healthy line is."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from tests.grammar.reading import clean, lines, read
from tests.grammar.specs import DAMAGEABLE

Damage = Callable[[str, random.Random], str | None]


def _code(line: str) -> str:
    """A line without its comment; no string of the text has a `#`."""
    return line.split("#", maxsplit=1)[0].rstrip()


def _replace_one(pattern: str, replacement: str) -> Damage:
    def damage(line: str, rng: random.Random) -> str | None:
        places = list(re.finditer(pattern, _code(line)))
        if not places:
            return None
        found = rng.choice(places)
        return line[: found.start()] + found.expand(replacement) + line[found.end() :]

    return damage


def _outside_strings(line: str) -> list[int]:
    code = _code(line)
    return [at for at in range(len(code)) if code[:at].count('"') % 2 == 0]


def _insert(junk: str) -> Damage:
    def damage(line: str, rng: random.Random) -> str | None:
        places = _outside_strings(line)
        if not places:
            return None
        at = rng.choice(places)
        return f"{line[:at]} {junk} {line[at:]}"

    return damage


def _drop_quote(line: str, rng: random.Random) -> str | None:
    places = [at for at, c in enumerate(_code(line)) if c == '"']
    if not places:
        return None
    at = rng.choice(places)
    return line[:at] + line[at + 1 :]


def _drop_bracket(line: str, rng: random.Random) -> str | None:
    """Brackets that open and close on this line; those that hold several lines have tests of their own."""
    code = _code(line)
    if code.count("{") != code.count("}"):
        return None
    places = [at for at in _outside_strings(line) if code[at] in "()[]{}"]
    if not places:
        return None
    at = rng.choice(places)
    return line[:at] + line[at + 1 :]


DAMAGES: dict[str, Damage] = {
    "assignment sign lost": _replace_one(r" = ", "   "),
    "assignment sign doubled": _replace_one(r" = ", " = = "),
    "colon for assignment": _replace_one(r" = ", " : "),
    "arrow lost": _replace_one(r"=>", "  "),
    "assignment for arrow": _replace_one(r"=>", "="),
    "value lost": _replace_one(r"= [^;{}]+$", "="),
    "character of no language": _insert("$"),
    "character beyond ASCII": _insert("\u00a7"),
    "two operators": _insert("* /"),
    "at sign alone": _insert("@ @"),
    "quote lost": _drop_quote,
    "bracket lost": _drop_bracket,
    "bracket too much": _insert(")"),
    "square bracket too much": _insert("]"),
}


def test_the_healthy_text_is_clean() -> None:
    assert len(DAMAGEABLE.splitlines()) == 49
    clean(DAMAGEABLE)


@pytest.mark.parametrize("first_seed", range(0, 200, 50))
def test_each_damaged_line_is_reported_and_no_healthy_one(first_seed: int) -> None:
    healthy = DAMAGEABLE.splitlines()
    for seed in range(first_seed, first_seed + 50):
        rng = random.Random(seed)
        text, damaged = list(healthy), {}
        wanted = rng.randint(1, 4)
        while len(damaged) < wanted:
            number = rng.randrange(len(healthy))
            kind = rng.choice(sorted(DAMAGES))
            changed = DAMAGES[kind](healthy[number], rng)
            if number + 1 in damaged or changed is None:
                continue
            text[number] = changed
            damaged[number + 1] = f"{kind}: {changed}"
        _, found = read("\n".join(text) + "\n")
        assert {d.code for d in found} == {"PDL001"}, (seed, damaged)
        assert lines(found) == set(damaged), (seed, damaged, [f"{d.span} {d.message}" for d in found])


@pytest.mark.parametrize("kind", sorted(DAMAGES))
def test_each_kind_of_damage_is_reported_on_every_line_alone(kind: str) -> None:
    healthy = DAMAGEABLE.splitlines()
    rng = random.Random(kind)
    tried = 0
    for number, line in enumerate(healthy):
        changed = DAMAGES[kind](line, rng)
        if changed is None:
            continue
        tried += 1
        _, found = read("\n".join([*healthy[:number], changed, *healthy[number + 1 :]]))
        assert lines(found) == {number + 1}, (changed, [f"{d.span} {d.message}" for d in found])
    assert tried >= 4
