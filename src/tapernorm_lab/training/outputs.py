"""The files that a verb may write: files that do not exist, and files that it wrote itself.

A folder has a mark, `.tapernorm.json`. It names the job that the folder belongs to, and the verb that wrote each file.

- A job writes into a folder that is absent, empty, or its own. Another job's folder is refused, with the differences.
- A file is replaced only if the mark lists it.

`overwrite` deletes the files that the mark lists for the other job, and nothing else.
"""

import copy
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapernorm.checkpoints.tokenizer_files import TOKENIZER_FILES
from tapernorm.util.atomic_files import discard, is_partial, parse_json, write_json
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import digest

from .run_lock import LOCK, run_lock, waiting

MARK = ".tapernorm.json"
SCHEMA_VERSION = 1
_SHOWN = 3  # names of files, or settings that differ, in one message
_LONGEST = 40  # characters of a setting in a message
_TRAINING = (
    *("metrics.jsonl", "model.safetensors", "config.json", "generation_config.json"),
    *("result.json", "resume", "tensorboard"),
)
FILES = {  # kind -> names of the files and folders that a job of that kind writes into its folder
    "corpus": ("train.jsonl", "valid.jsonl", "manifest.json"),
    "tokenizer": ("tokenizer.model", *TOKENIZER_FILES, "manifest.json"),
    **dict.fromkeys(("tokens", "blocks"), ("train.bin", "valid.bin", "manifest.json")),
    **dict.fromkeys(("pretrain", "arm", "base", "finetune"), _TRAINING),
    "fold": ("unfused", "fused", "result.json"),
    "taper": (*_TRAINING, "data", "tokenizer", "scores.json", "spread.json", "last-good"),
}
_VERBS = {"blocks": "tokens", "arm": "pretrain", "base": "pretrain"}  # kind -> the verb, where it has another name
_PREPARED = ("data", "tokenizer")  # of a taper: made of the user's files, and anew wherever these are others


@dataclass(frozen=True)
class Work:
    """One job that writes a folder.

    Attributes:
        kind: kind of its output, a key of `FILES`.
        identity: everything that defines its output, as plain JSON values.
    """

    kind: str
    identity: Mapping[str, Any]

    @property
    def fingerprint(self) -> str:
        """Digest of the identity."""
        return digest(self.identity)

    def is_same(self, other: "Work") -> bool:
        """Whether both are the same job; the identity of one may have been read from a file."""
        return (self.kind, self.fingerprint) == (other.kind, other.fingerprint)


@contextmanager
def output_folder(folder: Path, work: Work, *, overwrite: bool = False) -> Iterator[None]:
    """Hold `folder` for `work` inside a `with` block: locked, marked, and without another job's files.

    Raises:
        UserError: the folder belongs to another job, holds files that no mark lists, or is held by another process.
    """
    require_writable(folder, work, overwrite=overwrite)
    with run_lock(folder):
        require_writable(folder, work, overwrite=overwrite)  # nobody else can write there from here on
        owner = _owner_of(folder)
        if owner is not None and not owner.is_same(work):
            for name in _lost(folder, owner):
                discard(folder / name)
        with _mark_of(folder) as mark:
            others = {name: kind for name, kind in mark["files"].items() if owner is None or kind != owner.kind}
            mark["job"] = {"kind": work.kind, "identity": work.identity}
            mark["files"] = others | dict.fromkeys(FILES[work.kind], work.kind)
        try:
            yield
        finally:
            if not _names(folder):  # nothing was written, so the folder belongs to no job
                (folder / MARK).unlink(missing_ok=True)


def require_writable(folder: Path, work: Work, *, overwrite: bool = False) -> None:
    """Check that `work` may write into `folder`, and change nothing.

    Raises:
        UserError: it may not; see `output_folder`.
    """
    require_kind(folder, work.kind, overwrite=overwrite)
    owner = _owner_of(folder)
    if owner is None or overwrite or owner.is_same(work) or not (lost := _lost(folder, owner)):
        return
    raise UserError(
        f"{folder} holds another job of `{_verb_of(owner.kind)}` ({_differences(owner, work)}), and "
        f"{', '.join(lost)} would be lost: name another --out, or delete them (--overwrite does)"
    )


