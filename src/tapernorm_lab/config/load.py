"""Read YAML or JSON into the models of `config`, with one line per fault.

Values that YAML 1.1 reads differently from how they look, such as 010 or 1:30, are refused with their line number.
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
_VALUES = 100_000  # most values of a document after its aliases are expanded


class ConfigError(UserError):
    """A setting is unknown, missing or impossible; the message names it, the rule and the remedy."""


class YamlError(UserError):
    """The text is not YAML, or holds a value that is refused here; the message names the line."""


def read_yaml(text: str) -> Any:
    """Return the value of one YAML document. Aliases are copied, so that no two parts share an object.

    Raises:
        YamlError: the text is not YAML or repeats a key. It holds an octal or base-60 number or a date. Its aliases
            are recursive, or expand to more than 100,000 values.
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
        raise YamlError("it is nested too deeply, or an alias refers to a node that contains it") from None
    except YamlError:
        raise
    except ValueError:  # an integer beyond Python's digit limit, or a value that contradicts its tag
        raise YamlError("it holds an integer with too many digits, or a tag that does not fit its value") from None


@cache
def _loader() -> Any:
    """Return the YAML loader class. PyYAML is imported on the first call, because `tapernorm --help` needs none."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
            node = super().compose_scalar_node(anchor)
            kind, text = node.tag.rpartition(":")[2], node.value
            if node.style is None:  # not quoted
                if kind == "int" and _OCTAL.fullmatch(text):
                    said = f"YAML reads {text} as the octal number {int(text, 8)}: write it in decimal, or quote it"
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
                    said = f"the key {key.value!r} is already given in line {earlier + 1}: keep one of them"
                    raise _fault(key.start_mark, said)
                lines[key.tag, key.value] = key.start_mark.line
            return node

    return Loader


def _fault(mark: Any, said: str) -> YamlError:
    return YamlError(f"line {mark.line + 1}: {said}" if mark is not None else said)


def _unshared(value: Any, count: Iterator[int]) -> Any:
    if next(count) > _VALUES:
        raise YamlError(f"it has more than {_VALUES:,} values after its aliases are expanded: use fewer aliases")
    if isinstance(value, dict):
        return {key: _unshared(item, count) for key, item in value.items()}
    return [_unshared(item, count) for item in value] if isinstance(value, list) else value


def parse(model: type[Model], raw: Any, where: str) -> Model:
    """Validate `raw` as `model`; `where` names its origin in messages.

    Raises:
        ConfigError: `raw` is not valid. The message has one line per fault: its key, the rule and, for an unknown or
            missing key, the valid keys.
    """
    with faults_named(model, where):
        return model.model_validate(raw)


@contextmanager
def faults_named(model: type[BaseModel], where: str) -> Iterator[None]:
    """Replace pydantic's ValidationError by a ConfigError like that of `parse`, inside a `with` block."""
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
    """Return the valid keys of the nested model at `path`."""
    current = model
    for key in path:
        if not key.isdigit():
            current = next(_models_in(current.model_fields[key].annotation))
    return sorted(current.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models inside a field's type annotation, such as Stage in `tuple[Stage, ...] | None`."""
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
        raise ConfigError(f"{path} holds {found}, but a config is a mapping of settings; see config/demo.yaml")
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
            raise ConfigError(f"--set {override!r}: {whole} is a list; set all of it with --set '{whole}=[...]'")
    if not isinstance(node, dict) or last not in node:
        raise ConfigError(f"--set {override!r}: the config has no setting {key!r}")
    try:
        node[last] = read_yaml(value)
    except YamlError as error:
        raise ConfigError(f"--set {override!r}: the value is not YAML: {error}") from None


def json_schema() -> str:
    """Return the JSON schema of `Config`, the content of workflow/schemas/config.schema.json."""
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps({"$schema": dialect, **Config.model_json_schema()}, indent=2) + "\n"
