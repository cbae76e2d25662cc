"""The second half of Table S2: rows of a stage's real runs, speeds of the arms that leave the same, and the table."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import synthetic_bench
from training import HARDWARE, make_arm, make_job, write_stream

from tapernorm.checkpoints.store import load
from tapernorm.models.decoder import Decoder
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json, digest
from tapernorm_lab.cli.main import main
from tapernorm_lab.config.study import ArmJob, Stage
from tapernorm_lab.config.study_runs import ArmRun, StageJob
from tapernorm_lab.data.token_stream import TokenStream
from tapernorm_lab.experiments.speed.inference_graph import inspect_inference, inspect_stage
from tapernorm_lab.experiments.study_arm import run_arm
from tapernorm_lab.report.frames import decoding as decode_rows
from tapernorm_lab.report.frames import inference_graph as oddities_rows
from tapernorm_lab.report.table import ABSENT, markdown
from tapernorm_lab.report.tables import inference_graph as oddities_table

SEEDS = (1, 2)
REPLACED = {"alpha_init": 0.5, "attention_alpha_init": 0.8, "embedding_scale": True}
ARMS = (
    make_arm("baseline", name="baseline", label="Baseline"),
    make_arm("internal_aux", name="internal", label="Internal-Taper (+aux)"),
    make_arm("all_aux", name="all", label="All-Taper (+aux)"),
    make_arm("baseline", name="dyt", label="DyT", treatment={"norm": {"kind": "dyt", **REPLACED}}),
    make_arm("baseline", name="derf", label="Derf", treatment={"norm": {"kind": "derf", **REPLACED}}),
    make_arm("baseline", name="warm", label="Temperature", treatment={"temperature": True}),
    make_arm("baseline", name="wild", label="Absurd", set={"train.lr": 1e20}),
)
LEFT = {  # norms, tanh, erf, exp of two layers and the final place
    "baseline": (5, 0, 0, 0),
    "internal": (1, 0, 0, 0),
    "all": (0, 0, 0, 0),
    "dyt": (0, 5, 0, 0),
    "derf": (0, 0, 5, 0),
    "warm": (5, 0, 0, 1),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[StageJob, Path, Path]:
    """The stage's job, its results and the token streams; every run is a real one."""
    folder = tmp_path_factory.mktemp("stage")
    streams = write_stream(folder / "tokens")
    stage = Stage(
        name="S2",
        title="Norms",
        search=False,
        figure=None,
        d_model=12,
        seeds=SEEDS,
        baseline="baseline",
        arms=ARMS,
    )
    runs = []
    for arm in ARMS:
        for seed in SEEDS:
            job: ArmJob = arm.job(make_job(arm.variant.name, seed=seed))
            where = f"study/S2/{arm.name}/seed{seed}"
            run_arm(job, streams, folder / where, HARDWARE)
            runs.append(ArmRun(arm=arm.name, seed=seed, folder=where, config_hash=digest(canonical_json(job))))
    return StageJob(run="test", caption="A test.", stage=stage, runs=tuple(runs)), folder, streams


@pytest.fixture(scope="module")
def rows(run) -> list[dict[str, Any]]:
    job, results, streams = run
    return inspect_stage(job, results, streams, device="cpu", threads=1)


