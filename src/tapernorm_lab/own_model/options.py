"""The options of `tapernorm taper`, and the checks that need no model. This module does not import torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tapernorm.util.errors import UserError, settings_named

from ..config.load import parse
from ..config.sections import NAME, NAME_LENGTH, OWN_SPLIT, DataConfig
from ..data.text_files import find_files
from ..training.gpu_slots import most_threads
from ..training.outputs import require_kind

NAMED = tuple(name for name in get_args(DataConfig.model_fields["source"].annotation) if name != "text")
HELD_OUT = "held-out"  # the valid split of --data, which no step trains on
KIND = "taper"  # the kind that the mark of the output folder names


@dataclass(frozen=True)
class Request:
    """The options as the user typed them. `OPTIONS` describes each field. None: `job_of` chooses by the model."""

    model: str
    data: tuple[str, ...]
    steps: int
    out: Path
    overwrite: bool = False
    final: bool = False
    sites: tuple[str, ...] | None = None
    level_weight: float = 0.0
    keep_norms: bool = False
    precision: Literal["float32", "bf16"] | None = None
    form: Literal["stock", "normfree"] | None = None
    scored: tuple[tuple[str, str], ...] = ()
    field: str = "text"
    valid_fraction: float = 0.05
    lr: float | None = None
    batch: int | None = None
    context: int | None = None
    micro_batch: int | None = None
    seed: int = 1
    threads: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    linear: Literal["aten", "onednn", "auto"] = "auto"


OPTIONS = {  # field -> its option, in the notation of `cli.arguments.options`, and its help
    "model": ("--model PATH_OR_ID!", "folder, .gguf file or hub name; remote code is never run"),
    "data": (
        "--data TEXT+!",
        f"text to train on: a .txt, .jsonl or .parquet file, a glob, or one of {', '.join(NAMED)}",
    ),
    "steps": ("--steps STEPS!", "number of optimizer steps, at least 10"),
    "out": ("--out DIR!", "run folder to write into; the export goes into DIR/export"),
    "overwrite": ("--overwrite", "delete the files that another job of this verb wrote into --out, and no others"),
    "final": ("--final", "taper the final norm too (All-Taper); default: only the internal norms"),
    "sites": ("--sites PATTERN+", "taper only the internal norms whose names match; default: all"),
    "level_weight": (
        "--level X",
        "replace the scale loss by a loss of this weight that makes the token scales equal; try 0.2",
    ),
    "keep_norms": (
        "--keep-norms",
        "train a control: the same steps, and with --level the same loss, with every norm kept and no export",
    ),
    "precision": (
        "--precision float32|bf16",
        "bf16: autocast, with the weights in float32; default: bf16 on a GPU, else float32",
    ),
    "form": (
        "--form stock|normfree",
        "form of the export, as in `tapernorm export`; default: stock if the model has that form",
    ),
    "scored": ("--score NAME=TEXT+", "further text to score and not to train on, with a name for it"),
    "field": ("--field NAME", "key of a JSON line or column of a Parquet file that holds the text; default: text"),
    "valid_fraction": ("--valid-fraction X", "fraction of the documents to hold out, chosen by hash; default: 0.05"),
    "lr": ("--lr X", "peak learning rate; default: by model size"),
    "batch": ("--batch ROWS", "rows per optimizer step; default: by model size"),
    "context": ("--context TOKENS", "tokens per row; default: the context of the model, at most 1024"),
    "micro_batch": (
        "--micro-batch ROWS",
        "rows per forward pass; fewer take less memory; changes the numbers only with --level",
    ),
    "seed": ("--seed SEED", "seed of the order of the rows and of dropout; default: 1"),
    "threads": ("--threads THREADS", "number of CPU threads; default: all"),
    "device": ("--device auto|cpu|cuda", "where to compute; auto: on a GPU if there is one; default: auto"),
    "linear": (
        "--linear aten|onednn|auto",
        "kernel of float32 linear maps on a CPU; auto: the faster one on the model's shapes; default: auto",
    ),
}
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {  # field -> check of a given value, and the rule in words
    "model": (bool, "a folder, a .gguf file or a hub name"),
    "data": (bool, "at least one text"),
    "steps": (lambda steps: 10 <= steps < 2**31, "at least 10 steps, the least for a taper"),
    "lr": (lambda lr: 0 < lr < math.inf, "a finite number above 0"),
    **dict.fromkeys(("batch", "micro_batch"), (lambda rows: 1 <= rows < 2**31, "at least 1 row")),
    "context": (lambda tokens: 2 <= tokens < 2**31, "at least 2 tokens"),
    "seed": (lambda seed: 0 <= seed < 2**63, "an integer from 0 to 2^63 - 1"),
    "valid_fraction": (lambda share: 0 < share < 1, "a fraction above 0 and below 1"),
    "level_weight": (lambda weight: 0 <= weight < math.inf, "a finite number, 0 or more"),
    "threads": (lambda count: 1 <= count <= most_threads(), f"1 to {most_threads()} threads"),
    "field": (bool, "the name of a key or column"),
}


def option_of(field: str) -> str:
    """Return the option of a field of `Request`."""
    return OPTIONS[field][0].split()[0]


@dataclass(frozen=True)
class Texts:
    """The texts of a request, each file once."""

    corpora: Mapping[str, tuple[DataConfig, ...]]  # by name; HELD_OUT is the text of --data, the others are scored only
    given: Mapping[str, str]  # name -> the option and its value, as typed
    repeated: tuple[str, ...]  # files and texts that were given more than once


def check(request: Request) -> Texts:
    """Check everything in a request that needs no model, and return its texts.

    Raises:
        UserError: an option is out of range or contradicts another, a text does not exist, or two names are equal.
    """
    for field, (holds, rule) in _RULES.items():
        value = getattr(request, field)
        if value is not None and not holds(value):
            shown = f"{value:g}" if isinstance(value, float) else repr(value)
            raise UserError(f"{option_of(field)} {shown} is out of range: give {rule}")
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
        assert data is not None  # the set of known files was empty
        corpora[name], given[name] = (data,), f"--score {name}={text}"
    return Texts(corpora, given, tuple(dict.fromkeys(repeated)))


def words_of(corpus: str) -> dict[str, str]:
    """The options that messages name in place of the settings of a text, for `settings_named`."""
    if corpus == HELD_OUT:
        return {"the valid split": "the part of --data that is held out", "the train split": "the rest of --data"}
    return {"data.files": f"--score {corpus}", "the valid split": f"the text --score {corpus}"}


def data_config(text: str, field: str, valid_fraction: float, files: tuple[str, ...] | None = None) -> DataConfig:
    """Return the config of a text: a name in `NAMED`, a file or a glob. `files` replaces the files of the glob."""
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
    """Check that a run may write into --out.

    Raises:
        UserError: it is a file, the folder of --model, or a folder that another job or nobody marked.
    """
    out = request.out
    for place in (out, *out.parents):
        if place.exists():
            if not place.is_dir():
                raise UserError(f"--out {out}: {place} is a file: name another folder")
            break
    if out.exists() and Path(request.model).exists() and out.samefile(request.model):
        raise UserError(f"--out {out} is the folder of --model, whose files a run would replace: name another folder")
    require_kind(out, KIND, overwrite=request.overwrite)


def _once(
    text: str, request: Request, valid_fraction: float, known: set[object], repeated: list[str]
) -> DataConfig | None:
    """Return a text without the files in `known`, or None if no file is left.

    New files are added to `known`, others to `repeated`.
    """
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
        if (identity := (status.st_dev, status.st_ino)) in known:  # one file, under whatever path
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
                f"--score: {name[:80]!r} cannot be a name: give up to {NAME_LENGTH} letters, digits, _ and -"
            )
    if len({HELD_OUT, *names}) != 1 + len(names):
        raise UserError(f"--score: two names are equal, or one is {HELD_OUT!r}: rename one")


def _require_whole_control(request: Request) -> None:
    """Raise UserError if --keep-norms comes with an option that a control would ignore.

    With --level, --final and --sites say at which norms that loss acts.
    """
    unused = ("form",) if request.level_weight > 0 else ("final", "sites", "form")
    given = [option_of(name) for name in unused if getattr(request, name)]
    if request.keep_norms and given:
        more = "" if request.level_weight > 0 else " without --level"
        raise UserError(
            f"--keep-norms tapers and exports nothing, so it takes no {', '.join(given)}{more}: remove one or the other"
        )
