"""The rows of a comparison as lines of text."""

from typing import Any

from ..report import short

HEADER = [
    "engine",
    "weights",
    "tokens/s",
    "95 % interval",
    "against llama.cpp",
    "95 % interval",
    "equal tokens",
    "loss",
]
ALIGN = "llrrrrrr"


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row. A skipped or refused arm shows the reason in place of numbers."""
    name = f"{row['engine']}, {row['mode']}" if row["mode"] else row["engine"]
    if row["state"] != "measured":
        return [name, row["weights"], f"{row['state']}: {row['reason']}", *[""] * 5]
    loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
    found = [cell for key in ("tokens_per_s", "over_rival") for cell in _median(row[key])]
    return [name, row["weights"], *found, f"{100 * row['equal_tokens']:.0f} %", loss]


def lines(comparison: dict[str, Any]) -> str:
    """Return the table of a comparison as lines for a terminal."""
    rows = [HEADER, *map(cells, comparison["rows"])]
    widths = [max(len(row[i]) for row in rows if len(row[2]) < 20 or i < 2) for i in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _median(found: dict[str, float] | None) -> list[str]:
    return [short(found["value"]), f"{short(found['low'])}–{short(found['high'])}"] if found else ["", ""]
