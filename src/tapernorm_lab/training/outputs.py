"""Who may write where. A verb writes only where nothing lies, or what it wrote itself.

A folder carries a mark, `.tapernorm.json`. The mark says which job the folder belongs to, and which verb wrote each
file. Two rules follow from it:

- A job writes into a folder that is absent, empty, or its own. Another job's folder is refused, with what differs.
- A file is replaced only where the mark lists it.

`overwrite` deletes the files that the mark lists for the other job, and nothing else. Run folders of earlier versions
have no mark: their result.json or their checkpoints tell whose they are.
"""

import fcntl
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapernorm.checkpoints.tokenizer_files import TOKENIZER_FILES
from tapernorm.util.atomic_files import (
    discard,
    is_partial,
    read_json,
    write_json,
)
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import digest

from .run_lock import LOCK, run_lock

MARK = ".tapernorm.json"
SCHEMA_VERSION = 1
_SHOWN = 3  # names of files, or settings that differ, in one message
_LONGEST = 40  # characters of a setting in a message
_MODEL = ("model.safetensors", "config.json", "generation_config.json")
_TRAINING = ("metrics.jsonl", *_MODEL, "result.json", "resume", "tensorboard")
FILES = {  # kind -> names of all that a job of that kind writes into its folder; folders among them count whole
    "corpus": ("train.jsonl", "valid.jsonl", "manifest.json"),
    "tokenizer": ("tokenizer.model", *TOKENIZER_FILES, "manifest.json"),
    "tokens": ("train.bin", "valid.bin", "manifest.json"),
    "blocks": ("train.bin", "valid.bin", "manifest.json"),
    **dict.fromkeys(("pretrain", "arm", "base", "finetune"), _TRAINING),
    "fold": ("unfused", "fused", "result.json"),
    "taper": (*_TRAINING, "data", "tokenizer", "scores.json", "spread.json", "last-good"),
}
_VERBS = {"blocks": "tokens", "arm": "pretrain", "base": "pretrain"}  # kind -> the verb, where it has another name
_PREPARED = ("data", "tokenizer")  # of a taper: made of the user's files, and anew wherever these are others
_IDENTITIES = {"fold": ("weights_sha256",), "base": ("source",)}  # what of a result.json defines its folder


@dataclass(frozen=True)
class Work:
    """One job and the folder output that belongs to it.

    Attributes:
        kind: what it makes, a key of `FILES`.
        identity: everything that defines its output, as plain JSON values.
        known_as: fingerprints that earlier versions gave this very job.
    """

    kind: str
    identity: Mapping[str, Any]
    known_as: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """Names of what it writes into its folder."""
        return FILES[self.kind]

    @property
    def fingerprint(self) -> str:
        """Digest of the identity."""
        return digest(self.identity)


@dataclass(frozen=True)
class _Owner:
    """Whose a folder is; what is not known of an earlier version's is None, or empty."""

    kind: str | None
    identity: Mapping[str, Any] | None
    fingerprints: tuple[str, ...]
    files: tuple[str, ...]


@contextmanager
def output_folder(folder: Path, work: Work, *, overwrite: bool = False) -> Iterator[None]:
    """Hold `folder` for `work` while inside: locked, marked, and free of another job's files.

    Raises:
        UserError: the folder is another job's, or holds files that no mark lists, or another process holds it.
    """
    require_writable(folder, work, overwrite=overwrite)
    with run_lock(folder):
        require_writable(folder, work, overwrite=overwrite)  # nobody else can write there from here on
        owner = _owner_of(folder)
        if owner is not None and not _same(owner, work):
            for name in _lost(folder, owner):
                discard(folder / name)
        _mark(folder, dict.fromkeys(work.files, work.kind), job=work)
        try:
            yield
        finally:
            if not _names(folder):  # nothing was written, so it is nobody's
                (folder / MARK).unlink(missing_ok=True)


def require_writable(folder: Path, work: Work, *, overwrite: bool = False) -> None:
    """Raise UserError unless `work` may write into `folder`; nothing is changed."""
    owner = _require_kind(folder, work.kind, overwrite=overwrite)
    if owner is None or overwrite or _same(owner, work) or not (theirs := _lost(folder, owner)):
        return
    raise UserError(
        f"{folder} holds another job of `{verb_of(owner.kind or work.kind)}` ({_differences(owner, work)}), and "
        f"{', '.join(theirs)} would be lost: name another --out, or delete them (--overwrite does)"
    )


