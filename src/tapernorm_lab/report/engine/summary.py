"""Aggregation over seeds: from rows of single seeds to n, mean, spread and paired gaps of each group.

No other module of the report aggregates seeds.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tapernorm.util.errors import UserError

from . import statistics as stats
from .frame import Row

Key = dict[str, Any]


@dataclass(frozen=True)
class Against:
    """A comparison of each cell with a reference cell, over the seeds that both have.

    Attributes:
        reference: takes the key of a cell; returns the entries that differ in the reference's key, or None for no
            comparison.
        measure: measure of the gap, a key of `statistics.MEASURES`.
    """

    reference: Callable[[Key], Key | None]
    measure: stats.Measure = "percent"


@dataclass(frozen=True)
class Cell:
    """One group: its rows, one per seed, in order, and their statistics."""

    key: Key
    rows: Sequence[Row]
    values: Mapping[Any, float]  # seed -> summarised value; the seed of a single model without one is None
    mean: float
    sd: float
    gaps: Mapping[str, stats.Gap]

    @property
    def n(self) -> int:
        return len(self.rows)

    @property
    def seeds(self) -> str:
        return " ".join(map(str, self.values))

    def average(self, name: str) -> float:
        return stats.mean_std([row[name] for row in self.rows])[0]

    def largest(self, name: str) -> float:
        """Return the largest value; NaN if any value is NaN, which marks a value that is not finite."""
        values = [row[name] for row in self.rows]
        return stats.NAN if any(map(math.isnan, values)) else max(values)

    def total(self, name: str) -> int | None:
        """Return the sum; None if a count is missing, as for the Baseline against itself."""
        counts = [row[name] for row in self.rows]
        return None if any(map(pd.isna, counts)) else sum(counts)

    def worst(self, name: str) -> Row:
        """Return the row with the largest value. NaN counts as the largest."""
        return max(self.rows, key=lambda row: math.inf if math.isnan(row[name]) else row[name])

    def gap(self, name: str, *, value: str = "") -> Row:
        """Return the columns of a gap: its value, named `value` or as the gap, and the ends of its interval."""
        gap = self.gaps[name]
        return {value or name: gap.value, f"{name}_low": gap.low, f"{name}_high": gap.high}


def summarise(
    rows: pd.DataFrame | Iterable[Row], by: Sequence[str], value: str, pair: Mapping[str, Against] | None = None
) -> list[Cell]:
    """Return one cell for each combination of the columns `by`, in order of first appearance in `rows`.

    Args:
        rows: one per seed and combination.
        value: column to average and compare, such as a loss.
        pair: name -> comparison. A cell is not compared with itself. A model without a seed is compared with every seed
            of its reference.
    """
    groups: dict[tuple[Any, ...], dict[Any, Row]] = {}
    for row in rows.to_dict("records") if isinstance(rows, pd.DataFrame) else rows:
        seed = None if pd.isna(row["seed"]) else int(row["seed"])
        groups.setdefault(tuple(row[name] for name in by), {})[seed] = row
    values: dict[tuple[Any, ...], dict[Any, float]] = {
        place: {seed: row[value] for seed, row in group.items()} for place, group in groups.items()
    }

    def gap(place: tuple[Any, ...], key: Key, against: Against) -> stats.Gap:
        changed = against.reference(key)
        other = place if changed is None else tuple((key | changed).values())
        found = values.get(other, {}) if other != place else {}
        mine = values[place]
        if None in mine:
            mine = dict.fromkeys(found, mine[None])
        return stats.paired_gap(mine, found, against.measure)

    cells = []
    for place, group in groups.items():
        key = dict(zip(by, place, strict=True))
        gaps = {name: gap(place, key, against) for name, against in (pair or {}).items()}
        mean, sd = stats.mean_std(list(values[place].values()))
        cells.append(Cell(key, tuple(group.values()), values[place], mean, sd, gaps))
    return cells


def over_seeds(rows: Iterable[Row], column: str, name: str) -> Row:
    """Statistics of a column over the seeds that have a number in it, in columns that begin with `name`.

    These are n, mean, sample standard deviation, median, smallest and largest; NaN where there are too few values.
    """
    found: list[Any] = [row.get(column) for row in rows]
    values = [value for value in found if not pd.isna(value)]
    mean, std = stats.mean_std(values)
    median, smallest, largest = stats.median_range(values)
    moments = {f"{name}_n": len(values), f"{name}_mean": mean, f"{name}_std": std}
    return moments | {f"{name}_median": median, f"{name}_smallest": smallest, f"{name}_largest": largest}


def refuse_unlike(rows: Iterable[Row], of: str, columns: Iterable[str]) -> None:
    """Refuse rows whose losses are not comparable.

    Raises:
        UserError: rows agree in the column `of` and differ in one of `columns`.
    """
    rows = list(rows)
    for column in columns:
        for name in dict.fromkeys(row[of] for row in rows):
            if len(values := sorted({str(row[column]) for row in rows if row[of] == name})) > 1:
                raise UserError(
                    f"the runs of {of} {name} differ in {column} ({', '.join(values)}), so their losses are not"
                    " comparable: run the outdated ones again"
                )
