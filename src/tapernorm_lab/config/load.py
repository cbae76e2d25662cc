"""Reading configs: from YAML or JSON to the models of `config`, with one clear line per fault.

YAML means what it looks like: what YAML 1.1 reads otherwise than people write it is refused, by its line.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tapernorm.util.errors import UserError

from .run import Config

Model = TypeVar("Model", bound=BaseModel)
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_VALUES = 100_000  # of a document with its aliases written out


class ConfigError(UserError):
    """A setting is unknown, missing or impossible; the message names it, the rule and the remedy."""


class YamlError(UserError):
    """Text that is no YAML, or is refused here; the message names the line."""


def read_yaml(text: str) -> Any:
    """The value of one YAML document; no part of it is shared, whatever its aliases.

    Raises:
        YamlError: the text is no YAML, gives a key twice, or holds a number in octal or base 60, a date, or aliases
            that hold themselves or grow without bound.
    """
    import yaml

    try:
        return _unshared(_loader()(text).get_single_data(), itertools.count())
    except yaml.MarkedYAMLError as error:
        said = ", ".join(part for part in (error.context, error.problem) if part)
        raise _fault(error.problem_mark or error.context_mark, said) from None
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from None
    except RecursionError:
        raise YamlError("it is nested too deeply, or an alias stands inside its own node") from None
    except YamlError:
        raise
    except ValueError:  # Python's limit on the digits of an integer, or a value of another kind than its tag says
        raise YamlError("it holds an integer of too many digits, or a tag that does not fit its value") from None


@cache
def _loader() -> Any:
    """The class that reads YAML; PyYAML is loaded with the first text, for the help of the command line needs none."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
            node = super().compose_scalar_node(anchor)
            kind, text = node.tag.rpartition(":")[2], node.value
            if node.style is None:  # not quoted
                if kind == "int" and _OCTAL.fullmatch(text):
                    said = f"YAML reads {text} as octal, {int(text, 8)}: write the number you mean"
                    raise _fault(node.start_mark, said)
                if kind in ("int", "float") and ":" in text:
                    raise _fault(
                        node.start_mark, f"YAML reads {text} as a number in base 60: quote it, or write the number"
                    )
                if kind == "timestamp":
                    raise _fault(node.start_mark, f"YAML reads {text} as a date: quote it")
            return node

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            lines: dict[tuple[str, str], int] = {}
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if (earlier := lines.get((key.tag, key.value))) is not None:
                    said = f"the key {key.value!r} stands in line {earlier + 1} already: leave one"
                    raise _fault(key.start_mark, said)
                lines[key.tag, key.value] = key.start_mark.line
            return node

    return Loader


def _fault(mark: Any, said: str) -> YamlError:
    return YamlError(f"line {mark.line + 1}: {said}" if mark is not None else said)


def _unshared(value: Any, count: Iterator[int]) -> Any:
    if next(count) > _VALUES:
        raise YamlError(f"with its aliases written out it has more than {_VALUES:,} values")
    if isinstance(value, dict):
        return {key: _unshared(item, count) for key, item in value.items()}
    return [_unshared(item, count) for item in value] if isinstance(value, list) else value


def parse(model: type[Model], raw: Any, where: str) -> Model:
    """Validate `raw` as `model`.

    Raises:
        ConfigError: with one line per fault: its place, what is wrong and, for a misspelt or
            missing key, the valid ones.
    """
    with faults_named(model, where):
        return model.model_validate(raw)


@contextmanager
def faults_named(model: type[BaseModel], where: str) -> Iterator[None]:
    """Raise ConfigError, as `parse` does, in place of pydantic's error while inside."""
    try:
        yield
    except ValidationError as error:
        faults = "\n".join("  " + _explain(model, e) for e in error.errors())
        raise ConfigError(f"{where} is not a valid {model.__name__}:\n{faults}") from None


def _explain(model: type[BaseModel], error: Any) -> str:
    path = [str(p) for p in error["loc"]]
    place = ".".join(path) or "(whole)"
    given = error.get("input")
    if error["type"] == "extra_forbidden":
        return f"{place}: unknown key; valid keys here are {', '.join(_keys_at(model, path[:-1]))}"
    if error["type"] == "missing" and isinstance(error["loc"][-1], int):
        return f"{'.'.join(path[:-1])}: too few values (got {given!r})"
    if error["type"] == "missing":
        return f"{place}: missing; the keys needed here are {', '.join(_keys_at(model, path[:-1]))}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"].startswith("string_") and isinstance(given, str) and not given.strip():
        message = "it must not be empty"
    shown = f" (got {given!r})" if isinstance(given, str | int | float | bool | None) else ""
    if isinstance(given, bool):
        shown += "; YAML reads yes, no, on and off as true and false: quote such a word"
    return f"{place}: {message}{shown}"


def _keys_at(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Valid keys of the nested model at `path`."""
    current = model
    for key in path:
        if not key.isdigit():
            current = next(_models_in(current.model_fields[key].annotation))
    return sorted(current.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a field's type is made of, as Stage in `tuple[Stage, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _models_in(part)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML config and apply `key.path=value` overrides (values are YAML).

    Raises:
        ConfigError: the file is missing or not YAML, or a setting is invalid.
    """
    try:
        raw = read_yaml(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no config file {str(path)!r}; the shipped ones are in config/") from None
    except OSError as error:
        raise ConfigError(
            f"cannot read the config {path}: {error.strerror}; give a file such as config/demo.yaml"
        ) from None
    except (YamlError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(raw, dict):
        found = "nothing" if raw is None else f"a {type(raw).__name__}"
        raise ConfigError(f"{path} holds {found}, and a config is a mapping of settings, such as config/demo.yaml")
    for override in overrides:
        _apply_override(raw, override)
    return parse(Config, raw, str(path))


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override!r}: write it as key.path=value")
    *parents, last = key.split(".")
    node: Any = raw
    for place, name in enumerate(parents):
        node = node.get(name) if isinstance(node, dict) else None
        if isinstance(node, list):
            whole = ".".join(parents[: place + 1])
            raise ConfigError(f"--set {override!r}: {whole} is a list, which is set as a whole: --set '{whole}=[...]'")
    if not isinstance(node, dict) or last not in node:
        raise ConfigError(f"--set {override!r}: the config has no setting {key!r}")
    try:
        node[last] = read_yaml(value)
    except YamlError as error:
        raise ConfigError(f"--set {override!r}: the value is not YAML: {error}") from None


def json_schema() -> str:
    """JSON schema of `Config`, as workflow/schemas/config.schema.json holds it."""
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps({"$schema": dialect, **Config.model_json_schema()}, indent=2) + "\n"
