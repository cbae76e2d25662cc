"""YAML that means what it looks like: what YAML 1.1 reads otherwise than people write it is refused, by its line."""

import re
from typing import Any

from tapernorm.util.errors import UserError

_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_NODES = 100_000  # of a document with its aliases written out
_DEPTH = 100


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
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _size(node, {})
        return _unshared(loader.construct_document(node))
    except yaml.MarkedYAMLError as error:
        said = ", ".join(part for part in (error.context, error.problem) if part)
        raise _fault(error.problem_mark or error.context_mark, said) from None
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from None
    except RecursionError:
        raise YamlError("it is nested too deeply") from None
    except YamlError:
        raise
    except ValueError:  # Python's limit on the digits of an integer, or a value of another kind than its tag says
        raise YamlError("it holds an integer of too many digits, or a tag that does not fit its value") from None


def _size(node: Any, sizes: dict[int, int | None], depth: int = 0) -> int:
    """Nodes below and with `node`, its aliases written out; `sizes` holds those that are known, None for open ones.

    Raises:
        YamlError: as `read_yaml`.
    """
    if id(node) in sizes:
        known = sizes[id(node)]
        if known is None:
            raise _fault(node.start_mark, "the alias of a node stands inside the node")
        return known
    if depth > _DEPTH:
        raise _fault(node.start_mark, f"more than {_DEPTH} levels are nested")
    sizes[id(node)] = None
    if node.id == "scalar":
        _require_plain_meaning(node)
    if node.id == "mapping":
        _require_distinct_keys(node)
    children = {"scalar": (), "sequence": node.value, "mapping": (part for pair in node.value for part in pair)}
    size = 1 + sum(_size(child, sizes, depth + 1) for child in children[node.id])
    if size > _NODES:
        raise _fault(node.start_mark, f"with its aliases written out it has more than {_NODES:,} nodes")
    sizes[id(node)] = size
    return size


def _require_distinct_keys(node: Any) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if key.id != "scalar":
            continue
        if (key.tag, key.value) in lines:
            earlier = lines[key.tag, key.value] + 1
            raise _fault(key.start_mark, f"the key {key.value!r} stands in line {earlier} already: leave one")
        lines[key.tag, key.value] = key.start_mark.line


def _require_plain_meaning(node: Any) -> None:
    kind, text = node.tag.rpartition(":")[2], node.value
    if node.style is not None:  # quoted
        return
    if kind == "int" and _OCTAL.fullmatch(text):
        raise _fault(node.start_mark, f"YAML reads {text} as octal, {int(text, 8)}: write the number you mean")
    if kind in ("int", "float") and ":" in text:
        raise _fault(node.start_mark, f"YAML reads {text} as a number in base 60: quote it, or write the number")
    if kind == "timestamp":
        raise _fault(node.start_mark, f"YAML reads {text} as a date: quote it")


def _fault(mark: Any, said: str) -> YamlError:
    return YamlError(f"line {mark.line + 1}: {said}" if mark is not None else said)


def _unshared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value
