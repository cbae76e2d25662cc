"""What each arm of a stage leaves to run, how fast that decodes, and what odd inputs do to it: Table S2's second half.

Its first half, losses and gaps, is the stage's own table.
"""

from collections.abc import Iterator, Sequence

from tapernorm.util.errors import UserError

from ...config.study_runs import StageJob
from ..engine.cells import NOT_FINITE, Cell, counted, interval, number, spread, text, where
from ..engine.frame import Row
from ..engine.summary import over_seeds
from ..engine.table_spec import Shown, TableSpec
from ..frames.decoding import MODES, Bench
from ..frames.inference_graph import FUNCTIONS, ROWS
from ..table import ABSENT, Table

_SPEED_MODES = ("eager", "compile")
_LEFT = (
    "left to run: norms, and functions that stand in their places, in one forward pass. The model has the form it is"
    " used in (a tapered one folded). kernels: all operations of that pass but views, in eager mode. SiLU and attention"
    " are one each."
)
_ACTIVATION = (
    "largest activation: absolute value in the residual stream on 16 windows of validation text, over all seeds. loss"
    " on: cross-entropy in nats/token, over seeds. text: those windows. past context: windows four times the context,"
    " positions past it. one token: rows of one token repeated. random ids: no model can do better than the entropy of"
    " the vocabulary."
)


def oddities_table(found: tuple[Sequence[Row], Bench | None], job: StageJob) -> Table:
    """A line per arm of the stage.

    Args:
        found: the rows; a bench of the kind bench_rivals, of a tapered model of the stage's width, None: no speeds.

    Raises:
        UserError: the bench timed a model of another width.
    """
    (rows, bench), stage = found, job.stage
    if bench is not None and bench.facts["d_model"] != stage.d_model:
        raise UserError(
            f"the bench timed a model of width {bench.facts['d_model']} and stage {stage.name} has {stage.d_model}:"
            " bench a tapered model of that width"
        )
    records = [_record(job, arm.name, rows, bench) for arm in stage.arms]
    modes = [mode for mode in _SPEED_MODES if any(f"speed_{mode}" in record for record in records)]
    spec = TableSpec(
        f"table_{stage.name}_oddities",
        f"Stage {stage.name}, beyond the paper: what each arm leaves to run, and odd inputs. d {stage.d_model}, seeds"
        f" {', '.join(map(str, stage.seeds))}.",
        columns=[
            Shown("arm", text("label"), align="l"),
            Shown("n", counted("n", of="seeds")),
            Shown("left to run", _finished(_left), align="l"),
            Shown("kernels", _finished(text("operations_all")), note=_LEFT),
            *(Shown(MODES[m], _speed(m), "decoding speed", timed="ratio") for m in modes),
            Shown("largest activation", _finished(number("activation_max", ".3g")), note=_ACTIVATION),
            *(_loss(kind, header, records) for kind, header in ROWS.items()),
        ],
    )
    return spec.table(records, job, notes=_speed_note(records, bench) if bench else ())


def _record(job: StageJob, name: str, rows: Sequence[Row], bench: Bench | None) -> Row:
    cell = [row for row in rows if row["arm"] == name]
    finished = [row for row in cell if row["outcome"] == "finished"]
    record: Row = {"run": job.run, "stage": job.stage.name, "arm": name, "label": job.stage.arm(name).label}
    record |= {"seeds": len(cell), "n": len(finished)}
    if not finished:
        return record
    # A model's graph is its arm's, whatever the seed.
    record |= {key: finished[0][key] for key in [f"operations_{name}" for name in (*FUNCTIONS, "all")]}
    record["activation_max"] = _largest(row["text_activation_max"] for row in finished)
    for kind in ROWS:
        record[f"{kind}_finite"] = sum(bool(row.get(f"{kind}_finite")) for row in finished)
        losses = over_seeds(finished, f"{kind}_ce", f"{kind}_ce")
        del losses[f"{kind}_ce_n"]  # those that are finite
        record |= losses
        record[f"{kind}_ce_max"] = _largest(row.get(f"{kind}_ce_max") for row in finished)
    return record | (_speeds(record, bench) if bench is not None else {})


def _largest(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _speeds(record: Row, bench: Bench) -> Row:
    """Speed relative to Baseline with F.rms_norm of the timed arm that leaves the same to run: weights play no part."""
    norms = 2 * int(bench.facts["n_layer"]) + 1
    arms = {  # norms, tanh, erf and exp -> the arm
        (norms, 0, 0, 0): "baseline",
        (1, 0, 0, 0): "fused",
        (0, 0, 0, 0): "identity",
        (0, norms, 0, 0): "dyt",
        (0, 0, norms, 0): "derf",
    }
    timed = arms.get(tuple(record[f"operations_{name}"] for name in FUNCTIONS))
    found: Row = {"speed_of": timed}
    for mode in _SPEED_MODES:
        if rows := bench.where(phase="decode", mode=mode, arm=timed):
            first = min(rows, key=lambda row: (row["batch"], row["prompt"]))
            found |= {f"speed_{mode}{end}": first[f"ratio_baseline{end}"] for end in ("", "_low", "_high")}
            found |= {"speed_batch": first["batch"], "speed_prompt": first["prompt"], "speed_n": first["n"]}
    return found


def _finished(cell: Cell) -> Cell:
    """What is known only of an arm that finished in some seed."""
    return where(lambda record: record["n"], cell)


def _left(record: Row) -> str:
    counts = {name: record[f"operations_{name}"] for name in FUNCTIONS}
    named = [f"{count} {name}{'s' if name == 'norm' and count > 1 else ''}" for name, count in counts.items() if count]
    return ", ".join(named) or "nothing"


def _speed(mode: str) -> Cell:
    return where(lambda record: f"speed_{mode}" in record, interval(f"speed_{mode}", ".3f"))


def _loss(kind: str, header: str, records: Sequence[Row]) -> Shown:
    """The losses of the seeds that have one, and how many have none."""
    seen = spread(records, f"{kind}_ce", ".2f", lost="")

    def cell(record: Row) -> str:
        lost = record["n"] - record[f"{kind}_finite"]
        found = seen.cell(record)
        if not found:
            return NOT_FINITE if lost else ABSENT
        return found + (f" ({lost} not finite)" if lost else "")

    return Shown(header + seen.header, _finished(cell), "loss on", note=f"loss on: {seen.says}")


def _speed_note(records: Sequence[Row], bench: Bench) -> Iterator[str]:
    """What was timed, and on what."""
    timed, facts = next((record for record in records if "speed_batch" in record), None), bench.facts
    if timed is not None:
        yield (
            "decoding speed: relative to Baseline with F.rms_norm, of the benchmark's arm that leaves the same to run."
            f" It is of batch {timed['speed_batch']}, prompt {timed['speed_prompt']}, {facts['new_tokens']} new tokens"
            f" and {timed['speed_n']} rounds, on {facts['device']}, {facts['dtype']}, {facts['threads']} threads. In"
            " brackets: the 95 % bootstrap interval."
        )
