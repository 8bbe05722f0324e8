"""Job files: one strict YAML loader and the base class of every configuration model.

Promises: a key that is unknown, given twice, of the wrong type or impossible is refused before
anything starts, with file, line, the path of the key and the nearest known key. Scalars follow the
YAML 1.2 core schema (``1e-4`` is a number, ``no`` and ``on`` are text).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from ebbtide.platform.errors import ConfigError

KeyPath = tuple[str | int, ...]
C = TypeVar("C", bound=BaseModel)


class Config(BaseModel):
    """Base of every configuration model: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


LocalFile = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""The path of a file on the machine that reads the job file; ``~`` is the home directory."""


@dataclass(frozen=True)
class _Document:
    """What was read, and where each key stands: its line, or the ``--set`` that gave it."""

    value: Any
    where: str
    lines: Mapping[KeyPath, int]  # 1-based
    overrides: dict[KeyPath, str] = field(default_factory=dict)

    def has(self, path: KeyPath) -> bool:
        """Whether a key is given."""
        return path in self.lines or path in self.overrides

    def place(self, path: KeyPath) -> str:
        """The file and line of a key (or of the nearest key above it), or its ``--set``."""
        for given, text in self.overrides.items():
            shorter = min(len(given), len(path))
            if path and given[:shorter] == path[:shorter]:
                return f"--set {text}"
        while path not in self.lines and path:
            path = path[:-1]
        return f"{self.where}:{self.lines.get(path, 1)}"


class _CoreSchemaLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2's core schema, and no merging of keys."""


_CoreSchemaLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
):
    _CoreSchemaLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}",
        re.compile(rf"^(?:{_pattern})$"),
        [*_first, *([""] * (_tag == "null"))],
    )


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


_CoreSchemaLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def dotted(path: KeyPath) -> str:
    """``("workers", "min")`` -> ``workers.min``."""
    return ".".join(str(part) for part in path)


def _parse(text: str, where: str) -> _Document:
    """YAML text to plain values, with the line of every key; duplicates are refused."""
    lines: dict[KeyPath, int] = {}

    def walk(node: yaml.Node, path: KeyPath) -> None:
        lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            seen: set[Hashable] = set()
            for key_node, value_node in node.value:
                key = loader.construct_object(key_node, deep=True)
                line = key_node.start_mark.line + 1
                if not isinstance(key, str):
                    raise ConfigError(f"{where}:{line}: key {key!r} must be text")
                if key in seen:
                    first = lines[(*path, key)]
                    raise ConfigError(
                        f"{where}:{line}: {dotted((*path, key))} is given twice "
                        f"(first on line {first}); remove one"
                    )
                seen.add(key)
                lines[(*path, key)] = line
                walk(value_node, (*path, key))
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                walk(item, (*path, index))

    try:
        loader = _CoreSchemaLoader(text)
        root = loader.get_single_node()
        if root is None:
            return _Document({}, where, {(): 1})
        walk(root, ())
        return _Document(loader.construct_document(root), where, lines)
    except RecursionError as error:
        raise ConfigError(f"{where}: nested too deeply, or an alias that holds itself") from error
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where}{line}: not valid YAML: {problem}") from error


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is not None or isinstance(annotation, UnionType):
        return [model for arg in get_args(annotation) for model in _models_in(arg)]
    return []


def _known_keys(model: type[BaseModel], path: KeyPath) -> list[str]:
    """The keys that the model knows at ``path`` (the path of the mapping, not of a key in it)."""
    models = [model]
    for part in path:
        models = [
            found
            for owner in models
            for name, field in owner.model_fields.items()
            if part == name
            for found in _models_in(field.annotation)
        ] or models  # an item of a list or a key of a mapping: its model is already known
    return sorted({name for owner in models for name in owner.model_fields})


