"""What a user asks of `tapernorm taper`, and whether it can be, as far as that shows without a model: no torch here."""

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
HELD_OUT = "held-out"  # the part of the training text that no step sees
KIND = "taper"  # what its output folder is marked as


@dataclass(frozen=True)
class Request:
    """What a user asks for; `OPTIONS` says what each field means. None is a default by the model's size."""

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


OPTIONS = {  # field -> how its option is typed, as the command line describes options; its help
    "model": ("--model PATH_OR_ID!", "folder, .gguf or hub id; never remote code"),
    "data": (
        "--data TEXT+!",
        f"a .txt, .jsonl or .parquet file, a glob, or one of {', '.join(NAMED)}",
    ),
    "steps": ("--steps STEPS!", "optimizer steps, at least 10"),
    "out": ("--out DIR!", "run folder; the export is its export/"),
    "overwrite": ("--overwrite", "delete what another job of this verb wrote into --out; nothing else"),
    "final": ("--final", "taper the final norm too (All-Taper)"),
    "sites": ("--sites PATTERN+", "taper only the internal norms of these names; default: all"),
    "level_weight": ("--level X", "weight of a loss that levels token scales, in place of the scale loss; try 0.2"),
    "keep_norms": ("--keep-norms", "a control: the same training, every norm kept"),
    "precision": ("--precision float32|bf16", "bf16: autocast, weights stay float32; default: bf16 on a GPU"),
    "form": ("--form stock|normfree", "of the export; default: stock where the model has it"),
    "scored": ("--score NAME=TEXT+", "more text to score, never trained on"),
    "field": ("--field NAME", "key or column that holds the text; default: text"),
    "valid_fraction": ("--valid-fraction X", "of documents, held out by their hash; default: 0.05"),
    "lr": ("--lr X", "peak learning rate; default: by the model's size"),
    "batch": ("--batch ROWS", "rows per step; default: by the model's size"),
    "context": ("--context TOKENS", "tokens of a row; default: the model's, at most 1024"),
    "micro_batch": ("--micro-batch ROWS", "rows per forward pass: fewer save memory; part of what --level computes"),
    "seed": ("--seed SEED", "default: 1"),
    "threads": ("--threads THREADS", "CPU threads; default: all"),
    "device": ("--device auto|cpu|cuda", "default: auto"),
    "linear": ("--linear aten|onednn|auto", "kernel of float32 linear maps on a CPU; default: auto, the faster one"),
}
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {  # field -> what it may be where it is given, in words
    "model": (bool, "a folder, a .gguf file or a hub name"),
    "data": (bool, "at least one text"),
    "steps": (lambda steps: 10 <= steps < 2**31, "at least 10 steps, which a taper needs"),
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
    """The option that a field of `Request` is typed as."""
    return OPTIONS[field][0].split()[0]


@dataclass(frozen=True)
class Texts:
    """The texts of a request, each file once."""

    corpora: Mapping[str, tuple[DataConfig, ...]]  # HELD_OUT is what is trained on; the others are scored
    given: Mapping[str, str]  # corpus -> the option and its words
    repeated: tuple[str, ...]  # what was given again


def check(request: Request) -> Texts:
    """The texts of a request that can be, as far as no model is needed to tell.

    Raises:
        UserError: an option is out of range or does not go with another, a text cannot be found, or a name is taken.
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
    given = [option_of(name) for name in ("final", "sites", "level_weight", "form") if getattr(request, name)]
    if request.keep_norms and given:
        raise UserError(f"--keep-norms tapers and exports nothing, and {', '.join(given)} ask for that: leave them out")
