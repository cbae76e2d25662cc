"""A whole run of Snakemake on real text, in a copy of the project: what it makes, and what a change makes anew."""

import csv
import hashlib
import json
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml
from snakemake_runs import planned, project, snakemake, write_config

from tapernorm_lab.cli.main import main

pytestmark = pytest.mark.slow
TEST = "config/test.yaml"
TABLES = ("1", "2", "2x", "2v1", "3", "3x", "4", "5", "_int8")
FIGURES = ("1a", "1b", "2", "_decode", "_finetune")
OF_PUBLICATION = ("config.json", "provenance.csv", "rows/curves.csv.gz", "gpt2_rows/curves.csv.gz")
REPORT = {"bench": 2, "rows_training": 1, "int8_rows": 1, "table": 7, "figure": 4, "tables": 1, "figures": 1}


def make_smaller(folder: Path) -> None:
    """Give config/test.yaml each kind of job, and no more of them than the tests look at."""
    config = yaml.safe_load((folder / TEST).read_text())
    narrow, wide = config["widths"]
    narrow["variants"], wide["variants"] = ["baseline", "all_aux"], ["baseline", "internal", "internal_aux"]
    config["gpt2"] |= {"sizes": config["gpt2"]["sizes"][:1], "methods": ["vanilla", "fakeln", "all_aux"]}
    for stage in config["study"]:
        stage["seeds"] = [1]
    (folder / TEST).write_text(yaml.safe_dump(config))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The project after `snakemake tables figures study` on a smaller config/test.yaml."""
    folder = project(tmp_path_factory.mktemp("project"))
    make_smaller(folder)
    run(folder, "tables", "figures", "study")
    return folder


def run(folder: Path, *targets: str, config: str = TEST) -> str:
    """What Snakemake says as it makes these targets."""
    done = snakemake(folder, *targets, "--configfile", config)
    assert done.returncode == 0, done.stdout
    return done.stdout


def plan(folder: Path, *targets: str, **changes: object) -> dict[str, int]:
    """Jobs that a config with these changes would run."""
    config = write_config(folder, "changed.yaml", **changes)
    return planned(snakemake(folder, "-n", *targets, "--configfile", config))


def files_below(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def values_of(path: Path) -> dict[str, float]:
    """The numbers of a result.json."""
    return {name: found["value"] for name, found in json.loads(path.read_text())["values"].items()}


def stage_rows(folder: Path, stage: str) -> dict[str, dict[str, str]]:
    """Arm -> its row, of the one seed."""
    return {row["arm"]: row for row in rows_of(folder / f"results/test/tables/study_{stage}.csv")}


def test_one_command_makes_all_that_was_asked_for_and_a_second_one_nothing(finished):
    made = {path.relative_to(finished).as_posix() for path in finished.rglob("*") if path.is_file()}
    tables = {f"results/test/tables/table{n}.{kind}" for n in (*TABLES, "_S1", "_S4") for kind in ("csv", "md", "tex")}
    figures = {
        f"figures/test/figure{n}.{kind}" for n in (*FIGURES, "_S1") for kind in ("pdf", "png", "csv", "md", "tex")
    }
    logs = (
        "data/corpus",
        "data/tokenizer",
        "data/tokens",
        "rows/training",
        "tables/table1",
        "study/S1/diverging/seed1",
    )
    assert tables | figures | {f"results/test/logs/{log}.log" for log in logs} <= made
    resumed = {path.split("/resume/")[0] for path in made if "/resume/" in path}
    assert resumed == {"results/test/study/S1/diverging/seed1"}  # what a diverged run is judged by; others leave none
    assert not [path for path in made if path.startswith("figures/test/figure_S4")]
    log = (finished / "results/test/logs/pretrain/internal_aux/d24/seed2.log").read_text()
    assert "tapernorm pretrain: output in results/test/pretrain/internal_aux/d24/seed2" in log
    assert "Nothing to be done" in run(finished, "tables", "figures", "study")


def test_every_tapered_model_is_folded_and_table1_says_what_that_moved(finished):
    results = finished / "results/test"
    trained, folded = (
        {path.relative_to(results / stage).parent: values_of(path) for path in results.glob(f"{stage}/**/result.json")}
        for stage in ("pretrain", "fold")
    )
    assert folded.keys() == {job for job in trained if job.parts[0] != "baseline"}
    for job in folded:
        assert {path.parent.name for path in (results / "fold" / job).glob("*/*.safetensors")} == {"unfused", "fused"}
    moved = max(
        abs(v[f"valid_ce_{form}"] - v["valid_ce_gated"]) for v in folded.values() for form in ("unfused", "fused")
    )
    assert moved < 1e-5
    told = (results / "tables/table1.md").read_text()
    assert re.search(rf"\b6 tapered models .*{moved:.1e} nats/token", told)


def test_table1_holds_the_losses_that_the_runs_wrote(finished):
    results = finished / "results/test"
    losses = [values_of(path)["valid_ce"] for path in results.glob("pretrain/baseline/d24/seed*/result.json")]
    rows = rows_of(results / "tables/table1.csv")
    (row,) = [row for row in rows if (row["variant"], row["d_model"]) == ("baseline", "24")]
    assert float(row["valid_ce_mean"]) == pytest.approx(statistics.mean(losses), rel=1e-12)
    assert int(row["n"]) == len(losses) == 2


def test_table3_holds_the_means_that_the_evaluations_wrote(finished):
    rows = rows_of(finished / "results/test/tables/table3.csv")
    ours = {(row["size"], row["method"], row["corpus"]): float(row["ce_mean"]) for row in rows if row["corpus"]}
    for path in finished.glob("results/test/evaluate/*/*/seed1.json"):
        scores = json.loads(path.read_text())
        model = scores["job"]["model"]
        for corpus, entry in scores["corpora"].items():
            forms = {form: found["rows"]["mean"] for form, found in entry["forms"].items()}
            assert ours[model["size"], model["method"], corpus] == forms["gated"]
            assert ("fused" in forms) == (model["method"] != "vanilla")
            assert forms.get("fused", forms["gated"]) == pytest.approx(forms["gated"], abs=1e-5)


def test_a_lost_figure_is_drawn_again_and_nothing_else_runs(finished):
    figure = finished / "figures/test/figure2.png"
    before = figure.read_bytes()
    figure.unlink()
    assert plan(finished, "figure2") == {"figure": 1, "figure2": 1}
    run(finished, "figure2")
    assert figure.read_bytes() == before


def test_a_run_is_published_drawn_anew_and_compared_with_itself(finished, capsys):
    """All that is drawn from the rows that are published is what the workflow drew from all rows, byte for byte."""
    run(finished, "claims")
    where = ["--results", f"{finished}/results", "--figures", f"{finished}/figures"]
    config = ["--config", f"{finished}/{TEST}"]
    assert main(["compare", "--publish", "--run", "test", *where, *config, "--any-code"]) == 0
    results, drawn = (finished / root / "published/test" for root in ("results", "figures"))
    for place, published in ((finished / "results/test", results), (finished / "figures/test", drawn)):
        computed, files = files_below(place), files_below(published)
        files = {name: content for name, content in files.items() if name not in OF_PUBLICATION}
        assert {name: computed[name] for name in files} == files
    tables = {f"tables/table{n}.{kind}" for n in (*TABLES, "_S1", "_S4") for kind in ("csv", "md", "tex")}
    assert tables | {"claims.md", "bench/decode.json", "tables/study_S1.csv"} <= files_below(results).keys()
    assert len(files_below(drawn)) == 5 * (len(FIGURES) + 1)
    told = rows_of(results / "provenance.csv")
    assert len([row for row in told if (row["kind"], row["part"]) == ("pretrain", "training")]) == 10
    assert all((finished / "results/test" / row["file"]).is_file() for row in told)
    assert all("torch " in row["versions"] and row["written_at"] and row["config_hash"] for row in told)

    whole = files_below(results) | files_below(drawn)
    for made in (*(results / "tables").glob("*.md"), *drawn.glob("*.md")):
        made.write_text("old")
    (drawn / "figure2.pdf").unlink()
    assert main(["figure", "--published", "test", *where]) == 0
    assert files_below(results) | files_below(drawn) == whole

    capsys.readouterr()
    assert main(["compare", "--run", "test", *where[:2], *config]) == 0
    told = capsys.readouterr().out.splitlines()
    counts = {name: re.findall(r"(\d+) of (\d+)", line) for name, _, line in (line.partition(": ") for line in told)}
    for name in [f"table{n}" for n in (*TABLES, "_S1", "_S4")] + ["claims"]:
        assert counts[name], name
        assert all(equal == values != "0" for equal, values in counts[name]), name
    assert not [line for line in told if "only" in line or "differ" in line]


@pytest.mark.parametrize(
    ("changes", "retrained", "folded"),
    [
        ({"taper__end_fraction": 0.8}, 6, 6),  # every tapered job, no Baseline
        ({"taper__anchor_weight": 0.2}, 4, 4),  # the +aux jobs alone
        ({"train__lr": 2e-3}, 10, 6),
    ],
)
def test_a_changed_setting_reruns_what_depends_on_it(finished, changes, retrained, folded):
    again = {"pretrain": retrained, "fold": folded}
    assert plan(finished, "tables", "figures", **changes) == REPORT | again


@pytest.mark.parametrize(
    ("place", "value", "finetuned", "folded"),
    [
        ("fakeln_weight", 0.2, 1, 1),  # FakeLN alone
        ("anchor_weight", 0.2, 1, 1),  # the taper alone
        ("lr", 2e-3, 3, 2),  # every method
    ],
)
def test_a_changed_setting_of_a_method_reruns_that_method(finished, place, value, finetuned, folded):
    gpt2 = yaml.safe_load((finished / TEST).read_text())["gpt2"]
    gpt2["sizes"][0][place] = value
    again = {"finetune": finetuned, "finetune_fold": folded, "evaluate": finetuned}
    assert plan(finished, "table3", gpt2=gpt2) == again | {"rows_gpt2": 1, "table": 2, "table3": 1}


def test_a_changed_arm_runs_again_alone(finished):
    study = yaml.safe_load((finished / TEST).read_text())["study"]
    again = {"rows_study_S4": 1, "table": 1, "study": 1}
    study[1]["arms"][2]["set"]["train.lr"] = 2e-3
    assert plan(finished, "study", study=study) == again | {"arm": 1}
    del study[1]["arms"][2]["set"]["train.lr"]
    study[1]["arms"][2]["label"] = "Another name"
    assert plan(finished, "study", study=study) == again


@pytest.mark.parametrize("changes", [{"hardware__tensorboard": True}, {"hardware__checkpoint_every": 3}])
def test_changed_hardware_reruns_nothing(finished, changes):
    config = write_config(finished, "hardware.yaml", **changes)
    assert "Nothing to be done" in run(finished, "-n", "tables", "figures", config=config)


def test_an_arm_that_is_a_run_of_the_paper_or_of_an_earlier_stage_is_trained_once(finished):
    results = finished / "results/test"
    own = {path.parent.relative_to(results / "study").as_posix() for path in results.rglob("study/**/result.json")}
    assert own == {f"{arm}/seed1" for arm in ("S1/internal_50_75", "S1/diverging", "S4/internal_relative")}
    shared, folder = stage_rows(finished, "S1")["internal_25_100"], "pretrain/internal_aux/d24/seed1"
    assert shared["folder"] == folder
    assert float(shared["valid_ce"]) == values_of(results / folder / "result.json")["valid_ce"]
    first, fourth = (stage_rows(finished, stage)["internal_50_75"] for stage in ("S1", "S4"))
    assert {key for key in first if first[key] != fourth[key]} == {"stage"}


def test_a_stage_has_a_row_for_what_diverged_and_gaps_that_are_those_of_its_rows(finished):
    tables = finished / "results/test/tables"
    row = stage_rows(finished, "S1")["diverging"]
    assert (row["outcome"], row["valid_ce"]) == ("diverged", "")
    assert row["reason"].endswith("is not finite")
    assert "Baseline, an absurd learning rate, seed 1, diverged at step" in (tables / "table_S1.md").read_text()
    rows = stage_rows(finished, "S4")
    mine, theirs = (float(rows[arm]["valid_ce"]) for arm in ("internal_relative", "baseline"))
    (record,) = [row for row in rows_of(tables / "table_S4.csv") if row["arm"] == "internal_relative"]
    assert float(record["gap_percent"]) == pytest.approx(100 * (mine / theirs - 1), abs=1e-9)
    assert (record["n"], record["gap_pairs"]) == ("1", "1")


def test_finished_models_are_scored_on_odd_inputs_and_their_tables_are_made_from_published_rows(finished, tmp_path):
    """One width, one stage and one seed: their models are there, and nothing is trained."""
    whole = yaml.safe_load((finished / TEST).read_text())
    few: dict[str, Any] = {"seeds": [1], "widths": whole["widths"][1:2], "gpt2": None, "study": whole["study"][:1]}
    jobs = {"corpus": 1, "scored_tokens": 1, "robustness": 2, "study_S3": 1, "table": 3, "figure": 1}
    assert plan(finished, "study_S3", **few) == jobs | {"rows_study_S3": 1, "rows_study_S3_S1": 1}
    config = write_config(finished, "odd.yaml", **few)
    run(finished, "study_S3", config=config)
    results = finished / "results/test"
    scores, arms = (
        json.loads((results / f"robustness/{place}/seed1.json").read_text()) for place in ("d24", "study/S1")
    )
    for found, model, folder in (
        (scores, "internal_aux", "fold/internal_aux/d24/seed1/fused"),
        (arms, "internal_50_75", "study/S1/internal_50_75/seed1"),
    ):
        weights = (results / folder / "model.safetensors").read_bytes()
        assert found["models"][model]["weights_sha256"] == hashlib.sha256(weights).hexdigest()
    assert arms["diverged"] == ["diverging"]
    assert "diverging" not in arms["models"]
    baseline = [[row for row in found["scores"] if row["model"] == "baseline"] for found in (scores, arms)]
    assert baseline[0] == baseline[1]  # the same run, on the same rows

    shutil.copytree(results / "robustness", tmp_path / "results/test/robustness")
    shutil.copytree(results / "tables", tmp_path / "results/test/tables", ignore=lambda _, names: only_odd(names))
    where = ["--results", f"{tmp_path}/results", "--figures", f"{tmp_path}/figures"]
    assert (
        main(["compare", "--publish", "--run", "test", *where, "--config", f"{finished}/{config}", "--any-code"]) == 0
    )
    published, drawn = (files_below(tmp_path / root / "published/test") for root in ("results", "figures"))
    names = {f"tables/table_S3{which}.{kind}" for which in ("", "x", "_S1") for kind in ("csv", "md", "tex")}
    assert names == {name for name in published if name.startswith("tables/table")}
    assert drawn.keys() == {f"figure_S3.{kind}" for kind in ("csv", "md", "pdf", "png", "tex")}
    computed = files_below(results) | files_below(finished / "figures/test")
    assert {name: computed[name] for name in (*names, *drawn)} == {
        name: (published | drawn)[name] for name in (*names, *drawn)
    }


def only_odd(names: list[str]) -> list[str]:
    return [name for name in names if not name.startswith("study_S3")]