def require_kind(folder: Path, kind: str, *, overwrite: bool = False) -> None:
    """Check that `folder` holds nothing but the output of a job of this kind.

    This part of `require_writable` needs no job.

    Raises:
        UserError: it holds other files, or the output of another kind.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, but --out must be a folder: name another --out")
    owner = _owner_of(folder)
    if owner is None and (foreign := _names(folder)):
        raise UserError(
            f"{folder} holds {_some(foreign)}, and no {MARK} there says that `{_verb_of(kind)}` wrote it: name a new "
            "folder for --out, or move that away"
        )
    if owner is not None and owner.kind != kind and not overwrite and (there := _there(folder, owner)):
        raise UserError(
            f"{folder} holds the output of `{_verb_of(owner.kind)}` ({owner.kind}: {_some(there)}), and this is {kind} "
            f"of `{_verb_of(kind)}`: name another --out, or delete it (--overwrite does)"
        )


@contextmanager
def output_files(paths: Iterable[Path], verb: str) -> Iterator[None]:
    """Claim `paths` for `verb`, which writes them inside a `with` block.

    Raises:
        UserError: a path exists, and neither the mark beside it nor its own provenance says that tapernorm wrote it.
    """
    paths = list(paths)
    for path in paths:
        if path.exists() and path.name not in _read_mark(path.parent)["files"] and not _tells_its_origin(path):
            raise UserError(f"{path} was not written by tapernorm: name another --out, or move that file away")
    for path in paths:
        with _mark_of(path.parent) as mark:
            mark["files"][path.name] = verb
    try:
        yield
    except BaseException:
        for path in paths:
            if not path.exists():
                with _mark_of(path.parent) as mark:
                    mark["files"].pop(path.name, None)
        raise


def _verb_of(kind: str) -> str:
    """Return the command whose output is of this kind."""
    return f"tapernorm {_VERBS.get(kind, kind)}"


def _owner_of(folder: Path) -> Work | None:
    """Return the job that `folder` belongs to, or None."""
    job = _read_mark(folder).get("job")
    return None if job is None else Work(job["kind"], job["identity"])


def _differences(owner: Work, work: Work) -> str:
    """Describe the settings in which two jobs differ."""
    theirs, ours = _leaves(owner.identity), _leaves(work.identity)
    return _some(
        f"{name.removeprefix('job.')} {_brief(theirs.get(name))} there, {_brief(ours.get(name))} here"
        for name in dict.fromkeys([*theirs, *ours])
        if theirs.get(name) != ours.get(name)
    )


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Return a mapping from dotted place to value, for every value that is not a mapping."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {k: v for key, below in value.items() for k, v in _leaves(below, f"{name}.{key}".strip(".")).items()}


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _some(words: Iterable[str]) -> str:
    found = list(words)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def _names(folder: Path) -> list[str]:
    """List the content of `folder`, without locks, marks, partial files of killed writers and empty folders."""
    return sorted(path.name for path in folder.iterdir() if not _counts_as_nothing(path)) if folder.is_dir() else []


def _counts_as_nothing(path: Path) -> bool:
    if path.is_dir() and not path.is_symlink():
        return all(map(_counts_as_nothing, path.iterdir()))
    return path.name in (LOCK, MARK) or is_partial(path)


def _there(folder: Path, owner: Work) -> list[str]:
    """List the owner's files in `folder`, without checkpoints of a diverged run."""
    listed = [name for name, kind in _read_mark(folder)["files"].items() if kind == owner.kind]
    lying = set(_names(folder))
    return [name for name in listed if name in lying and not (name == "resume" and _diverged(folder / name))]


def _lost(folder: Path, owner: Work) -> list[str]:
    """List the files in `folder` that another job of the same kind would delete."""
    return [name for name in _there(folder, owner) if name not in _PREPARED]


def _diverged(resume: Path) -> bool:
    """Whether all checkpoints belong to runs that diverged, so that no training can resume from them."""
    return resume.is_dir() and all((run / "diverged.json").is_file() for run in resume.iterdir())


@contextmanager
def _mark_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the mark of `folder` for changes, under a lock, because several jobs may write files into one folder."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with waiting("a lock"):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        mark = _read_mark(folder)
        before = copy.deepcopy(mark)
        yield mark
        if "job" not in mark and not mark["files"]:
            (folder / MARK).unlink(missing_ok=True)
        elif mark != before:
            write_json(folder / MARK, mark)
    finally:
        os.close(descriptor)


def _read_mark(folder: Path) -> dict[str, Any]:
    """Return the mark of `folder`, or an empty mark if there is none.

    Raises:
        UserError: the mark is damaged.
    """
    path = folder / MARK
    if not path.is_file():
        return {"schema_version": SCHEMA_VERSION, "files": {}}
    mark = _object_in(path)
    whole = isinstance(mark.get("files"), dict) and ("job" not in mark or {"kind", "identity"} <= {*mark["job"]})
    if mark.get("schema_version") != SCHEMA_VERSION or not whole:
        raise UserError(f"{path} is damaged, so that the owner of the folder is unknown: name another --out")
    return mark


def _tells_its_origin(path: Path) -> bool:
    """Whether a JSON file has the entries that every result of tapernorm has."""
    return path.is_file() and {"schema_version", "kind", "provenance"} <= _object_in(path).keys()


def _object_in(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if it holds none."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
