"""What each arm of a stage leaves to run, how fast that decodes, and what odd inputs do to it: Table S2's second half.

Its first half, losses and gaps, is the stage's own table.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tapernorm.util.errors import UserError

from ...config.study_runs import StageJob
from ..engine import statistics as stats
from ..engine.cells import NOT_FINITE, Cell, counted, interval, mean_sd, number, text
from ..engine.frame import Row
from ..engine.table_spec import Shown, TableSpec
from ..frames.decoding import MODES, Bench
from ..frames.inference_graph import FUNCTIONS, ROWS
from ..table import ABSENT, Table

_SPEED_MODES = ("eager", "compile")


def oddities_table(found: tuple[Sequence[Row], Bench | None], job: StageJob) -> Table:
    """A line per arm of the stage.

    Args:
        found: the rows; a bench of the kind bench_rivals, of a tapered model of the stage's width, None: no speeds.

    Raises:
        UserError: the bench timed a model of another width.
    """
    rows, bench = found
    if bench is not None and bench.facts["d_model"] != job.stage.d_model:
        raise UserError(
            f"the bench timed a model of width {bench.facts['d_model']} and stage {job.stage.name} has "
            f"{job.stage.d_model}: bench a tapered model of that width"
        )
    records = [_record(job, arm.name, rows, bench) for arm in job.stage.arms]
    modes = [mode for mode in _SPEED_MODES if any(f"speed_{mode}" in record for record in records)]
    spec = TableSpec(
        f"table_{job.stage.name}_oddities",
        columns=[
            Shown("arm", text("label"), align="l"),
            Shown("n", counted("n", of="seeds")),
            Shown("left to run", _finished(_left), align="l"),
            Shown("kernels", _finished(text("operations_all"))),
            *(Shown(MODES[m], _finished(_speed(m)), "decoding speed", timed="ratio") for m in modes),
            Shown("largest activation", _finished(number("activation_max", ".3g"))),
            *(Shown(header, _finished(_loss(kind)), "loss on") for kind, header in ROWS.items()),
        ],
    )
    return spec.table(
        records,
        caption=(
            f"Stage {job.stage.name}, beyond the paper: what each arm leaves to run, and odd inputs. d "
            f"{job.stage.d_model}, seeds {', '.join(map(str, job.stage.seeds))}. Run {job.run}: {job.caption}"
        ),
        notes=_notes(records, bench),
    )


def _record(job: StageJob, name: str, rows: Sequence[Row], bench: Bench | None) -> Row:
    cell = [row for row in rows if row["arm"] == name]
    finished = [row for row in cell if row["outcome"] == "finished"]
    record: Row = {"run": job.run, "stage": job.stage.name, "arm": name, "label": job.stage.arm(name).label}
    record |= {"seeds": len(cell), "n": len(finished)}
    if not finished:
        return record
    record |= {
        key: finished[0][key] for key in [f"operations_{name}" for name in (*FUNCTIONS, "all")]
    }  # a model's graph is its arm's, whatever the seed
    record["activation_max"] = _largest(row["text_activation_max"] for row in finished)
    for kind in ROWS:
        record[f"{kind}_finite"] = sum(bool(row.get(f"{kind}_finite")) for row in finished)
        losses = [row[f"{kind}_ce"] for row in finished if row.get(f"{kind}_ce") is not None]
        record[f"{kind}_ce_mean"], record[f"{kind}_ce_std"] = stats.mean_std(losses)
        record[f"{kind}_ce_max"] = _largest(row.get(f"{kind}_ce_max") for row in finished)
    return record | (_speeds(record, bench) if bench is not None else {})


def _largest(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known, default=None)


def _speeds(record: Row, bench: Bench) -> Row:
    """Speed relative to Baseline with F.rms_norm of the timed arm that leaves the same to run: weights play no part."""
    timed = _timed_arm(record, 2 * int(bench.facts["n_layer"]) + 1)
    found: Row = {"speed_of": timed}
    for mode in _SPEED_MODES:
        rows = bench.where(phase="decode", mode=mode, arm=timed)
        if rows:
            first = min(rows, key=lambda row: (row["batch"], row["prompt"]))
            found |= {f"speed_{mode}": first["ratio_baseline"], f"speed_{mode}_low": first["ratio_baseline_low"]}
            found |= {f"speed_{mode}_high": first["ratio_baseline_high"]}
            found |= {"speed_batch": first["batch"], "speed_prompt": first["prompt"], "speed_n": first["n"]}
    return found


def _timed_arm(record: Mapping[str, Any], norms: int) -> str | None:
    """The arm of the bench with so many norms, tanh, erf and exp; None: it has none."""
    left = tuple(record[f"operations_{name}"] for name in FUNCTIONS)
    arms = {
        (norms, 0, 0, 0): "baseline",
        (1, 0, 0, 0): "fused",
        (0, 0, 0, 0): "identity",
        (0, norms, 0, 0): "dyt",
        (0, 0, norms, 0): "derf",
    }
    return arms.get(left)


def _finished(cell: Cell) -> Cell:
    """What is known only of an arm that finished in some seed."""
    return lambda record: cell(record) if record["n"] else ABSENT


def _left(record: Row) -> str:
    counts = {name: record[f"operations_{name}"] for name in FUNCTIONS}
    named = [f"{count} {name}{'s' if name == 'norm' and count > 1 else ''}" for name, count in counts.items() if count]
    return ", ".join(named) or "nothing"


def _speed(mode: str) -> Cell:
    return lambda record: interval(f"speed_{mode}", ".3f")(record) if f"speed_{mode}" in record else ABSENT


def _loss(kind: str) -> Cell:
    """Mean ± standard deviation of the seeds that have one, and how many have none."""

    def cell(record: Row) -> str:
        lost = record["n"] - record[f"{kind}_finite"]
        mean = mean_sd(f"{kind}_ce", ".2f", lost=NOT_FINITE if lost else ABSENT)(record)
        return mean + (f" ({lost} not finite)" if lost and mean != NOT_FINITE else "")

    return cell


def _notes(records: Sequence[Row], bench: Bench | None) -> Iterator[str]:
    yield (
        "left to run: norms, and functions that stand in their places, in one forward pass of the model in the form it "
        "is used in (a tapered one folded); kernels: all operations of that pass but views, in eager mode on the "
        "device that counted them. SiLU and attention are one each."
    )
    yield (
        "largest activation: absolute value in the residual stream on 16 windows of validation text, over all seeds. "
        "loss on: mean cross-entropy in nats/token ± standard deviation over seeds, on those windows; on windows four "
        "times the context, positions past it; on rows of one token repeated; on random ids, where no model can do "
        "better than the entropy of the vocabulary."
    )
    if bench is None:
        return
    timed = next((record for record in records if "speed_batch" in record), None)
    if timed is not None:
        facts = bench.facts
        yield (
            "decoding speed: relative to Baseline with F.rms_norm, of the benchmark's arm that leaves the same to run, "
            f"batch {timed['speed_batch']}, prompt {timed['speed_prompt']}, {facts['new_tokens']} new tokens, "
            f"{timed['speed_n']} rounds; in brackets the 95 % bootstrap interval. {facts['device']}, "
            f"{facts['dtype']}, {facts['threads']} threads."
        )
