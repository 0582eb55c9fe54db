"""Plans and facts as JSON: the same value gives the same bytes on every machine.

Classes become objects with their fields by name, tuples become lists, enums their value. What JSON has no word for is an object with one telling key:
`{"fraction": "1/3"}`, `{"quantity": "30", "dimension": "seconds"}`, `{"call": "adamw", ...}`. Fields that do not count for equality (spans,
the directory of a job) are left out where they have a default. The text of a class begins with its name and a version.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs

from pdsl.lowering.plan import Plan
from pdsl.lowering.spec import CallValue, Quantity, Value

__all__ = ["SERIAL_VERSION", "dump", "dump_for_hash", "load"]

SERIAL_VERSION = 1

T = TypeVar("T")


def dump(obj: object) -> str:
    """An attrs object of lowering as JSON on one line, keys sorted. Raises TypeError for what has no JSON form."""
    return _text({"type": type(obj).__name__, "format": SERIAL_VERSION, "value": _plain(obj)})


def dump_for_hash(plan: Plan) -> str:
    """As `dump`, without where the plan was written: the directory of its job."""
    whole = json.loads(dump(plan))
    whole["value"]["job"].pop("directory", None)
    return _text(whole)


def load(text: str, cls: type[T]) -> T:
    """Read what `dump` wrote of a `cls`. Raises ValueError if the text is malformed, of another class or of another version."""
    try:
        whole = json.loads(text)
    except RecursionError:
        raise ValueError(f"this is no {cls.__name__}: it is nested too deeply") from None
    if not isinstance(whole, dict) or set(whole) != {"type", "format", "value"}:
        raise ValueError(f"this is no {cls.__name__}: expected an object with type, format and value")
    if whole["type"] != cls.__name__:
        raise ValueError(f"this is a {whole['type']}, not a {cls.__name__}")
    if whole["format"] != SERIAL_VERSION:
        raise ValueError(f"this {cls.__name__} is in format {whole['format']}, this version of PDSL reads format {SERIAL_VERSION}")
    _check_version(whole["value"], cls)
    try:
        found: T = _read(whole["value"], cls, cls.__name__)
    except RecursionError:
        raise ValueError(f"this is no {cls.__name__}: it is nested too deeply") from None
    return found


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _check_version(value: object, cls: type) -> None:
    """A class with a field `version` says itself which version it has."""
    own = next((f.default for f in attrs.fields(cls) if f.name == "version"), None) if attrs.has(cls) else None
    if own is not None and isinstance(value, dict) and value.get("version") != own:
        raise ValueError(f"this {cls.__name__} has version {value.get('version')}, this version of PDSL reads version {own}")


# --- writing ----------------------------------------------------------------------------------------------------------------------------


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Fraction):
        return {"fraction": str(value)}
    if isinstance(value, Quantity):
        return {"quantity": str(value.value), "dimension": value.dimension}
    if isinstance(value, CallValue):
        return {"call": value.name, "positional": _plain(value.positional), "keywords": _plain(value.keywords)}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    cls: Any = type(value)
    if attrs.has(cls):
        return {f.name: _plain(getattr(value, f.name)) for f in attrs.fields(cls) if _kept(f)}
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def _kept(field: attrs.Attribute[Any]) -> bool:
    return field.init and (bool(field.eq) or field.name == "directory")


# --- reading ----------------------------------------------------------------------------------------------------------------------------


def _read(value: Any, kind: Any, where: str) -> Any:
    """`value` as an object of type `kind`; `where` is the path in messages."""
    if kind is Any:
        return value
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _read_union(value, get_args(kind), where)
    if origin is tuple:
        return _read_tuple(value, get_args(kind), where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _called(kind, value, where)
    if kind is Fraction:
        return _fraction(value, "fraction", where)
    if attrs.has(kind):
        return _read_class(value, kind, where)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind and not (kind is NoneType and value is None):
        raise _wrong(where, value, f"{getattr(kind, '__name__', kind)}")
    return value


def _read_union(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    if CallValue in kinds:
        return _read_value(value, where)
    if value is None and NoneType in kinds:
        return None
    problems: list[str] = []
    for kind in (k for k in kinds if k is not NoneType):
        try:
            return _read(value, kind, where)
        except ValueError as error:
            problems.append(str(error))
    raise ValueError(problems[0])


def _read_value(value: Any, where: str) -> Value:
    """A value of the language: see `spec.Value`."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list):
        return tuple(_read_value(v, f"{where}[{i}]") for i, v in enumerate(value))
    if isinstance(value, dict) and set(value) == {"fraction"}:
        return _fraction(value, "fraction", where)
    if isinstance(value, dict) and set(value) == {"quantity", "dimension"}:
        return Quantity(_fraction(value, "quantity", where), _read(value["dimension"], str, f"{where}.dimension"))
    if isinstance(value, dict) and set(value) == {"call", "positional", "keywords"}:
        return _read_call(value, where)
    raise _wrong(where, value, "a value of the language")


def _read_call(value: dict[str, Any], where: str) -> CallValue:
    positional = _read_value(value["positional"], f"{where}.positional")
    keywords = value["keywords"]
    if not isinstance(positional, tuple) or not isinstance(keywords, list):
        raise _wrong(where, value, "a call")
    pairs = tuple(_read_tuple(pair, (str, Value), f"{where}.keywords[{i}]") for i, pair in enumerate(keywords))
    return CallValue(_read(value["call"], str, f"{where}.call"), positional, pairs)


def _read_tuple(value: Any, kinds: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong(where, value, "a list")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_read(v, kinds[0], f"{where}[{i}]") for i, v in enumerate(value))
    if len(value) != len(kinds):
        raise ValueError(f"{where} has {len(value)} entries: expected {len(kinds)}")
    return tuple(_read(v, k, f"{where}[{i}]") for i, (v, k) in enumerate(zip(value, kinds, strict=True)))


def _read_class(value: Any, cls: Any, where: str) -> Any:
    if cls is CallValue or cls is Quantity:
        found = _read_value(value, where)
        if not isinstance(found, cls):
            raise _wrong(where, value, f"a {cls.__name__}")
        return found
    if not isinstance(value, dict):
        raise _wrong(where, value, f"a {cls.__name__}")
    kept = {f.name: f for f in attrs.fields(cls) if _kept(f)}
    unknown = [name for name in value if name not in kept]
    missing = [name for name, f in kept.items() if name not in value and f.default is attrs.NOTHING]
    if unknown or missing:
        raise ValueError(f"{where} {'has an unknown field ' + unknown[0] if unknown else 'lacks the field ' + missing[0]}")
    hints = _hints(cls)
    return _called(cls, {name: _read(v, hints[name], f"{where}.{name}") for name, v in value.items()}, where)


@lru_cache(maxsize=64)
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _called(make: Callable[..., Any], value: Any, where: str) -> Any:
    """A class made from its fields, an enum from its value."""
    try:
        return make(**value) if isinstance(value, dict) else make(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _fraction(value: Any, key: str, where: str) -> Fraction:
    try:
        text = value[key]
        return Fraction(text if isinstance(text, str) else "")
    except (TypeError, KeyError, ValueError, ZeroDivisionError):
        raise _wrong(where, value, "a fraction") from None


def _wrong(where: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{where} is {_shown(value)}: expected {expected}")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
