"""The table of int8 weights: what they and bfloat16 activations add to the loss, with norms and without."""

import pandas as pd

from ...config.jobs import ReportJob
from ...config.variants import VARIANT_LABELS, VARIANTS
from ..engine.cells import interval, mean_sd, number, text
from ..engine.frame import Row
from ..engine.summary import Against, refuse_unlike, summarise
from ..engine.table_spec import Shown, TableSpec
from ..table import Table

ADDED = {"int8": "int8 weights", "bfloat16": "bfloat16 activations", "both": "both"}  # to the loss in float32
_MILLI = 1000.0
_BESIDE = Against(lambda _: {"variant": "baseline"}, "difference")


def int8_table(rows: pd.DataFrame, job: ReportJob) -> Table:
    """The table of a run: a line per width and variant.

    Raises:
        UserError: models of one width were scored on different numbers of tokens.
    """
    jobs: list[Row] = rows.to_dict("records")
    refuse_unlike(jobs, "d_model", ("tokens",))
    spec = TableSpec(
        "table_int8",
        "Loss that int8 weights and bfloat16 activations add, beyond the paper: is a model without norms easier or"
        " harder to quantise?",
        columns=[
            Shown("d", text("d_model"), once=["d_model"]),
            Shown("model", lambda row: VARIANT_LABELS[row["variant"]], align="l"),
            Shown("n", text("n")),
            Shown("tokens", number("tokens", ",")),
            Shown("loss", mean_sd("ce_float32", ".4f"), note=_LOSS_NOTE),
            *(
                Shown(label, mean_sd(f"added_{name}_millinats", ".2f"), "added loss, 10⁻³ nats/token", note=_ADDED_NOTE)
                for name, label in ADDED.items()
            ),
            *(
                Shown(
                    label,
                    interval(f"beside_{name}_millinats", ".2f", pairs="n_pairs"),
                    "more than Baseline, 10⁻³ nats/token",
                    note=_BESIDE_NOTE,
                )
                for name, label in (("int8", ADDED["int8"]), ("both", "both"))
            ),
        ],
        notes=[
            "int8 weights: each linear map and the head, a scale for each output channel, rounded to the nearest, no"
            " calibration. bfloat16 activations: what enters and leaves a linear map, sums in float32. int8 decoding"
            " has both. Residual stream, attention, norms and embedding stay in float32."
        ],
    )
    return spec.table(int8_rows(jobs, run=job.run), job, runs=jobs)


_LOSS_NOTE = (
    "loss: validation cross-entropy in nats/token of the first tokens of the split, in float32, tapered models folded:"
    " mean ± sample standard deviation over n seeds."
)
_ADDED_NOTE = "added loss: above that of the same model in float32, mean ± sample standard deviation over n seeds."
_BESIDE_NOTE = (
    "more than Baseline: what is added, less what is added to the Baseline of the same seed. Mean over paired seeds, in"
    " brackets its 95 % t interval."
)


def int8_rows(jobs: list[Row], *, run: str) -> list[Row]:
    """One row per width and variant: n, the loss in float32, what each rounding adds, and how much more than there."""
    added = [
        {**job, **{f"added_{name}": _MILLI * (job[f"ce_{name}"] - job["ce_float32"]) for name in ADDED}} for job in jobs
    ]
    added.sort(key=lambda row: (row["d_model"], VARIANTS.index(row["variant"]), row["seed"]))
    by = ["d_model", "variant"]
    losses = summarise(added, by, "ce_float32")
    costs = {name: summarise(added, by, f"added_{name}", {"beside": _BESIDE}) for name in ADDED}
    found = []
    for place, cell in enumerate(losses):
        row = {"run": run, **cell.key, "n": cell.n, "seeds": cell.seeds, "tokens": cell.rows[0]["tokens"]}
        row |= {"ce_float32_mean": cell.mean, "ce_float32_std": cell.sd}
        for name, cells in costs.items():
            cost = cells[place]
            row |= {f"added_{name}_millinats_mean": cost.mean, f"added_{name}_millinats_std": cost.sd}
            gap = cost.gap("beside")
            row |= {key.replace("beside", f"beside_{name}_millinats"): value for key, value in gap.items()}
            row["n_pairs"] = len(cost.gaps["beside"].seeds)
        found.append(row)
    return found
