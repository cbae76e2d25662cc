"""What a user asks of `tapernorm taper`, and whether it can be, as far as that shows without a model: no torch here."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tapernorm.util.errors import UserError, settings_named

from ..config.load import parse
from ..config.sections import (
    NAME,
    NAME_LENGTH,
    OWN_SPLIT,
    DataConfig,
)
from ..data.text_files import find_files
from ..training.gpu_slots import most_threads
from ..training.outputs import require_kind

NAMED = tuple(name for name in get_args(DataConfig.model_fields["source"].annotation) if name != "text")
HELD_OUT = "held-out"  # the part of the training text that no step sees
KIND = "taper"  # what its output folder is marked as


@dataclass(frozen=True)
class Request:
    """What a user asks for; None is a default by the model's size."""

    model: str  # folder or hub name
    data: tuple[str, ...]  # files, globs, or names of `NAMED`
    steps: int
    out: Path
    final: bool = False  # taper the final norm too
    sites: tuple[str, ...] | None = None  # patterns of the internal norms to taper; None: all
    level_weight: float = 0.0  # of the loss that levels the scales at every tapered norm
    keep_norms: bool = False  # a control: the same training with every norm kept
    field: str = "text"  # of a JSON line or Parquet row
    valid_fraction: float = 0.05  # of documents, held out by their hash
    scored: tuple[tuple[str, str], ...] = ()  # (name, data): texts that are only scored
    lr: float | None = None
    batch: int | None = None  # rows per optimizer step
    context: int | None = None  # tokens of a row
    micro_batch: int | None = None  # rows per forward pass
    seed: int = 1
    form: Literal["stock", "normfree"] | None = None
    precision: Literal["float32", "bf16"] | None = None  # bf16: autocast, weights stay float32
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    overwrite: bool = False  # delete another job's output in `out`


@dataclass(frozen=True)
class Texts:
    """The texts of a request, each file once."""

    corpora: Mapping[str, tuple[DataConfig, ...]]  # HELD_OUT is what is trained on; the others are scored
    given: Mapping[str, str]  # corpus -> the option and its words
    repeated: tuple[str, ...]  # what was given again


@dataclass(frozen=True)
class _Rule:
    """What an option may be where it is given."""

    field: str
    option: str
    holds: Callable[[Any], bool]
    words: str


_RULES = (
    _Rule("model", "--model", bool, "a folder, a .gguf file or a hub name"),
    _Rule("data", "--data", bool, "at least one text"),
    _Rule("steps", "--steps", lambda steps: 10 <= steps < 2**31, "at least 10 steps, which a taper needs"),
    _Rule("lr", "--lr", lambda lr: 0 < lr < math.inf, "a finite number above 0"),
    _Rule("batch", "--batch", lambda rows: 1 <= rows < 2**31, "at least 1 row"),
    _Rule("micro_batch", "--micro-batch", lambda rows: 1 <= rows < 2**31, "at least 1 row"),
    _Rule("context", "--context", lambda tokens: 2 <= tokens < 2**31, "at least 2 tokens"),
    _Rule("seed", "--seed", lambda seed: 0 <= seed < 2**63, "an integer from 0 to 2^63 - 1"),
    _Rule("valid_fraction", "--valid-fraction", lambda share: 0 < share < 1, "a fraction above 0 and below 1"),
    _Rule("level_weight", "--level", lambda weight: 0 <= weight < math.inf, "a finite number, 0 or more"),
    _Rule("threads", "--threads", lambda count: 1 <= count <= most_threads(), f"1 to {most_threads()} threads"),
    _Rule("field", "--field", bool, "the name of a key or column"),
)


