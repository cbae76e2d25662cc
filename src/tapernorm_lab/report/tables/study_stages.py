"""The table of a study's stage: per arm the loss and its gap to the stage's Baseline, paired by seed."""

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from tapernorm.util.errors import UserError

from ...config.study import Stage
from ...config.study_runs import StageJob
from ..engine import statistics as stats
from ..engine.cells import counted, interval, mean_sd, number, shown, text
from ..engine.frame import Row
from ..engine.summary import Against, Cell, summarise
from ..engine.table_spec import Shown, TableSpec
from ..frames.study_stages import DIVERGED, treatment_of
from ..provenance import device_and_code, of_several_codes, short_commits
from ..table import ABSENT, Table
from .table1_pretraining import LOSS

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
_JUMP, _TARGET = "taper_start_jump", "scale_target"


def stage_table(rows: pd.DataFrame, job: StageJob) -> Table:
    """The table of a stage, a line per arm.

    Raises:
        UserError: the runs were scored on different text.
    """
    records = stage_records(rows, job)
    runs: list[Row] = rows.to_dict("records")
    return TableSpec(f"table_{job.stage.name}", list(_columns(records, job.stage.baseline))).table(
        records,
        caption=(
            f"Stage {job.stage.name}, beyond the paper: {job.stage.title}. d {job.stage.d_model}, seeds"
            f" {', '.join(map(str, job.stage.seeds))}.{of_several_codes(short_commits(runs))} Run {job.run}:"
            f" {job.caption}"
        ),
        notes=_notes(job.stage, records, runs),
    )


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
    best = _best_baseline(job.stage, {cell.key["arm"]: cell for cell in summarise(finished, ["arm"], "valid_ce")})
    against = {"gap": job.stage.baseline, "best_gap": best}
    pairs = {name: Against(lambda _, arm=arm: {"arm": arm}) for name, arm in against.items()}
    summaries = {cell.key["arm"]: cell for cell in summarise(finished, ["arm"], "valid_ce", pairs)}
    return [
        {
            "run": job.run,
            "stage": job.stage.name,
            "arm": arm.name,
            "label": arm.label,
            "variant": arm.variant.name,
            "treatment": treatment_of(arm),
            **_of_seeds([run for run in runs if run["arm"] == arm.name]),
            **_gaps(summaries.get(arm.name), against),
        }
        for arm in job.stage.arms
    ]


def _best_baseline(stage: Stage, summaries: Mapping[str, Cell]) -> str:
    """The Baseline with settings of its own, or none, that has the lowest mean over all seeds; else the stage's."""
    plain = [arm.name for arm in stage.arms if arm.variant.plain and arm.treatment is None]
    whole = [name for name in plain if name in summaries and summaries[name].n == len(stage.seeds)]
    return min(whole, key=lambda name: summaries[name].mean, default=stage.baseline)


def _of_seeds(runs: Sequence[Row]) -> Row:
    """Settings of an arm, its seeds, and means over those that have a number."""
    diverged = [run for run in runs if run["outcome"] == DIVERGED]
    means: Row = {}
    for name, column in {"valid_ce": "valid_ce", "jump": _JUMP, "target": _TARGET}.items():
        numbers = [run[column] for run in runs if not pd.isna(run[column])]
        mean, std = stats.mean_std(numbers)
        means |= {f"{name}_n": len(numbers), f"{name}_mean": mean, f"{name}_std": std}
    del means["valid_ce_n"]
    return {
        **{column: runs[0][column] for column in _SETTINGS},
        "seeds": len(runs),
        "n": len(runs) - len(diverged),
        "diverged_seeds": " ".join(str(run["seed"]) for run in diverged),
        **means,
    }


def _gaps(cell: Cell | None, against: Mapping[str, str]) -> Row:
    """To each of the arms `against`; none where no seed finished."""
    found: Row = {}
    for name, arm in against.items():
        gap = cell.gaps[name] if cell else stats.paired_gap({}, {})
        found |= {f"{name}_to": arm, f"{name}_pairs": len(gap.seeds)}
        found |= {f"{name}_percent": gap.value, f"{name}_low": gap.low, f"{name}_high": gap.high}
    return found


def _columns(records: Sequence[Row], baseline: str) -> Iterator[Shown]:
    """What is printed: a setting where the arms differ in it, a number where an arm has it."""
    yield Shown("arm", text("label"), align="l")
    differing = {c for c in _SETTINGS if len({shown(record[c], "g") for record in records} - {ABSENT}) > 1}
    for column, header in _SETTINGS.items():
        if column in differing or (column in _WINDOW and not differing.isdisjoint(_WINDOW)):
            yield Shown(header, number(column, "g"))
    yield Shown("n", counted("n", of="seeds"))
    yield Shown("loss", LOSS)
    yield Shown("gap %", interval("gap_percent", ".2f", ends="gap", pairs="gap_pairs"))
    if any(record["best_gap_to"] != baseline for record in records):
        best = interval("best_gap_percent", ".2f", ends="best_gap", pairs="best_gap_pairs")
        yield Shown("to best Baseline %", best)
    if any(record["jump_n"] for record in records):
        yield Shown("jump", mean_sd("jump", ".4f"))
    if any(record["target_n"] for record in records):
        yield Shown("scale target", mean_sd("target", ".2f"))


def _notes(stage: Stage, records: Sequence[Row], runs: Sequence[Row]) -> Iterator[str]:
    labels = {arm.name: arm.label for arm in stage.arms}
    yield (
        "loss: validation cross-entropy in nats/token, at g = 0 where tapered: mean ± sample standard deviation over"
        " n seeds."
    )
    yield (
        f"gap %: mean over paired seeds of 100 (L − L_B)/L_B, in brackets its 95 % t interval, B being"
        f" {labels[stage.baseline]}. Each interval stands for itself: none is widened for the number of arms."
    )
    if (best := records[0]["best_gap_to"]) != stage.baseline:
        yield f"The best Baseline, by its mean on these very seeds, is {labels[best]}."
    if any(record["jump_n"] for record in records):
        yield (
            "jump: validation loss with all maps linear less that with all norms whole, nats/token, of the model as it"
            " is where its taper starts and just calibrated: mean ± sample standard deviation. Runs of one seed that"
            " start together share it, where their sums are rounded alike."
        )
    if any(record["target_n"] for record in records):
        yield (
            "scale target: s_tgt of the scale loss, the RMS of what reaches the final norm where the loss starts: mean"
            " ± sample standard deviation."
        )
    for run in runs:
        if run["outcome"] == DIVERGED:
            yield (
                f"{labels[run['arm']]}, seed {run['seed']}, diverged at step {run['diverged_at']}: {run['reason']}. It"
                " has no loss and counts in no mean and no gap."
            )
    if shared := list(dict.fromkeys(labels[r["arm"]] for r in runs if r["folder"].startswith("pretrain/"))):
        yield f"Also runs of the paper's own tables: {'; '.join(shared)}, where no setting differs."
    yield device_and_code(runs)
