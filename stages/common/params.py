"""Read sections of params.yaml into frozen, keyword-only dataclasses and refuse anything unexpected.

    params = load(Adapt, "cpu", "adapt")

Every stage keeps its dataclass beside its code; a field without a value in the file is an error, so no
scientific constant can hide as a default in Python. Refused, with file, key and remedy: unknown and missing
keys, '1e-4' as text, true where a number belongs, values out of range, infinities. `READ` collects the keys
handed out; a test compares them with what dvc.yaml declares.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

T = TypeVar("T")
PARAMS = "params.yaml"
READ: set[str] = set()  # dotted keys of every value handed out in this process


class ParamError(ValueError):
    """A mistake in params.yaml; the message names file and key and says what to write instead."""


@dataclasses.dataclass(frozen=True)
class Between:
    """Annotated[float, Between(0, 1)]: the value must lie in [low, high]; None leaves a side open."""

    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.high is None:
            return f"at least {self.low}"
        return f"at most {self.high}" if self.low is None else f"from {self.low} to {self.high}"

    def __contains__(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


Natural = Annotated[int, Between(0)]
Count = Annotated[int, Between(1)]
Share = Annotated[float, Between(0, 1)]
NonNegative = Annotated[float, Between(0)]


def load(cls: type[T], *keys: str, path: str | Path = PARAMS) -> T:
    """Build `cls` from the section at `keys`; ParamError on any mismatch."""
    return _value(cls, _section(keys, path), ".".join(keys), str(path))


def profiles(path: str | Path = PARAMS) -> list[str]:
    """Names of the profiles the file describes: the top-level sections that name models."""
    document = _document(path)
    return [name for name, node in document.items() if isinstance(node, Mapping) and "models" in node]


def keys_at(*keys: str, path: str | Path = PARAMS) -> list[str]:
    """Names inside a section, or the entries of a list (which benchmarks, which methods), in file order."""
    return [str(key) for key in _section(keys, path)]


def raw(*keys: str, path: str | Path = PARAMS) -> Any:
    """A section as it stands, for who describes a pipeline rather than runs it; only the way there is checked."""
    return _section(keys, path)


def checked(hint: Any, value: Any, key: str) -> Any:
    """One value as the type asks for it, as if it stood at `key` of params.yaml; ParamError otherwise."""
    return _value(hint, value, key, PARAMS)


def _document(path: str | Path) -> dict[str, Any]:
    try:
        document = _parsed(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ParamError(f"{path}: not found; run from the repository root") from None
    except YAMLError as error:
        raise ParamError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise ParamError(f"{path}: expected sections by name, found {document!r}")
    return document


@lru_cache(maxsize=1)
def _parsed(text: str) -> Any:
    """Read only: a stage asks for a dozen sections of one file."""
    return YAML(typ="safe").load(text)


def _section(keys: tuple[str, ...], path: str | Path) -> Any:
    node: Any = _document(path)
    for depth, key in enumerate(keys):
        if not isinstance(node, dict) or key not in node:
            have = ", ".join(map(str, node)) if isinstance(node, dict) else repr(node)
            _refuse(str(path), ".".join(keys[: depth + 1]), f"missing; found here: {have}")
        node = node[key]
    return node


def _refuse(path: str, key: str, what: str) -> NoReturn:
    raise ParamError(f"{path}: {key}: {what}")


def _value(hint: Any, value: Any, key: str, path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        result = _value(arguments[0], value, key, path)
        for allowed in arguments[1:]:
            if result is not None and result not in allowed:
                _refuse(path, key, f"{value!r} is out of range; write a value {allowed}")
        return result
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, value, key, path)
    if origin is tuple:
        if not isinstance(value, list):
            _refuse(path, key, f"{value!r} is not a list; write [..., ...]")
        if not value:
            READ.add(key)
        return tuple(_value(arguments[0], item, f"{key}[{i}]", path) for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            _refuse(path, key, f"{value!r} is not a section of names")
        return {str(name): _value(arguments[1], item, f"{key}.{name}", path) for name, item in value.items()}
    if origin in (types.UnionType, typing.Union):
        return _union(arguments, value, key, path)
    READ.add(key.split("[")[0])
    if origin is Literal:
        if any(type(value) is type(word) and value == word for word in arguments):
            return value
        _refuse(path, key, f"{value!r} is not one of {', '.join(map(str, arguments))}")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        found = f"text {value!r}" if isinstance(value, str) else repr(value)
        wanted = "null" if hint is type(None) else hint.__name__
        _refuse(path, key, f"{found} is not of type {wanted}; write it plain, without quotes")
    if hint is float and not math.isfinite(value):
        _refuse(path, key, f"{value!r} is not finite")
    return value


def _union(arguments: tuple[Any, ...], value: Any, key: str, path: str) -> Any:
    """None or one alternative; sections are told apart by the Literal fields they all have."""
    if value is None and type(None) in arguments:
        READ.add(key)
        return None
    sections = [hint for hint in arguments if dataclasses.is_dataclass(hint)]
    if isinstance(value, dict) and sections:
        words = [_words(hint) for hint in sections]
        shared = [name for name in words[0] if all(name in tags for tags in words)]
        fitting = [
            hint
            for hint, tags in zip(sections, words, strict=True)
            if all(value.get(name) in tags[name] for name in shared)
        ]
        if len(fitting) == 1:
            return _value(fitting[0], value, key, path)
        choices = "; ".join(
            f"{name}: {', '.join(str(word) for tags in words for word in tags[name])}" for name in shared
        )
        found = {name: value.get(name) for name in shared}
        _refuse(path, key, f"{found} does not say which section this is; known {choices}")
    plain = [hint for hint in arguments if hint is not type(None) and not dataclasses.is_dataclass(hint)]
    if len(plain) == 1:
        return _value(plain[0], value, key, path)
    for hint in plain:
        try:
            return _value(hint, value, key, path)
        except ParamError:
            continue
    _refuse(path, key, f"{value!r} is none of {', '.join(str(hint) for hint in arguments)}")


def _words(cls: Any) -> dict[str, tuple[Any, ...]]:
    hints = typing.get_type_hints(cls)
    return {name: typing.get_args(h) for name, h in hints.items() if typing.get_origin(h) is Literal}


def _dataclass(cls: Any, node: Any, key: str, path: str) -> Any:
    if not isinstance(node, dict):
        _refuse(path, key, f"{node!r} is not a section of names")
    names = [field.name for field in dataclasses.fields(cls)]
    required = [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if unknown := [str(name) for name in node if name not in names]:
        _refuse(path, f"{key}.{unknown[0]}", f"unknown; known here: {', '.join(names) or 'nothing'}")
    if missing := [name for name in required if name not in node]:
        _refuse(path, f"{key}.{missing[0]}", "missing; add it to this section")
    hints = typing.get_type_hints(cls, include_extras=True)
    values = {name: _value(hints[name], value, f"{key}.{name}", path) for name, value in node.items()}
    try:
        return cls(**values)
    except ParamError:
        raise
    except ValueError as error:  # a check across fields in __post_init__
        raise ParamError(f"{path}: {key}: {error}") from None
