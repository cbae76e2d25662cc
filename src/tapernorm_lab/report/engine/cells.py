"""How a table shows a record: seven formatters, of a column or two of it. What is absent is a dash."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pandas as pd

from ..table import ABSENT
from .frame import Row

Cell = Callable[[Row], str]
Form = str | Callable[[float], str]  # how a number is written: a format, or a function
NOT_FINITE = "not finite"


def shown(value: Any, form: Form, *, lost: str = ABSENT) -> str:
    """Format a number, or return `lost` if there is none."""
    if pd.isna(value):
        return lost
    return (form(value) if callable(form) else format(value, form)).replace("-", "−")


def text(name: str) -> Cell:
    """Show the value of a column unchanged."""
    return lambda row: ABSENT if pd.isna(row[name]) else str(row[name])


def number(name: str, form: Form, *, scale: float = 1, lost: str = ABSENT) -> Cell:
    return lambda row: shown(row[name] if scale == 1 else scale * row[name], form, lost=lost)


def mean_sd(name: str, form: Form, *, lost: str = ABSENT) -> Cell:
    """Show mean ± sample standard deviation, or the mean alone for one seed."""

    def cell(row: Row) -> str:
        mean, std = row[f"{name}_mean"], row[f"{name}_std"]
        return shown(mean, form, lost=lost) + ("" if pd.isna(std) or pd.isna(mean) else f" ± {shown(std, form)}")

    return cell


def median_range(name: str, *, lost: str = ABSENT) -> Cell:
    """Median [smallest, largest] to two significant digits; the value alone for one seed."""

    def cell(row: Row) -> str:
        ends = {} if pd.isna(row[f"{name}_std"]) else {"_low": row[f"{name}_smallest"], "_high": row[f"{name}_largest"]}
        found = {name: row[f"{name}_median"]} | {f"{name}{end}": ends.get(end) for end in ("_low", "_high")}
        return interval(name, two_digits, lost=lost)(found)

    return cell


def two_digits(value: float) -> str:
    """A number rounded to two significant digits; from a million on as a power of ten."""
    rounded = float(f"{value:.1e}")
    if abs(rounded) >= 1e6:
        return f"{rounded:.1e}"
    return f"{rounded:.{max(0, 1 - math.floor(math.log10(abs(rounded) or 1)))}f}"


class Spread(NamedTuple):
    """How a column shows a quantity over seeds.

    Attributes:
        cell: formatter of each of its cells.
        header: what its header ends with.
        says: ends its note: what each cell is.
    """

    cell: Cell
    header: str
    says: str


def spread(records: Sequence[Row], name: str, form: Form, *, lost: str = ABSENT) -> Spread:
    """Mean ± sd in all cells of a column, or in none: medians and ranges where any sd is above its mean.

    A sd above the mean of a positive quantity tells of a heavy tail, where mean ± sd would reach below zero.

    Args:
        records: all that the column shows; those without the quantity are passed over.
        name: begins the columns that `over_seeds` made of the quantity.
        form: of mean and sd; medians have two significant digits.
    """
    if any(record.get(f"{name}_std", math.nan) > abs(record.get(f"{name}_mean", math.nan)) for record in records):
        says = (
            "median [smallest, largest] over seeds. They have two significant digits and replace mean ± standard"
            " deviation, because some deviation is above its mean."
        )
        return Spread(median_range(name, lost=lost), ", median [range]", says)
    return Spread(mean_sd(name, form, lost=lost), "", "mean ± sample standard deviation.")


def interval(name: str, form: Form, *, ends: str = "", pairs: str = "", lost: str = ABSENT) -> Cell:
    """Show a value with its interval, or the value alone if it has none.

    Args:
        ends: prefix of the columns `_low` and `_high`; default: `name`.
        pairs: column that counts the pairs; if it is 0, the cell is `ABSENT` and not `lost`.
    """

    def cell(row: Row) -> str:
        value, low, high = row[name], row[f"{ends or name}_low"], row[f"{ends or name}_high"]
        if pairs and not row[pairs]:
            return ABSENT
        between = "" if pd.isna(low) or pd.isna(value) else f" [{shown(low, form)}, {shown(high, form)}]"
        return shown(value, form, lost=lost) + between

    return cell


def significant(name: str, *, digits: int = 4, scale: float = 1.0) -> Cell:
    """Show a value, with its interval if it has one, to `digits` significant digits and at least to the units."""

    def cell(row: Row) -> str:
        scaled = {key: scale * row[key] for key in (name, f"{name}_low", f"{name}_high")}
        decimals = max(0, digits - 1 - math.floor(math.log10(scaled[name])))
        return interval(name, f",.{decimals}f")(scaled)

    return cell


def where(condition: Callable[[Row], Any], cell: Cell) -> Cell:
    """Show `cell` for the records that meet a condition, and `ABSENT` for the others."""
    return lambda row: cell(row) if condition(row) else ABSENT


def share(count: str, of: Callable[[Row], int]) -> Cell:
    """Show a count as a percentage. Only exact shares are printed as 0 % and 100 %."""
    return lambda row: ABSENT if row[count] is None else percentage(row[count], of(row))


def counted(name: str, of: str) -> Cell:
    """Show a number of seeds, with the planned number if some are missing."""
    return lambda row: f"{row[name]}" if row[name] == row[of] else f"{row[name]} of {row[of]}"


def percentage(count: int, of: int) -> str:
    if count in (0, of):
        return f"{100 * (count == of)} %"
    return f"{min(max(100 * count / of, 0.1), 99.9):.1f} %"


def in_sentences(chain: str) -> str:
    """Turn facts that semicolons separate, such as the origin of a text, into sentences."""
    first, *others = (fact.strip() for fact in chain.split(";"))
    return " ".join([f"{first}.", *(f"{fact[:1].upper()}{fact[1:]}." for fact in others)])