def check(request: Request) -> Texts:
    """The texts of a request that can be, as far as no model is needed to tell.

    Raises:
        UserError: an option is out of range or does not go with another, a text cannot be found, or a name is taken.
    """
    for rule in _RULES:
        value = getattr(request, rule.field)
        if value is not None and not rule.holds(value):
            shown = f"{value:g}" if isinstance(value, float) else repr(value)
            raise UserError(f"{rule.option} {shown} is out of range: give {rule.words}")
    _require_whole_control(request)
    _require_names([name for name, _ in request.scored])
    repeated: list[str] = []
    known: set[object] = set()
    trained = [_once(text, request, request.valid_fraction, known, repeated) for text in request.data]
    corpora = {HELD_OUT: tuple(data for data in trained if data is not None)}
    given = {HELD_OUT: f"--data {' '.join(request.data)}"}
    for name, text in request.scored:
        with settings_named(words_of(name)):
            data = _once(text, request, 1.0, set(), repeated)
        assert data is not None  # nothing was known before
        corpora[name], given[name] = (data,), f"--score {name}={text}"
    return Texts(corpora, given, tuple(dict.fromkeys(repeated)))


def words_of(corpus: str) -> dict[str, str]:
    """What the user calls a text and its parts, for `settings_named`."""
    if corpus == HELD_OUT:
        return {"the valid split": "the part of --data that is held out", "the train split": "the rest of --data"}
    return {"data.files": f"--score {corpus}", "the valid split": f"the text --score {corpus}"}


def data_config(text: str, field: str, valid_fraction: float, files: tuple[str, ...] | None = None) -> DataConfig:
    """The text that a name of `NAMED`, a file or a glob stands for; `files` are those of a glob that count."""
    named = text in NAMED
    raw = {
        "source": text if named else "text",
        "files": [] if named else files or [text],
        "field": None if named else field,
        "part": None,
        "valid_fraction": None if text in OWN_SPLIT else valid_fraction,
        "max_train_documents": None,
    }
    return parse(DataConfig, raw, f"the text {text!r}")


def require_output(request: Request) -> None:
    """Raise UserError where a run cannot be written into `out`: a file, the model's own folder, or somebody else's."""
    out = request.out
    for place in (out, *out.parents):
        if place.exists():
            if not place.is_dir():
                raise UserError(f"--out {out}: {place} is a file: name another folder")
            break
    if out.exists() and Path(request.model).exists() and out.samefile(request.model):
        raise UserError(f"--out {out} is the folder of --model, which a run would replace: name another folder")
    require_kind(out, KIND, overwrite=request.overwrite)


def _once(
    text: str, request: Request, valid_fraction: float, known: set[object], repeated: list[str]
) -> DataConfig | None:
    """A text without what is `known`, to which it is added; what was is added to `repeated`. None: nothing is left."""
    if text in NAMED:
        if text in known:
            repeated.append(text)
            return None
        known.add(text)
        return data_config(text, request.field, valid_fraction)
    files = find_files([text])
    new = []
    for path in files:
        status = path.stat()
        if (identity := (status.st_dev, status.st_ino)) in known:  # the same file, whatever its names
            repeated.append(str(path))
        else:
            known.add(identity)
            new.append(str(path))
    if not new:
        return None
    return data_config(text, request.field, valid_fraction, None if len(new) == len(files) else tuple(new))


def _require_names(names: list[str]) -> None:
    for name in names:
        if not NAME.fullmatch(name) or len(name.encode()) > NAME_LENGTH:
            raise UserError(
                f"--score: {name[:80]!r} is no name: up to {NAME_LENGTH} letters, digits, underscores and dashes"
            )
    if len({HELD_OUT, *names}) != 1 + len(names):
        raise UserError(f"--score: names must differ from each other and from {HELD_OUT!r}")


def _require_whole_control(request: Request) -> None:
    """Raise UserError where a control is asked to taper."""
    options = ("final", "sites", "level", "form")
    asked = (request.final, request.sites, request.level_weight, request.form)
    given = [f"--{option}" for option, value in zip(options, asked, strict=True) if value]
    if request.keep_norms and given:
        raise UserError(f"--keep-norms tapers and exports nothing, and {', '.join(given)} ask for that: leave them out")
