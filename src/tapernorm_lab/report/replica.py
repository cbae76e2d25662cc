"""What a replicator wants to know of a computed run: Table 1, and how its tables compare with the published ones."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tapernorm.util.errors import UserError

from .catalogue import CLAIMS, Entry, Rows
from .comparison import compare, lines
from .frames.pretraining import JOB
from .parts import Contents
from .provenance import same_or_not, short_commits
from .read_json import stored
from .table import Table
from .tables.table1_pretraining import table1_lines

_VERDICTS = ("verdict",)  # of the claims: what they are judged by stands in the other tables
_ROUNDING = "With equal code and settings losses can differ by the processor's rounding: docs/study.md#rounding."


def compared(here: Contents, results: Path, there: Contents, published: Path, *, every: bool = False) -> Iterator[str]:
    """Lines for a terminal: Table 1 of the computed run, on what both were computed, and every table compared.

    Args:
        every: list all values that differ, not the largest differences alone.

    Raises:
        UserError: no table is on both sides.
    """
    ours, theirs = Rows(results, here.run), Rows(published, there.run)
    tables, known = _tables(here, results), _tables(there, published)
    if not tables.keys() & known.keys():
        raise UserError(
            f"{results} and {published} have the rows of no table in common: compute the run, as `make tables` does"
        )
    if "table1" in tables:
        yield from _table1(tables["table1"], ours)
    if "table1" in tables and "table1" in known:
        yield from _origins(ours, theirs)
    differing = 0
    for name in (name for name in known if name in tables):
        try:
            pairs = list(zip(_made(tables[name], ours), _made(known[name], theirs), strict=True))
        except UserError as error:
            yield f"{name}: not compared: {error}"
            continue
        for mine, published_one in pairs:
            found = compare(mine, published_one, _VERDICTS if name == CLAIMS else None)
            differing += len(found.differing)
            yield from lines(found, every=every)
    if differing:
        yield _ROUNDING
    for side, names in (("computed", tables.keys() - known.keys()), ("published", known.keys() - tables.keys())):
        if names:
            yield f"only {side}: {', '.join(sorted(names))}"


def _tables(contents: Contents, results: Path) -> dict[str, Entry]:
    """The tables whose rows are there, by their names."""
    return {
        entry.names[0]: entry
        for entry in contents.entries
        if not entry.is_figure and all(stored(results / file).is_file() for file in entry.needs)
    }


def _made(entry: Entry, found: Rows) -> list[Table]:
    made = entry.make(found)
    assert isinstance(made, list)
    return made


def _table1(entry: Entry, found: Rows) -> Iterator[str]:
    try:
        (made,) = _made(entry, found)
    except UserError:
        return  # told where the tables are compared
    yield f"Table 1 of run {found.run}: validation loss (nats/token), and gap paired by seed with its 95 % interval"
    yield from table1_lines(made.records)
    yield ""


def _origins(ours: Rows, theirs: Rows) -> Iterator[str]:
    """On what both were computed, and whether by the same settings."""
    jobs: list[dict[tuple[Any, ...], str]] = []
    for side, rows in (("here", ours), ("published", theirs)):
        results: Sequence[dict[str, Any]] = rows.of("training")[0].to_dict("records")
        devices = ", ".join(sorted({row["device"] for row in results}))
        torch = same_or_not("PyTorch", (row["torch"] for row in results))
        code = ", ".join(short_commits(results))
        yield f"{side + ':':<11}{len(results)} trainings on {devices}, {torch}, code {code}"
        jobs.append({tuple(row[key] for key in JOB): row["config_hash"] for row in results})
    mine, known = jobs
    changed = [job for job in mine if job in known and mine[job] != known[job]]
    if changed:
        yield f"{len(changed)} of {len(mine)} trainings have other settings than the published ones"
