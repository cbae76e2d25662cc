"""Published runs: rows kept in git, their provenance, and the tables and figures made from these rows alone."""

import csv
import gzip
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from tapernorm.util.atomic_files import whole_file, write_json
from tapernorm.util.errors import UserError

from . import provenance as origin
from .catalogue import Product
from .figures import finetuning, pretraining
from .makers import Rows, write
from .parts import CONFIG, Contents, Part, contents_of
from .read_json import stored

LARGEST = 1_000_000  # bytes of a published file
PROVENANCE = "provenance.csv"
_COLUMNS = ("part", *origin.COLUMNS, "published_at")
# file of curves -> columns to publish
_CURVES = {"rows/curves.csv": pretraining.CURVES, "gpt2_rows/curves.csv": finetuning.CURVES}


def publish(contents: Contents, results: Path, published: Path, drawings: Path, *, any_code: bool = False) -> list[str]:
    """Publish the rows in `results` into the folders `published` and `drawings`. Parts that it lacks stay as published.

    Args:
        any_code: also publish results of code with uncommitted edits, or outside git.

    Returns:
        The names of the parts that were published now.

    Raises:
        UserError: rows are missing, incomplete, or of other jobs than the config's; a result behind them is missing,
            or of edited or unknown code; a file is too large or names a folder of this machine. Nothing changes then.
    """
    new = [part for part in contents.parts if part.is_in(results)]
    kept = [part for part in contents.parts if part not in new and part.is_in(published)]
    if not new:
        raise UserError(f"{results} holds no rows of the run {contents.run}: compute the run first")
    origins = {part.name: part.origins(results) for part in new}
    for part in new:
        _require_code(part.name, origins[part.name], any_code=any_code)
        _require_gathered(part, results, origins[part.name])
    published.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=published.parent, prefix=".publish-", suffix=".partial") as folder:
        staged, drawn = Path(folder, "results"), Path(folder, "figures")
        for part, source in [*((part, results) for part in new), *((part, published) for part in kept)]:
            for file in part.files:
                _store(source / file, staged / file, _CURVES.get(file))
            part.require(staged)
        if contents.config is not None:
            write_json(staged / CONFIG, contents.config.model_dump(mode="json"))
        _write_provenance(contents, origins, published / PROVENANCE, staged / PROVENANCE)
        _draw(contents, staged, drawn)
        for file in (path for path in Path(folder).rglob("*") if path.is_file()):
            _require_publishable(file, file.relative_to(folder))
        _install({staged: published, drawn: drawings}, _known_files(published, drawings))
    return [part.name for part in new]


def redraw(published: Path, drawings: Path) -> list[str]:
    """Remake every table and figure of a published run from its rows, in place.

    Returns:
        The names of the tables and figures.

    Raises:
        UserError: there is no published run, it has no table or figure, or some rows of a table are missing.
    """
    contents = contents_of(published)
    if not contents.entries:
        raise UserError(f"the run {contents.run} has neither tables nor figures: give another --published RUN")
    return _draw(contents, published, drawings)


def drawable(entries: Iterable[Product], results: Path) -> Iterator[Product]:
    """Yield the tables and figures whose rows `results` holds.

    Raises:
        UserError: it holds only some of the files of one of them.
    """
    for entry in entries:
        missing = [file for file in entry.needs if not stored(results / file).is_file()]
        if missing and len(missing) < len(entry.needs):
            raise UserError(f"{results} lacks {', '.join(missing)}, which {entry.name} needs: publish the run again")
        if not missing:
            yield entry


def _draw(contents: Contents, results: Path, drawings: Path) -> list[str]:
    found = Rows(results)
    made = []
    for entry in drawable(contents.entries, results):
        write(entry, found, results, drawings)
        made.append(entry.name)
    return made


def _store(source: Path, target: Path, columns: Sequence[str] | None) -> None:
    """Copy rows unchanged; with `columns`, copy only these, unchanged as text, and compress the file."""
    source = stored(source)
    if columns is None or source.suffix == ".gz":
        with whole_file(target.with_name(source.name)) as temporary:
            shutil.copyfile(source, temporary)
        return
    frame = pd.read_csv(source, dtype="str", keep_default_na=False)
    text = frame[[column for column in frame if column in columns]].to_csv(index=False, lineterminator="\n")
    with whole_file(target.with_name(f"{target.name}.gz")) as temporary:
        temporary.write_bytes(gzip.compress(text.encode(), mtime=0))


def _require_code(name: str, origins: Sequence[origin.Row], *, any_code: bool) -> None:
    unclear = [row["file"] for row in origins if row["dirty"] != "no"]  # "" where the commit is not known
    if unclear and not any_code:
        raise UserError(
            f"{len(unclear)} of the {len(origins)} results behind {name} are of code with uncommitted edits or outside"
            f" git, such as {unclear[0]}: commit and compute them again, or accept them with --any-code"
        )


def _require_gathered(part: Part, results: Path, origins: Sequence[origin.Row]) -> None:
    """Refuse rows that are older than the results behind them."""
    known = {
        (row["commit"], row["config_hash"]) for row in origins if row["kind"] != "fold"
    }  # a fold has the hash of its run
    for file in part.files:
        if not file.endswith(".csv") or file in _CURVES:
            continue
        frame = pd.read_csv(results / file, dtype="str", keep_default_na=False)
        if {"commit", "config_hash"} <= set(frame):
            commits = (commit.removesuffix("+dirty") for commit in frame["commit"])
            if set(zip(commits, frame["config_hash"], strict=True)) - known:
                raise UserError(
                    f"{results / file} was gathered from other results than those in {results}: gather the rows again"
                )


def _write_provenance(contents: Contents, new: Mapping[str, list[origin.Row]], before: Path, path: Path) -> None:
    """Write the provenance of the parts published now and of those kept, in the order of the parts."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    found = {part: [{"part": part, **row, "published_at": now} for row in rows] for part, rows in new.items()}
    if before.is_file():
        with open(before, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["part"] not in new:
                    found.setdefault(row["part"], []).append(row)
    with whole_file(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        for part in contents.parts:
            writer.writerows(found.get(part.name, ()))


def _require_publishable(path: Path, name: Path) -> None:
    if (size := path.stat().st_size) > LARGEST:
        raise UserError(f"{name} would have {size:,} bytes, and a published file has at most {LARGEST:,}")
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for own in (Path.cwd(), Path.home()):
        if f"{own}/".encode() in content:
            raise UserError(f"{name} names {own}, a folder of this machine: nothing published does")


def _known_files(published: Path, drawings: Path) -> set[Path]:
    """The files that were published before."""
    if not (published / PROVENANCE).is_file():
        return set()
    contents = contents_of(published)
    rows = [stored(published / file) for part in contents.parts for file in part.files]
    folders = {"results": published, "figures": drawings}
    made = [folders[folder] / file for entry in contents.entries for folder, file in entry.files]
    return {path for path in (published / CONFIG, published / PROVENANCE, *rows, *made) if path.is_file()}


def _install(places: dict[Path, Path], before: set[Path]) -> None:
    """Move all files from the folders in the keys into those in the values. Delete other files of `before`."""
    now = set()
    for source, target in places.items():
        for path in (path for path in source.rglob("*") if path.is_file()):
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)
            now.add(place)
    for path in before - now:
        path.unlink()