def _nearest(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    return f"known keys: {', '.join(known)}" if known else "no key is known here"


def _message(error: ErrorDetails, model: type[BaseModel], document: _Document) -> str:
    path: KeyPath = tuple(part for part in error["loc"] if part != "[key]")  # of a mapping
    if error["type"] == "extra_forbidden":
        hint = _nearest(str(path[-1]), _known_keys(model, path[:-1]))
        return f"{document.place(path)}: {dotted(path)} is not a known key; {hint}"
    if error["type"] == "missing":
        return f"{document.place(path)}: {dotted(path)} is missing; add it"
    message = error["msg"].removeprefix("Value error, ")
    named: KeyPath = tuple(message.split(" ", 1)[0].split("."))
    if error["type"] == "value_error" and document.has(named):
        return f"{document.place(named)}: {message}"  # a rule between keys, which names the first
    found = "" if _is_container(error["input"]) else f" (found {error['input']!r})"
    name = dotted(path) or "the file"
    return f"{document.place(path)}: {name}: {message[:1].lower()}{message[1:]}{found}"


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple | BaseModel)


def _coercions(found: Any, valid: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any, str]]:
    """Values that pydantic read as another type than they were written in: text or true as a
    number, a number or text as a boolean."""
    if isinstance(found, Mapping):
        inner = valid.__dict__ if isinstance(valid, BaseModel) else valid
        if isinstance(inner, Mapping):
            for key in found.keys() & inner.keys():
                yield from _coercions(found[key], inner[key], (*path, key))
    elif isinstance(found, list) and isinstance(valid, list | tuple) and len(found) == len(valid):
        for index, (item, valid_item) in enumerate(zip(found, valid, strict=True)):
            yield from _coercions(item, valid_item, (*path, index))
    elif isinstance(valid, bool):
        if not isinstance(found, bool):
            yield path, found, "true or false"
    elif isinstance(valid, int | float) and isinstance(found, str | bool):
        yield path, found, "a number"


def _apply(document: _Document, assignment: str) -> None:
    """``--set optimizer.lr=3e-4``: the value is YAML, the path is dotted."""
    name, equals, text = assignment.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set {assignment}: write KEY.PATH=VALUE")
    *parents, last = path = name.strip().split(".")
    if not all(path):
        raise ConfigError(f"--set {assignment}: write KEY.PATH=VALUE")
    target = document.value
    for part in parents:
        child = target.get(part)
        if child is None:
            child = target[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {assignment}: {part} holds no keys")
        target = child
    target[last] = _parse(text, f"--set {name}").value if text.strip() else None
    document.overrides[tuple(path)] = assignment


def parse(text: str, model: type[C], where: str = "config", overrides: Sequence[str] = ()) -> C:
    """Validate YAML text against a model. Raises ConfigError with every fault, one a line."""
    document = _parse(text, where)
    if not isinstance(document.value, dict):
        raise ConfigError(f"{where}: must be a mapping of keys to values")
    for assignment in overrides:
        _apply(document, assignment)
    try:
        valid = model.model_validate(document.value)
    except ValidationError as error:
        faults = [_message(fault, model, document) for fault in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(faults))) from error
    coerced = [
        f"{document.place(path)}: {dotted(path)}: must be {wanted} (found {found!r})"
        for path, found, wanted in _coercions(document.value, valid)
    ]
    if coerced:
        raise ConfigError("\n".join(sorted(coerced)))
    return valid


def load(path: str | Path, model: type[C], overrides: Sequence[str] = ()) -> C:
    """Read and validate a job file; ``overrides`` are ``KEY.PATH=VALUE`` texts from ``--set``."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return parse(text, model, str(path), overrides)


class _QuotingDumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or our loader would take for something else, as ``0E0``."""


_QuotingDumper.yaml_implicit_resolvers = {
    first: [
        *yaml.SafeDumper.yaml_implicit_resolvers.get(first, []),
        *_CoreSchemaLoader.yaml_implicit_resolvers.get(first, []),
    ]
    for first in {
        *yaml.SafeDumper.yaml_implicit_resolvers,
        *_CoreSchemaLoader.yaml_implicit_resolvers,
    }
}


def dump(config: BaseModel) -> str:
    """The job file of a model, as YAML that :func:`parse` reads back to an equal model."""
    values = config.model_dump(mode="json", exclude_none=True)
    return yaml.dump(values, Dumper=_QuotingDumper, sort_keys=False)