def require_kind(folder: Path, kind: str, *, overwrite: bool = False) -> None:
    """Raise UserError where `folder` holds anything but the output of a job of this kind.

    This is the part of `require_writable` that can be known before a job is.
    """
    _require_kind(folder, kind, overwrite=overwrite)


@contextmanager
def output_files(paths: Iterable[Path], verb: str, *, overwrite: bool = False) -> Iterator[None]:
    """Claim `paths` for `verb`, which writes them inside.

    Raises:
        UserError: one is there, and no mark says that tapernorm wrote it.
    """
    paths = list(paths)
    for path in paths:
        if path.exists() and not _is_ours(path):
            raise UserError(f"{path} was not written by tapernorm: name another --out, or move that file away")
    folders = {path.parent for path in paths}
    for folder in folders:
        _mark(folder, {path.name: verb for path in paths if path.parent == folder})
    try:
        yield
    except BaseException:
        for folder in folders:
            _unmark(folder, [path.name for path in paths if path.parent == folder and not path.exists()])
        raise


def verb_of(kind: str | None) -> str:
    """The verb whose output is of this kind, as it is typed."""
    return f"tapernorm {_VERBS.get(kind or '', kind)}"


def files_of(folder: Path) -> dict[str, str]:
    """Name -> verb, of everything that the mark in `folder` lists."""
    return dict(_read_mark(folder).get("files", {}))


def _require_kind(folder: Path, kind: str, *, overwrite: bool) -> _Owner | None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, and a folder is needed: name another --out")
    owner = _owner_of(folder)
    listed = () if owner is None else owner.files
    if owner is None and (foreign := _names(folder)):
        raise UserError(
            f"{folder} holds {_some(foreign)}, which `{verb_of(kind)}` did not write: name a new folder for --out, or "
            "empty this one"
        )
    if owner is not None and owner.kind not in (None, kind) and _there(folder, listed) and not overwrite:
        theirs = f"`{verb_of(owner.kind)}` ({owner.kind}: {_some(_there(folder, listed))})"
        raise UserError(
            f"{folder} holds the output of {theirs}, and this is {kind} of "
            f"`{verb_of(kind)}`: name another --out, or delete it (--overwrite does)"
        )
    return owner


def _owner_of(folder: Path) -> _Owner | None:
    """Whose `folder` is; None: nobody's."""
    mark = _read_mark(folder)
    if "job" in mark:
        kind, identity = mark["job"]["kind"], mark["job"]["identity"]
        files = tuple(name for name, verb in mark["files"].items() if verb == kind)
        return _Owner(kind, identity, (digest(identity),), files)
    return _unmarked_owner(folder)


def _unmarked_owner(folder: Path) -> _Owner | None:
    """Whose a folder of an earlier version is, by the files in it."""
    result = read_json(path) if (path := folder / "result.json").is_file() else {}
    if isinstance(result, dict) and result.get("kind") in FILES and "provenance" in result:
        return _owner_by_result(result)
    if checkpoints := sorted(path.name for path in folder.glob("resume/*") if path.is_dir()):
        return _Owner(None, None, tuple(checkpoints), _TRAINING)
    manifest = _json_of(folder / "manifest.json")
    if manifest.get("kind") in FILES and "provenance" in manifest:
        return _Owner(manifest["kind"], None, (), FILES[manifest["kind"]])
    return None


def _owner_by_result(result: Mapping[str, Any]) -> _Owner:
    """Whose a folder with this result.json is."""
    kind = result["kind"]
    identity = {key: result[key] for key in _IDENTITIES.get(kind, ("job",)) if key in result}
    if kind == "finetune" and result.get("job", {}).get("size") == "own":
        kind = "taper"
    told = result["provenance"].get("fingerprint")
    return _Owner(kind, identity, (told or digest(identity),), FILES[kind])


def _same(owner: _Owner, work: Work) -> bool:
    """Whether a folder is this very job's; where that cannot be known, it is not."""
    mine = {work.fingerprint, *work.known_as}
    return owner.kind in (None, work.kind) and not mine.isdisjoint(owner.fingerprints)


