"""The grammar as tables: what lark makes of `pdsl.lark`, in plain data.

lark reads the grammar, proves it free of conflicts and computes the LALR(1) tables. It is asked once per machine: the tables are cached as
JSON, and a later start neither imports lark (about 40 ms) nor builds a parser (about 80 ms). Everything that looks inside lark is in
`compile_tables`; the cache key holds the version of lark and the text of the grammar.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from attrs import frozen

from pdsl.grammar.cache import read_entry, write_entry

if TYPE_CHECKING:
    from lark import Lark

__all__ = ["END", "Production", "Tables", "Terminal", "compile_tables", "grammar_text", "lark_parser", "load_tables"]

END = "$END"
_FORMAT = 1


@frozen
class Terminal:
    """One kind of token: its regular expression, in the order in which they are tried. `keyword` holds the word of a keyword, else ''."""

    name: str
    pattern: str
    keyword: str


@frozen
class Production:
    """`origin: symbols`. `transparent`: a rule of one child, which stands for the node."""

    origin: str
    symbols: tuple[str, ...]
    transparent: bool


@frozen(eq=False)
class Tables:
    """LALR(1) tables. In `actions[state][symbol]` a number n >= 0 goes to state n, -1 - p reduces by production p."""

    terminals: tuple[Terminal, ...]
    ignored: frozenset[str]
    productions: tuple[Production, ...]
    actions: tuple[dict[str, int], ...]
    start: int
    accept: int

    @property
    def keywords(self) -> dict[str, str]:
        """Word -> terminal of the contextual keywords."""
        return {t.keyword: t.name for t in self.terminals if t.keyword}


@cache
def load_tables() -> Tables:
    """The tables of `pdsl.lark`: from this process, else from the cache, else from lark (and then cached)."""
    grammar = grammar_text()
    digest = crc32(grammar.encode())
    key = f"pdsl tables {_FORMAT} lark {_lark_version()} grammar {len(grammar)} {digest:08x}"
    name = f"grammar-{digest:08x}.json"
    stored = read_entry(name, key)
    if stored is not None:
        return _from_json(json.loads(stored))
    tables = compile_tables(grammar)
    write_entry(name, key, _to_json(tables))
    return tables


def grammar_text() -> str:
    """The text of `pdsl.lark`, wherever this package was loaded from."""
    # importlib.resources would do the same for five times the price of parsing; the loader also reads from a zip file.
    loader: Any = globals().get("__loader__")
    path = Path(__file__).with_name("pdsl.lark")
    data: bytes = loader.get_data(str(path)) if hasattr(loader, "get_data") else path.read_bytes()
    return data.decode("utf-8").replace("\r\n", "\n")


def lark_parser(grammar: str) -> Lark:
    """Lark's own parser of a grammar, for the tables and for comparisons in tests. Newlines inside brackets are not free for it."""
    from lark import Lark  # imported only where there is no cache yet

    return Lark(grammar, parser="lalr", lexer="contextual", maybe_placeholders=False)


def compile_tables(grammar: str) -> Tables:
    """Let lark compute the tables. Raises lark's GrammarError where the grammar has conflicts."""
    # The parse table is not part of lark's documented interface: the package is held below 2, and a test compares with lark's own parser.
    lark: Any = lark_parser(grammar)
    table = lark.parser.parser._parse_table
    # lark numbers states and rules as its sets happen to be ordered; here the same grammar gives the same tables.
    rules = sorted(lark.rules, key=lambda rule: (rule.origin.name, [s.name for s in rule.expansion]))
    productions = tuple(Production(str(r.origin.name), tuple(str(s.name) for s in r.expansion), bool(r.options.expand1)) for r in rules)
    reductions = {id(rule): -1 - number for number, rule in enumerate(rules)}
    states = _breadth_first(table.states, table.start_states["start"])
    numbers = {state: number for number, state in enumerate(states)}
    actions = tuple(
        {
            str(symbol): numbers[argument] if action.name == "Shift" else reductions[id(argument)]
            for symbol, (action, argument) in sorted(table.states[state].items())
        }
        for state in states
    )
    name_pattern = next(t.pattern.to_regexp() for t in lark.terminals if t.name == "NAME")
    in_order = sorted(lark.terminals, key=lambda t: (-t.priority, -t.pattern.max_width, -len(t.pattern.value), t.name))
    terminals = tuple(
        Terminal(t.name, t.pattern.to_regexp(), t.pattern.value if re.fullmatch(name_pattern, t.pattern.value) else "") for t in in_order
    )
    return Tables(terminals, frozenset(lark.ignore_tokens), productions, actions, 0, numbers[table.end_states["start"]])


def _breadth_first(rows: dict[int, Any], start: int) -> list[int]:
    """The states in the order in which they are reached, symbols in alphabetical order."""
    found, known = [start], {start}
    for state in found:
        for _, (action, target) in sorted(rows[state].items()):
            if action.name == "Shift" and target not in known:
                known.add(target)
                found.append(target)
    return found


def _lark_version() -> str:
    """The version of the lark that would be imported, read without importing it."""
    found = find_spec("lark")
    if found is None or found.origin is None:
        return "none"
    try:
        version = re.search(r'^__version__[^"\n]*"([^"\n]*)"', Path(found.origin).read_text("utf-8"), re.MULTILINE)
    except (OSError, ValueError):
        version = None
    return version.group(1) if version else "unknown"


def _to_json(tables: Tables) -> str:
    symbols = sorted({symbol for row in tables.actions for symbol in row})
    at = {symbol: number for number, symbol in enumerate(symbols)}
    data = {
        "terminals": [[t.name, t.pattern, t.keyword] for t in tables.terminals],
        "ignored": sorted(tables.ignored),
        "productions": [[p.origin, list(p.symbols), p.transparent] for p in tables.productions],
        "symbols": symbols,
        "actions": [[n for symbol, action in row.items() for n in (at[symbol], action)] for row in tables.actions],
        "start": tables.start,
        "accept": tables.accept,
    }
    return json.dumps(data, separators=(",", ":"))


def _from_json(data: dict[str, Any]) -> Tables:
    symbols = data["symbols"]
    return Tables(
        terminals=tuple(Terminal(name, pattern, keyword) for name, pattern, keyword in data["terminals"]),
        ignored=frozenset(data["ignored"]),
        productions=tuple(Production(origin, tuple(parts), transparent) for origin, parts, transparent in data["productions"]),
        actions=tuple({symbols[row[i]]: row[i + 1] for i in range(0, len(row), 2)} for row in data["actions"]),
        start=data["start"],
        accept=data["accept"],
    )
