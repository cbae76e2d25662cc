"""The table of a stage of the study: its arms' settings, losses, and gaps to its Baseline paired by seed."""

from collections.abc import Iterator, Sequence

import pandas as pd

from tapernorm.util.errors import UserError

from ...config.study_runs import StageJob
from ..engine import statistics as stats
from ..engine.cells import counted, interval, number, shown, spread, text
from ..engine.frame import Row
from ..engine.summary import Against, Cell, over_seeds, summarise
from ..engine.table_spec import Shown, TableSpec
from ..frames.study_stages import DIVERGED, treatment_of
from ..table import ABSENT, Table
from .table1_pretraining import LOSS, LOSS_NOTE

# Column of the rows -> its header, shown where the arms of a stage differ in it.
_SETTINGS = {
    "start_fraction": "taper from",
    "end_fraction": "to",
    "lr": "peak lr",
    "anchor_weight": "lambda",
    "clip_norm": "clip",
    "steps": "steps",
}
_WINDOW = ("start_fraction", "end_fraction")  # one says nothing without the other
_JUMP = "jump: validation loss with all maps linear less that with all norms whole, nats/token, where the taper starts"
_TARGET = "scale target: s_tgt of the scale loss, the running mean of the final norm's input RMS before the loss starts"


def stage_table(rows: pd.DataFrame, job: StageJob) -> Table:
    """The table of a stage, a line per arm.

    Raises:
        UserError: the runs were scored on different text.
    """
    stage, records = job.stage, stage_records(rows, job)
    runs: list[Row] = rows.to_dict("records")
    seeds = ", ".join(map(str, stage.seeds))
    spec = TableSpec(
        f"table_{stage.name}",
        f"Stage {stage.name}, beyond the paper: {stage.title}. d {stage.d_model}, seeds {seeds}.",
        list(_columns(records, job)),
    )
    return spec.table(records, job, notes=_notes(job, runs), runs=runs)


def stage_records(rows: pd.DataFrame, job: StageJob) -> list[Row]:
    """One record per arm: settings, mean and spread over seeds, paired gaps with their 95 % t intervals.

    Raises:
        UserError: the runs were scored on different text.
    """
    if len(texts := sorted({int(n) for n in rows["valid_tokens"].dropna()})) > 1:
        raise UserError(
            f"the runs of stage {job.stage.name} were scored on {' and '.join(map(str, texts))} tokens, so their losses"
            " are not comparable: run the older ones again"
        )
    runs: list[Row] = rows.to_dict("records")
    finished = [run for run in runs if run["outcome"] != DIVERGED]
    against = {"gap": job.stage.baseline, "best_gap": _best_baseline(job, finished)}
    pairs = {name: Against(lambda _, arm=arm: {"arm": arm}) for name, arm in against.items()}
    cells = {cell.key["arm"]: cell for cell in summarise(finished, ["arm"], "valid_ce", pairs)}
    records = []
    for arm in job.stage.arms:
        cell = cells.get(arm.name)
        record = {"run": job.run, "stage": job.stage.name, "arm": arm.name, "label": arm.label}
        record |= {"variant": arm.variant.name, "treatment": treatment_of(arm)}
        record |= _of_seeds([run for run in runs if run["arm"] == arm.name])
        for name, other in against.items():
            gap = cell.gaps[name] if cell else stats.paired_gap({}, {})
            record |= {f"{name}_to": other, f"{name}_pairs": len(gap.seeds), f"{name}_percent": gap.value}
            record |= {f"{name}_low": gap.low, f"{name}_high": gap.high}
        records.append(record)
    return records


def _best_baseline(job: StageJob, finished: Sequence[Row]) -> str:
    """The Baseline with settings of its own, or none, that has the lowest mean over all seeds; else the stage's."""
    stage = job.stage
    plain = {arm.name for arm in stage.arms if arm.variant.plain and arm.treatment is None}
    cells = summarise((run for run in finished if run["arm"] in plain), ["arm"], "valid_ce")
    whole: list[Cell] = [cell for cell in cells if cell.n == len(stage.seeds)]
    return min(whole, key=lambda cell: cell.mean).key["arm"] if whole else stage.baseline


def _of_seeds(runs: Sequence[Row]) -> Row:
    """Settings of an arm, its seeds, and means over those that have a number."""
    diverged = [run for run in runs if run["outcome"] == DIVERGED]
    losses = over_seeds(runs, "valid_ce", "valid_ce")
    del losses["valid_ce_n"]  # n below
    return {
        **{column: runs[0][column] for column in _SETTINGS},
        "seeds": len(runs),
        "n": len(runs) - len(diverged),
        "diverged_seeds": " ".join(str(run["seed"]) for run in diverged),
        **losses,
        **over_seeds(runs, "taper_start_jump", "jump"),
        **over_seeds(runs, "scale_target", "target"),
    }


def _columns(records: Sequence[Row], job: StageJob) -> Iterator[Shown]:
    """What is printed: a setting where the arms differ in it, a number where an arm has it."""
    labels, best = {arm.name: arm.label for arm in job.stage.arms}, records[0]["best_gap_to"]
    yield Shown("arm", text("label"), align="l")
    differing = {c for c in _SETTINGS if len({shown(record[c], "g") for record in records} - {ABSENT}) > 1}
    for column, header in _SETTINGS.items():
        if column in differing or (column in _WINDOW and not differing.isdisjoint(_WINDOW)):
            yield Shown(header, number(column, "g"))
    yield Shown("n", counted("n", of="seeds"))
    yield Shown("loss", LOSS, note=LOSS_NOTE)
    yield Shown(
        "gap %",
        interval("gap_percent", ".2f", ends="gap", pairs="gap_pairs"),
        note=(
            "gap %: mean over paired seeds of 100 (L − L_B)/L_B, in brackets its 95 % t interval, B being"
            f" {labels[job.stage.baseline]}. No interval is widened for the number of arms."
        ),
    )
    if best != job.stage.baseline:
        cell = interval("best_gap_percent", ".2f", ends="best_gap", pairs="best_gap_pairs")
        note = f"The best Baseline, by its mean on these very seeds, is {labels[best]}."
        yield Shown("to best Baseline %", cell, note=note)
    for header, name, form, note in (("jump", "jump", ".4f", _JUMP), ("scale target", "target", ".2f", _TARGET)):
        if any(record[f"{name}_n"] for record in records):
            seen = spread(records, name, form)
            yield Shown(header + seen.header, seen.cell, note=f"{note}: {seen.says}")


def _notes(job: StageJob, runs: Sequence[Row]) -> Iterator[str]:
    """Which runs diverged, and which are the paper's own as well."""
    labels = {arm.name: arm.label for arm in job.stage.arms}
    for run in runs:
        if run["outcome"] == DIVERGED:
            yield (
                f"{labels[run['arm']]}, seed {run['seed']}, diverged at step {run['diverged_at']}: {run['reason']}. It"
                " counts in no mean and no gap."
            )
    if shared := list(dict.fromkeys(labels[r["arm"]] for r in runs if r["folder"].startswith("pretrain/"))):
        yield f"Also runs of the paper's own tables: {'; '.join(shared)}."