def _differences(owner: _Owner, work: Work) -> str:
    """What tells one job from the other, in words."""
    if owner.identity is None:
        return "its settings are not recorded"
    theirs, ours = _leaves(owner.identity), _leaves(work.identity)
    unlike = [
        f"{name.removeprefix('job.')} {_brief(theirs.get(name))} there, {_brief(ours.get(name))} here"
        for name in dict.fromkeys([*theirs, *ours])
        if theirs.get(name) != ours.get(name) and (name in theirs or owner.identity.keys() == work.identity.keys())
    ]
    more = f", and {len(unlike) - _SHOWN} more" if len(unlike) > _SHOWN else ""
    return "; ".join(unlike[:_SHOWN]) + more if unlike else "its data or the code that computed it"


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Dotted place -> value, of everything that is no mapping."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {k: v for key, below in value.items() for k, v in _leaves(below, f"{name}.{key}".strip(".")).items()}


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _is_ours(path: Path) -> bool:
    """Whether tapernorm wrote this file, by the mark beside it or by what it says of itself."""
    return path.is_file() and (path.name in files_of(path.parent) or _says_whose(path))


def _says_whose(path: Path) -> bool:
    """Whether a JSON file carries what every result of tapernorm carries."""
    return {"schema_version", "kind", "provenance"} <= _json_of(path).keys()


def _names(folder: Path) -> list[str]:
    """What lies in `folder`; locks, marks, leftovers of killed writers and empty folders do not count."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if not _counts_as_nothing(path))


def _counts_as_nothing(path: Path) -> bool:
    if path.is_dir() and not path.is_symlink():
        return all(map(_counts_as_nothing, path.iterdir()))
    return path.name in (LOCK, MARK) or is_partial(path)


def _there(folder: Path, names: Iterable[str]) -> list[str]:
    """Those of `names` that lie in `folder`, and nowhere outside it; what a diverged training kept does not count."""
    lying = set(_names(folder))
    return [name for name in names if name in lying and not (name == "resume" and _diverged(folder / name))]


def _lost(folder: Path, owner: _Owner) -> list[str]:
    """What another job of the same kind would take from `folder`."""
    return [name for name in _there(folder, owner.files) if name not in _PREPARED]


def _diverged(resume: Path) -> bool:
    """Whether no training can go on from these checkpoints: each is of a run that diverged."""
    return resume.is_dir() and all((run / "diverged.json").is_file() for run in resume.iterdir())


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _mark(folder: Path, files: Mapping[str, str], job: Work | None = None) -> None:
    """Add `files` to the mark of `folder`, or make it the mark of `job`."""
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        known = _read_mark(folder)
        if job is None and files.items() <= known.get("files", {}).items():
            return
        mark: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **({"job": known["job"]} if "job" in known else {})}
        before = known.get("job", {}).get("kind") if job is not None else None
        others = {name: verb for name, verb in known.get("files", {}).items() if verb != before}
        if job is not None:
            mark["job"] = {"kind": job.kind, "identity": job.identity}
        write_json(folder / MARK, {**mark, "files": {**others, **files}})


def _unmark(folder: Path, names: Collection[str]) -> None:
    """Take files that were not written out of the mark of `folder`, and the mark away where it lists nothing more."""
    with _locked(folder):
        known = _read_mark(folder)
        kept = {name: verb for name, verb in known.get("files", {}).items() if name not in names}
        if kept or "job" in known:
            write_json(folder / MARK, {**known, "files": kept})
        else:
            (folder / MARK).unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Alone with the mark of `folder`: several jobs may write files into one folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read_mark(folder: Path) -> dict[str, Any]:
    """The mark of `folder`; empty where there is none.

    Raises:
        UserError: it is damaged, so that nobody can tell whose the folder is.
    """
    path = folder / MARK
    if not path.is_file():
        return {}
    mark = _json_of(path)
    if mark.get("schema_version") != SCHEMA_VERSION or not isinstance(mark.get("files"), dict):
        raise UserError(f"{path} is damaged, so that whose folder this is cannot be told: name another --out")
    return mark


def _json_of(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file, or none in it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
