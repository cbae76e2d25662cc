"""The comparison of a computed run with a published one: Table 1, and how all tables differ."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tapernorm.util.errors import UserError

from .catalogue import CLAIMS, Product
from .comparison import compare, lines
from .frames.pretraining import JOB
from .makers import Rows, make
from .parts import Contents
from .provenance import same_or_not, short_commits
from .read_json import stored
from .table import Table
from .tables.table1_pretraining import table1_lines

_VERDICTS = ("verdict",)  # columns of the claims to compare; the other tables hold their numbers
_ROUNDING = "With equal code and settings losses can differ by the processor's rounding: docs/study.md#rounding."


def compared(here: Contents, results: Path, there: Contents, published: Path, *, every: bool = False) -> Iterator[str]:
    """Yield lines for a terminal: Table 1 of the computed run, the machines of both, and how each table compares.

    Args:
        every: list all values that differ, not only the largest differences.

    Raises:
        UserError: the runs have no table in common.
    """
    ours, theirs = Rows(results), Rows(published)
    tables, known = _tables(here, results), _tables(there, published)
    if not tables.keys() & known.keys():
        raise UserError(
            f"{results} and {published} have no table in common: compute the run, for example by `make tables`"
        )
    if "table1" in tables:
        yield from _told_alone(lambda: _table1(_made(tables["table1"], ours), tables["table1"].job.run))
    if "table1" in tables and "table1" in known:
        yield from _told_alone(lambda: _origins(ours.of(tables["table1"])[0], theirs.of(known["table1"])[0]))
    differing = 0
    for name in (name for name in known if name in tables):
        try:
            mine, published_one = _made(tables[name], ours), _made(known[name], theirs)
        except UserError as error:
            yield f"{name}: not compared: {error}"
            continue
        found = compare(mine, published_one, _VERDICTS if name == CLAIMS else None)
        differing += len(found.differing)
        yield from lines(found, every=every)
    if differing:
        yield _ROUNDING
    for side, names in (("computed", tables.keys() - known.keys()), ("published", known.keys() - tables.keys())):
        if names:
            yield f"only {side}: {', '.join(sorted(names))}"


def _tables(contents: Contents, results: Path) -> dict[str, Product]:
    """Return name -> table, for the tables whose rows `results` holds."""
    return {
        product.name: product
        for product in contents.entries
        if not product.is_figure and all(stored(results / file).is_file() for file in product.needs)
    }


def _made(product: Product, found: Rows) -> Table:
    made = make(product, found)
    assert isinstance(made, Table)
    return made


def _told_alone(told: Callable[[], Iterator[str]]) -> Iterator[str]:
    """Yield the lines of an optional part. The comparison of the table reports rows that cannot be read."""
    try:
        yield from told()
    except UserError:
        return


def _table1(made: Table, run: str) -> Iterator[str]:
    yield f"Table 1 of run {run}: validation loss (nats/token), and gap paired by seed with its 95 % interval"
    yield from table1_lines(made.records)
    yield ""


def _origins(ours: pd.DataFrame, theirs: pd.DataFrame) -> Iterator[str]:
    """Yield the machines and code of both runs, and how many trainings differ in their settings."""
    jobs: list[dict[tuple[Any, ...], str]] = []
    for side, frame in (("here", ours), ("published", theirs)):
        results: Sequence[dict[str, Any]] = frame.to_dict("records")
        devices = ", ".join(sorted({row["device"] for row in results}))
        torch = same_or_not("PyTorch", (row["torch"] for row in results))
        code = ", ".join(short_commits(results))
        yield f"{side + ':':<11}{len(results)} trainings on {devices}, {torch}, code {code}"
        jobs.append({tuple(row[key] for key in JOB): row["config_hash"] for row in results})
    mine, known = jobs
    changed = [job for job in mine if job in known and mine[job] != known[job]]
    if changed:
        yield f"{len(changed)} of {len(mine)} trainings have other settings than the published ones"
