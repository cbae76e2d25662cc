"""Reading configs: from YAML or JSON to the models of `config`, with one clear line per fault."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from .config import Config
from .errors import UserError

Model = TypeVar("Model", bound=BaseModel)


class ConfigError(UserError):
    """A setting is unknown, missing or impossible; the message names it, the rule and the remedy."""


def parse(model: type[Model], raw: Any, where: str) -> Model:
    """Validate `raw` as `model`.

    Raises:
        ConfigError: with one line per fault: its place, what is wrong and, for a misspelt or
            missing key, the valid ones.
    """
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        faults = "\n".join("  " + _explain(model, e) for e in error.errors())
        raise ConfigError(f"{where} is not a valid {model.__name__}:\n{faults}") from None


def _explain(model: type[BaseModel], error: Any) -> str:
    path = [str(p) for p in error["loc"]]
    place = ".".join(path) or "(whole)"
    if error["type"] == "extra_forbidden":
        return f"{place}: unknown key; valid keys here are {', '.join(_keys_at(model, path[:-1]))}"
    if error["type"] == "missing":
        return f"{place}: missing; the keys needed here are {', '.join(_keys_at(model, path[:-1]))}"
    message = error["msg"].removeprefix("Value error, ")
    given = error.get("input")
    shown = f" (got {given!r})" if isinstance(given, str | int | float | bool | None) else ""
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
    import yaml

    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no config file {str(path)!r}; the shipped ones are in config/") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    for override in overrides:
        _apply_override(raw, override)
    return parse(Config, raw, str(path))


def _apply_override(raw: dict[str, Any], override: str) -> None:
    import yaml

    key, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override!r}: write it as key.path=value")
    *parents, last = key.split(".")
    node: Any = raw
    for name in parents:
        node = node.get(name) if isinstance(node, dict) else None
    if not isinstance(node, dict) or last not in node:
        raise ConfigError(f"--set {override!r}: the config has no setting {key!r}")
    try:
        node[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not YAML: {error}") from None


def json_schema() -> str:
    """JSON schema of `Config`, as workflow/schemas/config.schema.json holds it."""
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps({"$schema": dialect, **Config.model_json_schema()}, indent=2) + "\n"
