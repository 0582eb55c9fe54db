"""Why a rule exists: its docstring as a page, and the list of all rules."""

from __future__ import annotations

import inspect
import re

from pdsl.lowering.composability import TABLE, Pair
from pdsl.lowering.rules import RULES
from pdsl.lowering.rules.base import Rule
from pdsl.lowering.values import near
from pdsl.render.terminal import PLAIN, Terminal, table, wrapped

__all__ = ["UnknownCode", "find_rule", "render_codes", "render_pairs", "render_rule"]

_HEADING = re.compile(r"^\S.*$")


class UnknownCode(LookupError):
    """There is no rule of this code or name; the message names the one that was probably meant."""


def find_rule(code: str) -> type[Rule] | Rule:
    """The rule of a code (`PDL402`, `402`) or name (`product-of-axes`). Raises UnknownCode."""
    wanted = f"PDL{code}" if code.isdigit() else code
    by_name = {name: rule for rule in RULES for name in (rule.code, rule.name)}
    for name, rule in by_name.items():
        if name.lower() == wanted.lower():
            return rule
    close = near(wanted, list(by_name))
    raise UnknownCode(f"there is no rule {code}" + (f"; did you mean {close}?" if close else "; `pdsl explain` lists them"))


def render_rule(code: str, terminal: Terminal = PLAIN) -> str:
    """The page of one rule: what it does, why it is bad, a bad and a better example, the fix. Raises UnknownCode. Ends with a newline."""
    rule = find_rule(code)
    page = (inspect.getdoc(rule) or "").splitlines()
    head = terminal.heading(f"{rule.code} {rule.name} ({rule.severity.value})")
    pairs = [line for pair in TABLE if rule.code in pair.proof for line in wrapped(_told(pair), terminal.width)]
    told = ["", terminal.heading("What works together"), *pairs] if pairs else []
    return "\n".join([head, "", *(terminal.heading(line) if _HEADING.match(line) else line for line in page), *told, ""])


def _told(pair: Pair) -> str:
    versions = f" (seen with {' and '.join(pair.measured)})" if pair.measured else ""
    return f"{pair}: {pair.verdict.value}, {pair.reason}; torch by itself: {pair.alone}{versions}"


def render_pairs(terminal: Terminal = PLAIN) -> str:
    """The table of what works together: each pair of features, what PDSL makes of it and what torch does by itself. Ends with a newline."""
    rows = [("features", "PDSL", "rule", "torch by itself", "seen with")]
    for pair in TABLE:
        codes = ", ".join(p for p in pair.proof if p.startswith("PDL"))
        rows.append((str(pair), pair.verdict.value, codes, pair.alone, ", ".join(pair.measured)))
    return "\n".join([*table(rows, indent=0, width=terminal.width, elastic=3), ""])


def render_codes(terminal: Terminal = PLAIN) -> str:
    """All rules, one a line, in the order of their codes. Ends with a newline."""
    rows = [("code", "severity", "name", "what it does")]
    rows += [(rule.code, rule.severity.value, rule.name, _first_sentence(rule)) for rule in sorted(RULES, key=lambda r: r.code)]
    return "\n".join([*table(rows, indent=0, width=terminal.width, elastic=3), "", "pdsl explain CODE tells more", ""])


def _first_sentence(rule: type[Rule] | Rule) -> str:
    """The first sentence under the first heading."""
    body = " ".join(line.strip() for line in (inspect.getdoc(rule) or "").splitlines()[1:])
    return body.split(". ")[0].rstrip(".")
