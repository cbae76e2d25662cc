"""The tables of runs of `tapernorm taper`: scores before and after, and the scales at every norm."""

import math
from collections.abc import Iterator

from tapernorm.util.module_names import of_blocks

from ..engine.cells import NOT_FINITE, Cell, in_sentences, number, text, where
from ..engine.frame import Row
from ..engine.table_spec import Shown, TableSpec
from ..frames import token_scales as spread_rows
from ..frames.own_models import OwnRows
from ..table import Table


def _loss(name: str, digits: int) -> Cell:
    return number(name, lambda loss: f"{loss:.{digits}f}" if loss < 1e4 else f"{loss:.2g}", lost=NOT_FINITE)


SCORES = TableSpec(
    "scores",
    "Cross-entropy (nats/token) before and after training, with tapered norms folded.",
    columns=[
        Shown("text", text("text"), align="l"),
        Shown("model", text("model"), align="l"),
        Shown("norms gone", lambda row: f"{row['norms_gone']} of {row['norms']}"),
        Shown("bits/byte", _loss("bits_per_byte", 4)),
        Shown("mean", _loss("row_mean", 4), "over rows"),
        Shown("median", _loss("row_median", 2), "over rows"),
        Shown("trimmed", _loss("row_trimmed_mean", 2), "over rows"),
        Shown("p99.9", _loss("row_p99_9", 2), "over rows"),
        Shown("worst", _loss("row_max", 2), "over rows"),
        Shown("median", _loss("token_median", 2), "over tokens"),
        Shown("p99.9", _loss("token_p99_9", 2), "over tokens"),
    ],
    notes=[
        "trimmed: without the 2.5 % of rows at either end. worst: the largest mean loss of a row. Each run is of one"
        " seed."
    ],
)


def scores_table(rows: OwnRows, _: str = "") -> Table:
    """Return the table of scores: a line per text, base model and run."""
    return SCORES.table(rows.scores, rows, notes=[_run_note(label, rows) for label in rows.runs])


def norms_table(rows: OwnRows, label: str) -> Table:
    """Return the table of one run's norms: kept or linear, and the scales of the input before and after."""
    spread = rows.spread_of(label)
    first = spread.iloc[0]
    spec = TableSpec(
        f"norms_{label}",
        f"Per-token scale at every norm of the run {label}, before and after: its median at positions after the first,"
        " and multiples of that.",
        line=["place"],
        member="form",
        columns=[
            Shown("norm", text("norm"), align="l", code=True),
            Shown("becomes", lambda row: "linear" if row["gone"] else "kept", align="l"),
            Shown("1/c", where(lambda row: row["gone"], number("constant", ".3g"))),
            *(column for form in spread_rows.FORMS for column in _of_form(form)),
        ],
        notes=[
            f"{first['rows']} held-out rows of {first['context']} tokens. Source: {in_sentences(first['text'])} 1/c:"
            " the constant that replaces the scale of every token in a tapered norm. position 0: median over rows.",
            _run_note(label, rows),
        ],
    )
    return spec.table(spread.drop(columns=["rows", "context", "text"]).to_dict("records"), rows)


def _of_form(form: str) -> Iterator[Shown]:
    yield Shown("median", number("median", ".3g", lost=NOT_FINITE), form, of=form)
    yield Shown("p99.9", _times("p99_9"), form, of=form)
    yield Shown("largest", _times("largest"), form, of=form)
    yield Shown("its token", lambda row: repr(row["piece"]), form, align="l", code=True, of=form)
    yield Shown("position 0", _times("first"), form, of=form)


def _times(name: str) -> Cell:
    """Show a scale as a multiple of the median."""

    def cell(row: Row) -> str:
        value = row[name] / row["median"]
        return NOT_FINITE if math.isnan(value) else f"{value:.3g}×"

    return cell


def _run_note(label: str, rows: OwnRows) -> str:
    """Return the note on the settings and the code of a run."""
    facts = rows.runs[label]
    base, told, window = facts["base"], facts["provenance"], facts["taper"]
    settings = [
        f"The peak learning rate is {facts['lr']:g}, the weight of the scale loss {facts['aux_weight']:g}",
        *([f"The weight of the level loss is {facts['level_weight']:g}"] if facts["level_weight"] else []),
        f"The gate falls over steps {window['start']}–{window['end']}" if window else "The run is a control",
        f"Precision is {facts['precision']}, the seed {facts['seed']}",
    ]
    gone = ", ".join(of_blocks(facts["norms"])) or "no norm"
    return (
        f"{label}: the base model is {base['name']} (digest {base['digest']}). Gone: {gone}."
        f" Training text: {in_sentences(base['data'])} Training took {facts['steps']} steps of {facts['batch']} rows of"
        f" {facts['context']} tokens, and {facts['train_time_s'] / 60:.1f} min on {told['device']}."
        f" {'. '.join(settings)}."
        f" Code commit: {told['commit']}, PyTorch {told['packages']['torch']}, transformers"
        f" {told['packages']['transformers']}."
    )
