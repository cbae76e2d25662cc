"""What each arm of a stage leaves to run, how fast that decodes, and what odd inputs do to it: Table S2's second half.

Its first half, losses and gaps, is the stage's own table.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tapernorm.util.errors import UserError

from ...config.study_runs import StageJob
from .. import statistics as stats
from ..engine.frame import Row
from ..frames.decoding import MODES, Bench
from ..frames.inference_graph import FUNCTIONS, ROWS
from ..table import ABSENT, Column, Table

_SPEED_MODES = ("eager", "compile")


def oddities_table(rows: Sequence[Row], bench: Bench | None, job: StageJob) -> Table:
    """A line per arm of the stage.

    Args:
        bench: of the kind bench_rivals, on a tapered model of the stage's width; None: no speeds are shown.

    Raises:
        UserError: the bench timed a model of another width.
    """
    if bench is not None and bench.facts["d_model"] != job.stage.d_model:
        raise UserError(
            f"the bench timed a model of width {bench.facts['d_model']} and stage {job.stage.name} has "
            f"{job.stage.d_model}: bench a tapered model of that width"
        )
    records = [_record(job, arm.name, rows, bench) for arm in job.stage.arms]
    modes = [mode for mode in _SPEED_MODES if any(f"speed_{mode}" in record for record in records)]
    columns = [
        *(Column("arm", align="l"), Column("n"), Column("left to run", align="l"), Column("kernels")),
        *(Column(MODES[mode], group="decoding speed", timed="ratio") for mode in modes),
        Column("largest activation"),
        *(Column(header, group="loss on") for header in ROWS.values()),
    ]
    return Table(
        name=f"table_{job.stage.name}_oddities",
        columns=columns,
        rows=[list(_cells(record, modes)) for record in records],
        published=[],
        caption=(
            f"Stage {job.stage.name}, beyond the paper: what each arm leaves to run, and odd inputs. d "
            f"{job.stage.d_model}, seeds {', '.join(map(str, job.stage.seeds))}. Run {job.run}: {job.caption}"
        ),
        notes=list(_notes(records, bench)),
        records=records,
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


def _cells(record: Row, modes: Sequence[str]) -> Iterator[str]:
    yield record["label"]
    yield f"{record['n']}" if record["n"] == record["seeds"] else f"{record['n']} of {record['seeds']}"
    if not record["n"]:
        yield from [ABSENT] * (3 + len(modes) + len(ROWS))
        return
    yield _left(record)
    yield str(record["operations_all"])
    for mode in modes:
        yield _speed(record, mode)
    yield ABSENT if record["activation_max"] is None else f"{record['activation_max']:.3g}"
    for kind in ROWS:
        yield _loss(record, kind)


def _left(record: Row) -> str:
    counts = {name: record[f"operations_{name}"] for name in FUNCTIONS}
    named = [f"{count} {name}{'s' if name == 'norm' and count > 1 else ''}" for name, count in counts.items() if count]
    return ", ".join(named) or "nothing"


def _speed(record: Row, mode: str) -> str:
    value, low, high = (record.get(f"speed_{mode}{end}") for end in ("", "_low", "_high"))
    if value is None:
        return ABSENT
    return f"{value:.3f} [{low:.3f}, {high:.3f}]" if low == low else f"{value:.3f}"  # NaN: one round


def _loss(record: Row, kind: str) -> str:
    mean, std, finite = record[f"{kind}_ce_mean"], record[f"{kind}_ce_std"], record[f"{kind}_finite"]
    if mean != mean:  # no seed has one
        return "not finite" if record["n"] > finite and f"{kind}_ce_max" in record else ABSENT
    spread = f" ± {std:.2f}" if std == std else ""
    lost = f" ({record['n'] - finite} not finite)" if finite < record["n"] else ""
    return f"{mean:.2f}{spread}{lost}"


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
