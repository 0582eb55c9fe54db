"""Findings for machines: JSON with a version, GitHub annotations, SARIF, JUnit. Lines and columns count from 1, columns in characters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape, quoteattr

from pdsl.grammar.diagnostics import Diagnostic, Severity
from pdsl.grammar.source import Position, Span
from pdsl.render.diagnostics import clean

__all__ = ["JSON_FORMAT", "render_github", "render_json", "render_junit", "render_sarif"]

JSON_FORMAT = "1.0"
"""Version of the JSON form: the minor one goes up when keys are added, the major one when any changes or goes."""


def render_json(diagnostics: Sequence[Diagnostic], files: Sequence[str]) -> str:
    """All findings as one JSON object."""
    found = {
        "format": JSON_FORMAT,
        "valid": not any(d.severity is Severity.ERROR for d in diagnostics),
        "errors": sum(d.severity is Severity.ERROR for d in diagnostics),
        "warnings": sum(d.severity is Severity.WARNING for d in diagnostics),
        "files": list(files),
        "diagnostics": [_entry(d) for d in diagnostics],
    }
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def _entry(d: Diagnostic) -> dict[str, object]:
    edits = [{**_range(e.span), "text": e.text} for e in d.fix.edits] if d.fix is not None else []
    return {
        "code": d.code,
        "severity": d.severity.value,
        "message": d.message,
        **(_range(d.span) if d.span is not None else {"file": None, "start": None, "end": None}),
        "caption": d.caption,
        "labels": [{**_range(label.span), "text": label.text} for label in d.labels],
        "help": list(d.help),
        "notes": list(d.notes),
        "fix": {"title": d.fix.title, "safety": d.fix.safety.value, "edits": edits} if d.fix is not None else None,
    }


def _range(span: Span) -> dict[str, object]:
    return {"file": span.source.name, "start": _place(span.begin, span.start), "end": _place(span.end, span.stop)}


def _place(position: Position, offset: int) -> dict[str, int]:
    return {"line": position.line, "column": position.column, "offset": offset}


def render_github(diagnostics: Sequence[Diagnostic]) -> str:
    """Workflow commands that GitHub turns into annotations."""
    kinds = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}
    lines = []
    for d in diagnostics:
        properties: dict[str, object] = {"title": d.code}
        if d.span is not None:
            begin, end = d.span.begin, d.span.end
            properties |= {"file": d.span.source.name, "line": begin.line, "endLine": end.line}
            if begin.line == end.line:  # a range of columns is allowed within one line only
                properties |= {"col": begin.column, "endColumn": max(begin.column + 1, end.column)}
        told = ",".join(f"{key}={_github(str(value)).replace(':', '%3A').replace(',', '%2C')}" for key, value in properties.items())
        text = "\n".join([d.message, *(f"help: {h}" for h in d.help), *(f"note: {n}" for n in d.notes)])
        lines.append(f"::{kinds[d.severity]} {told}::{_github(text)}\n")
    return "".join(lines)


def _github(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def render_sarif(diagnostics: Sequence[Diagnostic], version: str, names: Mapping[str, str]) -> str:
    """A SARIF 2.1.0 log. `names` gives the name of each rule by its code."""
    codes = sorted({d.code for d in diagnostics})
    seen: dict[str, int] = {}
    results = []
    for d in diagnostics:
        print_ = _fingerprint(d)
        seen[print_] = seen.get(print_, 0) + 1
        result: dict[str, object] = {
            "ruleId": d.code,
            "ruleIndex": codes.index(d.code),
            "level": d.severity.value,
            "message": {"text": "\n".join([d.message, *d.help, *d.notes])},
            "locations": [_location(d.span)] if d.span is not None else [],
            "partialFingerprints": {"pdsl/v1": f"{print_}:{seen[print_]}"},
        }
        if d.labels:
            result["relatedLocations"] = [{"id": i, **_location(la.span), "message": {"text": la.text}} for i, la in enumerate(d.labels)]
        results.append(result)
    rules = [{"id": code, "name": names.get(code, code)} for code in codes]
    driver = {"name": "pdsl", "version": version, "rules": rules}
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}],
    }
    return json.dumps(log, indent=2, ensure_ascii=False) + "\n"


def _fingerprint(d: Diagnostic) -> str:
    """What stays the same when lines move: code, file and message."""
    file = d.span.source.name if d.span is not None else ""
    return hashlib.sha256(f"{d.code}\0{file}\0{d.message}".encode()).hexdigest()[:16]


def _location(span: Span) -> dict[str, object]:
    begin, end = span.begin, span.end
    region = {"startLine": begin.line, "startColumn": begin.column, "endLine": end.line, "endColumn": end.column}
    return {"physicalLocation": {"artifactLocation": {"uri": span.source.name.replace("\\", "/")}, "region": region}}


def render_junit(diagnostics: Sequence[Diagnostic], files: Sequence[str]) -> str:
    """A JUnit file: one test suite a file, one failed case a finding, one passed case for a file without any."""
    errors = sum(d.severity is Severity.ERROR for d in diagnostics)
    lines = [
        '<?xml version="1.0" encoding="utf-8"?>',
        f'<testsuites name="pdsl check" tests="{max(len(diagnostics), len(files))}" failures="{errors}">',
    ]
    named = {d.span.source.name if d.span is not None else "" for d in diagnostics}
    for file in (*files, *sorted(named.difference(files))):
        found = [d for d in diagnostics if (d.span.source.name if d.span is not None else "") == file]
        failed = sum(d.severity is Severity.ERROR for d in found)
        suite = quoteattr(file or "command line")
        lines.append(f'  <testsuite name={suite} tests="{max(1, len(found))}" failures="{failed}">')
        lines += [line for d in found for line in _case(d)] or [f'    <testcase classname={suite} name="pdsl check"/>']
        lines.append("  </testsuite>")
    return "\n".join([*lines, "</testsuites>", ""])


def _case(d: Diagnostic) -> list[str]:
    where = f"{d.span.source.name}:{d.span.begin.line}:{d.span.begin.column}" if d.span is not None else "command line"
    body = escape(clean("\n".join([f"{where}: {d.message}", *d.help, *d.notes])))
    head = f"    <testcase classname={quoteattr(clean(where))} name={quoteattr(d.code)}>"
    if d.severity is Severity.ERROR:
        return [head, f"      <failure type={quoteattr(d.code)} message={quoteattr(clean(d.message))}>{body}</failure>", "    </testcase>"]
    return [head, f"      <system-out>{d.severity.value}: {body}</system-out>", "    </testcase>"]
