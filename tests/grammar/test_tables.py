"""The tables: free of conflicts, equal to lark's own parser, cached once and for all, and loaded without lark."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from lark import LarkError
from lark.utils import logger

from pdsl.grammar import tables
from pdsl.grammar.builder import Builder
from pdsl.grammar.cache import cache_folder, read_entry, write_entry
from pdsl.grammar.diagnostics import DiagnosticSink
from pdsl.grammar.source import Source
from pdsl.grammar.tables import Tables, compile_tables, grammar_text, lark_parser, load_tables
from tests.grammar.reading import read

fresh_load = load_tables.__wrapped__


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDSL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def same(one: Tables, other: Tables) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in Tables.__slots__ if not name.startswith("__"))


# --- the grammar ----------------------------------------------------------------------------------------------------------------------


def test_the_grammar_has_no_conflicts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger=logger.name):
        lark_parser(grammar_text())  # raises on a conflict between reductions
        assert [r.message for r in caplog.records if "onflict" in r.message] == []
        lark_parser('start: a a?\na: "x" a?')
        assert any("onflict" in r.message for r in caplog.records), "the check itself sees conflicts"


def test_every_rule_of_the_grammar_has_its_function() -> None:
    functions = Builder(Source("t", ""), DiagnosticSink()).functions()
    named = {p.origin for p in load_tables().productions if not p.origin.startswith("_") and not p.transparent}
    assert named == set(functions)


TEXTS = {
    "NAME": ("a", "b2", "axis", "stage", "to", "as", "let", "pdsl", "_x"),
    "NUMBER": ("1", "2.5", "30s", "5%", "1e3"),
    "STRING": ('"s"', '"t u"'),
}
BRACKETS = set("()[]{}")


def derive(grammar: Tables, rng: random.Random) -> list[str]:
    """Words of a random text of the grammar."""
    choices: dict[str, list[tuple[str, ...]]] = {}
    for production in grammar.productions:
        choices.setdefault(production.origin, []).append(production.symbols)
    signs = {t.name: (t.keyword or t.pattern.replace("\\", "")) for t in grammar.terminals}
    signs |= {"_END": "\n", "MISSING": "a"}
    words: list[str] = []
    stack = ["start"]
    budget = 60
    while stack:
        symbol = stack.pop()
        if symbol in choices:
            budget -= 1
            options = choices[symbol] if budget > 0 else [o for o in choices[symbol] if len(o) == min(map(len, choices[symbol]))]
            stack.extend(reversed(rng.choice(options)))
        elif symbol == "COMPARE":
            words.append(rng.choice(["==", "!=", "<=", ">=", "<", ">"]))
        else:
            words.append(rng.choice(TEXTS[symbol]) if symbol in TEXTS else "_" if symbol == "WHOLE" else signs[symbol])
    return words


def damage(words: list[str], rng: random.Random) -> list[str]:
    """The same words with one or none dropped, doubled or exchanged; brackets and ends stay, they mean more to PDSL than to lark."""
    places = [at for at, word in enumerate(words) if word not in BRACKETS and word != "\n"]
    if not places or rng.random() < 0.4:
        return words
    at = rng.choice(places)
    change = rng.choice([[], [words[at]] * 2, [rng.choice(["a", "1", "=", "=>", ",", ":", "+", '"s"', "_", "to", "<"])]])
    return [*words[:at], *change, *words[at + 1 :]]


def test_texts_are_sound_exactly_when_lark_says_so() -> None:
    lark = lark_parser(grammar_text())
    verdicts = []
    for seed in range(300):
        rng = random.Random(seed)
        text = " ".join(damage(derive(load_tables(), rng), rng))
        try:
            lark.parse(text)
            sound = True
        except LarkError:
            sound = False
        _, found = read(text)
        assert sound == all(d.code == "PDL002" for d in found), (text, [d.message for d in found])
        verdicts.append(sound)
    assert 50 < sum(verdicts) < 250


# --- the cache ------------------------------------------------------------------------------------------------------------------------


def test_the_tables_are_cached_and_come_back_equal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fresh_load()
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr(tables, "compile_tables", lambda grammar: pytest.fail("the cache was not used"))
    assert same(fresh_load(), first)
    assert same(first, compile_tables(grammar_text()))


@pytest.mark.parametrize("harm", [lambda b: b"", lambda b: b[:-10], lambda b: b.replace(b"NAME", b"MANE"), lambda b: b"\xff" + b])
def test_a_damaged_cache_is_written_anew(folder: Path, harm: object) -> None:
    first = fresh_load()
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    assert callable(harm)
    entry.write_bytes(harm(whole))
    assert same(fresh_load(), first)
    assert entry.read_bytes() == whole


def test_another_grammar_or_another_lark_is_another_entry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_load()
    compiled = []
    monkeypatch.setattr(tables, "compile_tables", lambda grammar: compiled.append(grammar) or load_tables())
    monkeypatch.setattr(tables, "_lark_version", lambda: "9.9")
    fresh_load()
    monkeypatch.setattr(tables, "grammar_text", lambda: grammar_text() + "\n")
    fresh_load()
    assert len(compiled) == 2
    assert len(list(folder.iterdir())) == 2


def test_the_version_in_the_key_is_the_one_that_would_be_imported() -> None:
    import lark

    assert tables._lark_version() == lark.__version__


def test_a_folder_that_cannot_be_written_means_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("PDSL_CACHE", str(blocked / "cache"))
    assert same(fresh_load(), compile_tables(grammar_text()))
    assert not write_entry("x", "key", "body")
    assert read_entry("x", "key") is None


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PDSL_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("PDSL_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "pdsl"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache_folder() == tmp_path / "home" / ".cache" / "pdsl"


def test_concurrent_writers_leave_whole_entries(folder: Path) -> None:
    bodies = [str(n) * 50_000 for n in range(4)]
    seen: list[str | None] = []

    def write(body: str) -> None:
        for _ in range(20):
            assert write_entry("entry", "key", body)
            seen.append(read_entry("entry", "key"))

    threads = [threading.Thread(target=write, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(seen) == 80
    assert set(seen) <= set(bodies)
    assert [p.name for p in folder.iterdir()] == ["entry"]


def test_a_start_with_a_warm_cache_parses_without_lark_and_without_torch(folder: Path) -> None:
    fresh_load()
    code = (
        "import sys\n"
        "from pdsl.grammar.parser import parse\n"
        "from pdsl.grammar.source import Source\n"
        "from pdsl.grammar.diagnostics import DiagnosticSink\n"
        "sink = DiagnosticSink()\n"
        "assert len(parse(Source('t', 'pdsl 1\\nmesh { axis pp 2 }'), sink).items) == 2\n"
        "assert len(sink.diagnostics) == 1\n"
        "print(sorted({'lark', 'torch', 'importlib.metadata', 'difflib'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ}, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