def bench_file(path: Path, *, d_model: int = 12, n_layer: int = 2) -> Path:
    document = synthetic_bench.decode(modes=("eager",), batches=(1,), prompts=(128,))
    for cell in [cell for cell in document["cells"] if cell["arm"] == "baseline"]:
        for arm, slower in (("dyt", 1.25), ("derf", 1.6)):
            document["cells"].append({**cell, "arm": arm, "seconds": [slower * s for s in cell["seconds"]]})
    document |= {"kind": "bench_rivals", "job": {**document["job"], "d_model": d_model, "n_layer": n_layer}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def test_each_run_has_a_row_and_a_diverged_one_says_so(run, rows) -> None:
    job, results, streams = run
    assert [(row["arm"], row["seed"]) for row in rows] == [(r.arm, r.seed) for r in job.runs]
    for row in rows:
        if row["arm"] == "wild":
            assert row["outcome"] == "diverged"
            assert "operations_norm" not in row
            continue
        assert tuple(row[f"operations_{name}"] for name in ("norm", "tanh", "erf", "exp")) == LEFT[row["arm"]]
        assert row["text_finite"] is True
    model = load(results / "study/S2/all/seed2", Decoder)
    mine = next(row for row in rows if (row["arm"], row["seed"]) == ("all", 2))
    expected = inspect_inference(model, TokenStream.open(streams, "valid").tokens)
    assert mine["random_ce"] == expected["random_ce"]
    assert mine["same_activation_max"] == expected["same_activation_max"]


def test_a_run_of_another_job_is_refused(run) -> None:
    job, results, streams = run
    other = job.model_copy(update={"runs": (job.runs[0].model_copy(update={"config_hash": "another"}),)})
    with pytest.raises(UserError, match="the config's arm baseline has another"):
        inspect_stage(other, results, streams, device="cpu", threads=1)
    absent = job.model_copy(update={"runs": (job.runs[0].model_copy(update={"folder": "nowhere"}),)})
    with pytest.raises(UserError, match=r"holds no result\.json"):
        inspect_stage(absent, results, streams, device="cpu", threads=1)


def test_rows_come_back_from_csv_as_they_were(run, rows, tmp_path) -> None:
    job, *_ = run
    path = tmp_path / "rows.csv"
    oddities_rows.write(rows, path)
    found = oddities_rows.read(path, job)
    for mine, back in zip(rows, found, strict=True):
        assert {name: value for name, value in back.items() if value is not None} == mine
    with pytest.raises(UserError, match="differ in arms"):
        oddities_rows.read(path, job.model_copy(update={"runs": job.runs[1:]}))
    with pytest.raises(UserError, match="absent"):
        oddities_rows.read(tmp_path / "absent.csv", job)


def test_each_arm_gets_the_speed_of_the_timed_arm_that_leaves_the_same(run, rows, tmp_path) -> None:
    job, *_ = run
    bench = decode_rows.read(bench_file(tmp_path / "bench.json"), kind=decode_rows.REPLACEMENTS)
    made = {record["arm"]: record for record in oddities_table.oddities_table((rows, bench), job).records}
    speed = {row["arm"]: row["ratio_baseline"] for row in bench.where(phase="decode", mode="eager")}
    timed = {"baseline": "baseline", "internal": "fused", "all": "identity", "dyt": "dyt", "derf": "derf"}
    for arm, name in timed.items():
        assert made[arm]["speed_of"] == name
        assert made[arm]["speed_eager"] == speed[name]
    assert (made["baseline"]["speed_eager"], made["dyt"]["speed_eager"]) == (1.0, pytest.approx(1 / 1.25))
    assert made["warm"]["speed_of"] is None
    assert "speed_eager" not in made["warm"]
    assert "speed_eager" not in made["wild"]
    wide = decode_rows.read(bench_file(tmp_path / "wide.json", d_model=24), kind=decode_rows.REPLACEMENTS)
    with pytest.raises(UserError, match="timed a model of width 24 and stage S2 has 12"):
        oddities_table.oddities_table((rows, wide), job)


def test_the_table_says_what_is_left_and_what_is_not_finite(run, rows) -> None:
    job, *_ = run
    broken = [dict(row) for row in rows]
    for row in broken:
        if row["arm"] == "dyt" and row["seed"] == 1:
            row |= {"random_finite": False, "random_ce": None, "random_ce_max": None}
        if row["arm"] == "derf":
            row |= {"same_finite": False, "same_ce": None, "same_ce_max": None}
    table = oddities_table.oddities_table((broken, None), job)
    cells = {row[0]: dict(zip([c.header for c in table.columns], row, strict=True)) for row in table.rows}
    assert {name: cell["left to run"] for name, cell in cells.items()} == {
        "Baseline": "5 norms",
        "Internal-Taper (+aux)": "1 norm",
        "All-Taper (+aux)": "nothing",
        "DyT": "5 tanh",
        "Derf": "5 erf",
        "Temperature": "5 norms, 1 exp",
        "Absurd": ABSENT,
    }
    assert cells["Absurd"]["n"] == "0 of 2"
    assert cells["Derf"]["one token"] == "not finite"
    assert cells["DyT"]["random ids"].endswith("(1 not finite)")
    assert "eager" not in cells["DyT"]
    mean = sum(row["text_ce"] for row in rows if row["arm"] == "all") / 2
    assert cells["All-Taper (+aux)"]["text"].startswith(f"{mean:.2f} ± ")
    largest = max(row["text_activation_max"] for row in rows if row["arm"] == "all")
    assert cells["All-Taper (+aux)"]["largest activation"] == f"{largest:.3g}"
    assert "what each arm leaves to run" in markdown(table)
    (one,) = [row for row in broken if (row["arm"], row["seed"]) == ("all", 2)]
    one["random_ce"] *= 1000  # of two values, the sd is above the mean from a ratio of 5.8 on
    heavy = oddities_table.oddities_table((broken, None), job)
    headers = [c.header for c in heavy.columns]
    assert [name for name in headers if name not in cells["DyT"]] == ["random ids, median [range]"]
    shown = {row[0]: row[-1] for row in heavy.rows}
    assert re.fullmatch(r"\d+ \[\d+\.?\d*, \d+\]", shown["All-Taper (+aux)"])
    assert re.fullmatch(r"\d\.\d \(1 not finite\)", shown["DyT"])
    assert not any("±" in cell for cell in shown.values())


def test_the_command_line_makes_rows_and_table(run, tmp_path, capsys) -> None:
    job, results, streams = run
    told = ["--job", canonical_json(job)]
    out = ["--out", str(tmp_path / "tables")]
    made = ["rows", "study_S2_oddities", *told, "--device", "cpu", "--results", str(results), "--tokens", str(streams)]
    assert main([*made, *out]) == 0
    bench_file(tmp_path / "bench/rivals_S2.json")
    assert main(["table", "table_S2_oddities", *told, "--results", str(tmp_path), "--out", str(tmp_path)]) == 0
    assert {path.suffix for path in tmp_path.glob("table_S2_oddities.*")} == {".csv", ".md", ".tex", ".html"}
    assert "5 tanh" in (tmp_path / "table_S2_oddities.md").read_text()
    assert main(["rows", "study_S2_oddities", *told, *out]) == 2
    assert "rows study_S2_oddities needs --results, --tokens" in capsys.readouterr().err
