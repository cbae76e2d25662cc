"""The workflow on real text: whole runs of Snakemake in a copy of the project, kills included."""

import csv
import hashlib
import json
import re
import shutil
import statistics
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from places import ROOT
from snakemake_runs import planned, project, snakemake, write_config

from tapernorm_lab.cli.main import main
from tapernorm_lab.config.load import load_config

TABLES = ("1", "2", "2x", "2v1", "3", "3x", "4", "5")
FIGURES = ("1a", "1b", "2", "_decode", "_finetune")
OF_PUBLICATION = ("config.json", "provenance.csv", "rows/curves.csv.gz", "gpt2_rows/curves.csv.gz")


def make_smaller(folder: Path) -> None:
    """Give config/test.yaml each kind of job, and no more of them than the tests look at."""
    path = folder / "config/test.yaml"
    config = yaml.safe_load(path.read_text())
    narrow, wide = config["widths"]
    narrow["variants"], wide["variants"] = ["baseline", "all_aux"], ["baseline", "internal", "internal_aux"]
    config["gpt2"] |= {"sizes": config["gpt2"]["sizes"][:1], "methods": ["vanilla", "fakeln", "all_aux"]}
    for stage in config["study"]:
        stage["seeds"] = [1]
    path.write_text(yaml.safe_dump(config))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The project after `snakemake tables figures study` on a smaller config/test.yaml."""
    folder = project(tmp_path_factory.mktemp("project"))
    make_smaller(folder)
    done = snakemake(folder, "tables", "figures", "study", "--configfile", "config/test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_one_command_makes_every_table_and_figure(finished):
    made = {str(p.relative_to(finished)) for p in finished.rglob("*") if p.is_file()}
    tables = {f"results/test/tables/table{n}.{kind}" for n in TABLES for kind in ("csv", "md", "tex")}
    figures = {f"figures/test/figure{n}.{kind}" for n in FIGURES for kind in ("pdf", "png", "csv")}
    assert tables | figures <= made


@pytest.mark.slow
def test_every_tapered_model_is_folded_and_table1_says_what_that_moved(finished):
    trained = {
        p.relative_to(finished / "results/test/pretrain").parent for p in finished.rglob("pretrain/**/result.json")
    }
    folded = {p.relative_to(finished / "results/test/fold").parent for p in finished.rglob("fold/**/result.json")}
    assert folded == {job for job in trained if job.parts[0] != "baseline"}
    for job in folded:
        for form in ("unfused", "fused"):
            assert (finished / "results/test/fold" / job / form / "model.safetensors").is_file()
    values = [
        json.loads((finished / "results/test/fold" / job / "result.json").read_text())["values"] for job in folded
    ]
    moved = max(
        abs(v[f"valid_ce_{f}"]["value"] - v["valid_ce_gated"]["value"]) for v in values for f in ("unfused", "fused")
    )
    note = f"moved the loss of the 6 tapered models by at most {moved:.1e} nats/token"
    assert moved < 1e-5
    assert note in (finished / "results/test/tables/table1.md").read_text()


@pytest.mark.slow
def test_table1_holds_the_losses_that_the_runs_wrote(finished):
    losses = [
        json.loads(path.read_text())["values"]["valid_ce"]["value"]
        for path in finished.glob("results/test/pretrain/baseline/d24/seed*/result.json")
    ]
    rows = csv.DictReader((finished / "results/test/tables/table1.csv").read_text().splitlines())
    row = next(r for r in rows if r["variant"] == "baseline" and r["d_model"] == "24")
    assert float(row["valid_ce_mean"]) == pytest.approx(statistics.mean(losses), rel=1e-12)
    assert int(row["n"]) == len(losses) == 2


@pytest.mark.slow
def test_no_checkpoint_is_left_after_success(finished):
    assert not list(finished.glob("results/test/pretrain/**/resume*"))


@pytest.mark.slow
def test_every_job_leaves_a_log(finished):
    logs = {
        p.relative_to(finished / "results/test/logs").as_posix() for p in finished.glob("results/test/logs/**/*.log")
    }
    assert {"data/corpus.log", "data/tokenizer.log", "data/tokens.log", "rows/training.log"} <= logs
    assert {"tables/table1.log", "figures/figure2.log"} <= logs
    assert "step 40/40" in (finished / "results/test/logs/pretrain/internal_aux/d24/seed2.log").read_text()


@pytest.mark.slow
def test_a_second_run_does_nothing(finished):
    done = snakemake(finished, "tables", "figures", "study", "--configfile", "config/test.yaml")
    assert "Nothing to be done" in done.stdout + done.stderr


@pytest.mark.slow
def test_a_lost_figure_is_drawn_again_and_nothing_else_runs(finished):
    figure = finished / "figures/test/figure2.png"
    before = figure.read_bytes()
    figure.unlink()
    assert planned(snakemake(finished, "-n", "figure2", "--configfile", "config/test.yaml")) == {
        "figure": 1,
        "figure2": 1,
    }
    assert snakemake(finished, "figure2", "--configfile", "config/test.yaml").returncode == 0
    assert figure.read_bytes() == before


@pytest.mark.parametrize(("target", "figures"), [("figure1b", 1), ("figures", 5)])
def test_a_clone_comes_with_published_runs_and_computes_its_own_all_the_same(tmp_path, target, figures):
    folder = project(tmp_path)
    for root in ("results", "figures"):
        shutil.copytree(ROOT / root / "published", folder / root / "published")
    plan = planned(snakemake(folder, "-n", target))
    demo = load_config(ROOT / "config/demo.yaml")
    assert (plan["pretrain"], plan["figure"]) == (len(demo.pretrain_cells()), figures)
    assert plan["pretrain"] > 20


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_run_is_published_drawn_anew_and_compared_with_itself(finished, capsys):
    """All that is drawn from the rows that are published is what the workflow drew from all rows, byte for byte."""
    assert snakemake(finished, "claims", "--configfile", "config/test.yaml").returncode == 0
    where = ["--results", f"{finished}/results", "--figures", f"{finished}/figures"]
    config = ["--config", f"{finished}/config/test.yaml"]
    assert main(["compare", "--publish", "--run", "test", *where, *config, "--any-code"]) == 0
    results, drawn = (finished / root / "published/test" for root in ("results", "figures"))
    for place, published in ((finished / "results/test", results), (finished / "figures/test", drawn)):
        computed, files = files_below(place), files_below(published)
        files = {name: content for name, content in files.items() if name not in OF_PUBLICATION}
        assert {name: computed[name] for name in files} == files
    tables = {f"tables/table{n}.{kind}" for n in (*TABLES, "_S1", "_S4") for kind in ("csv", "md", "tex")}
    assert tables | {"claims.md", "bench/decode.json", "tables/study_S1.csv"} <= files_below(results).keys()
    assert len(files_below(drawn)) == 3 * (len(FIGURES) + 1)
    with open(results / "provenance.csv", newline="") as file:
        told = list(csv.DictReader(file))
    assert len([row for row in told if row["kind"] == "pretrain" and row["part"] == "training"]) == 10
    assert all((finished / "results/test" / row["file"]).is_file() for row in told)
    assert all("torch " in row["versions"] and row["written_at"] and row["config_hash"] for row in told)

    whole = files_below(results) | files_below(drawn)
    for place in (results / "tables", drawn):
        for made in place.glob("*.md"):
            made.write_text("old")
    (drawn / "figure2.pdf").unlink()
    assert main(["figure", "--published", "test", *where]) == 0
    assert files_below(results) | files_below(drawn) == whole

    capsys.readouterr()
    assert main(["compare", "--run", "test", *where[:2], *config]) == 0
    told = capsys.readouterr().out.splitlines()
    counts = {name: re.findall(r"(\d+) of (\d+)", line) for name, _, line in (line.partition(": ") for line in told)}
    for name in [f"table{n}" for n in TABLES] + ["table_S1", "table_S4", "claims"]:
        assert counts[name], name
        assert all(equal == values != "0" for equal, values in counts[name]), name
    assert not [line for line in told if "only" in line or "differ" in line]


REPORT = {"bench": 2, "rows_training": 1, "table": 6, "figure": 4, "tables": 1, "figures": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "retrained", "folded"),
    [
        ({"taper__end_fraction": 0.8}, 6, 6),  # every tapered job, no Baseline
        ({"taper__anchor_weight": 0.2}, 4, 4),  # the +aux jobs alone
        ({"train__lr": 2e-3}, 10, 6),
    ],
)
def test_a_changed_setting_reruns_what_depends_on_it(finished, changes, retrained, folded):
    config = write_config(finished, "changed.yaml", **changes)
    plan = planned(snakemake(finished, "-n", "tables", "figures", "--configfile", config))
    assert plan == REPORT | {"pretrain": retrained, "fold": folded}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "value", "finetuned", "folded"),
    [
        ("fakeln_weight", 0.2, 1, 1),  # FakeLN alone
        ("anchor_weight", 0.2, 1, 1),  # the taper alone
        ("lr", 2e-3, 3, 2),  # every method
    ],
)
def test_a_changed_setting_of_a_method_reruns_that_method(finished, place, value, finetuned, folded):
    gpt2 = yaml.safe_load((finished / "config/test.yaml").read_text())["gpt2"]
    gpt2["sizes"][0][place] = value
    plan = planned(snakemake(finished, "-n", "table3", "--configfile", write_config(finished, "size.yaml", gpt2=gpt2)))
    jobs = {"finetune": finetuned, "finetune_fold": folded, "evaluate": finetuned}
    assert plan == jobs | {"rows_gpt2": 1, "table": 2, "table3": 1}


@pytest.mark.slow
def test_table3_holds_the_means_that_the_evaluations_wrote(finished):
    rows = list(csv.DictReader((finished / "results/test/tables/table3.csv").read_text().splitlines()))
    ours = {(row["size"], row["method"], row["corpus"]): float(row["ce_mean"]) for row in rows if row["corpus"]}
    for path in finished.glob("results/test/evaluate/*/*/seed1.json"):
        scores = json.loads(path.read_text())
        model = scores["job"]["model"]
        for corpus, entry in scores["corpora"].items():
            forms = entry["forms"]
            assert ours[model["size"], model["method"], corpus] == forms["gated"]["rows"]["mean"]
            if model["method"] != "vanilla":
                assert forms["fused"]["rows"]["mean"] == pytest.approx(forms["gated"]["rows"]["mean"], abs=1e-5)
    table = (finished / "results/test/tables/table3.md").read_text()
    assert "standard library of CPython" in table


def stage_rows(folder: Path, stage: str) -> dict[tuple[str, str], dict[str, str]]:
    """(arm, seed) -> its row."""
    text = (folder / f"results/test/tables/study_{stage}.csv").read_text()
    return {(row["arm"], row["seed"]): row for row in csv.DictReader(text.splitlines())}


@pytest.mark.slow
def test_every_stage_of_the_study_has_its_table_and_its_figure_if_it_has_one(finished):
    made = {str(p.relative_to(finished)) for p in finished.rglob("*") if p.is_file()}
    assert {f"results/test/tables/table_{s}.{kind}" for s in ("S1", "S4") for kind in ("csv", "md", "tex")} <= made
    assert {f"figures/test/figure_S1.{kind}" for kind in ("pdf", "png", "csv")} <= made
    assert not [path for path in made if path.startswith("figures/test/figure_S4")]
    assert "results/test/logs/study/S1/diverging/seed1.log" in made


@pytest.mark.slow
def test_an_arm_that_is_a_run_of_the_paper_or_of_an_earlier_stage_is_trained_once(finished):
    own = {p.parent.relative_to(finished / "results/test/study") for p in finished.rglob("study/**/result.json")}
    arms = ("S1/internal_50_75", "S1/diverging", "S4/internal_relative")
    assert own == {Path(f"{arm}/seed1") for arm in arms}
    run = json.loads((finished / "results/test/pretrain/internal_aux/d24/seed1/result.json").read_text())
    shared = stage_rows(finished, "S1")["internal_25_100", "1"]
    assert (float(shared["valid_ce"]), shared["folder"]) == (
        run["values"]["valid_ce"]["value"],
        "pretrain/internal_aux/d24/seed1",
    )
    first, fourth = (stage_rows(finished, stage)["internal_50_75", "1"] for stage in ("S1", "S4"))
    assert {key for key in first if first[key] != fourth[key]} == {"stage"}


@pytest.mark.slow
def test_an_arm_that_diverges_stops_nothing_and_is_a_row_with_its_reason(finished):
    row = stage_rows(finished, "S1")["diverging", "1"]
    assert (row["outcome"], row["valid_ce"]) == ("diverged", "")
    assert row["reason"].endswith("is not finite")
    assert (
        "Baseline, an absurd learning rate, seed 1, diverged at step"
        in (finished / "results/test/tables/table_S1.md").read_text()
    )


@pytest.mark.slow
def test_gaps_of_a_stage_are_those_of_its_rows(finished):
    rows = stage_rows(finished, "S4")
    mine, theirs = (float(rows[arm, "1"]["valid_ce"]) for arm in ("internal_relative", "baseline"))
    text = (finished / "results/test/tables/table_S4.csv").read_text()
    record = next(r for r in csv.DictReader(text.splitlines()) if r["arm"] == "internal_relative")
    assert float(record["gap_percent"]) == pytest.approx(100 * (mine / theirs - 1), abs=1e-9)
    assert (record["n"], record["gap_pairs"]) == ("1", "1")


@pytest.mark.slow
def test_a_changed_arm_runs_again_alone(finished):
    study = yaml.safe_load((finished / "config/test.yaml").read_text())["study"]
    study[1]["arms"][2]["set"]["train.lr"] = 2e-3
    changed = write_config(finished, "arm.yaml", study=study)
    again = {"rows_study_S4": 1, "table": 1, "study": 1}
    assert planned(snakemake(finished, "-n", "study", "--configfile", changed)) == again | {"arm": 1}
    del study[1]["arms"][2]["set"]["train.lr"]
    study[1]["arms"][2]["label"] = "Another name"
    renamed = write_config(finished, "arm.yaml", study=study)
    assert planned(snakemake(finished, "-n", "study", "--configfile", renamed)) == again


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"hardware__tensorboard": True}, {"hardware__checkpoint_every": 3}])
def test_changed_hardware_reruns_nothing(finished, changes):
    config = write_config(finished, "hardware.yaml", **changes)
    done = snakemake(finished, "-n", "tables", "figures", "--configfile", config)
    assert "Nothing to be done" in done.stdout + done.stderr


def test_the_paper_config_plans_every_run_of_the_paper():
    done = snakemake(ROOT, "-n", "tables", "figures", "--configfile", "config/paper.yaml", "--nolock")
    jobs = {"pretrain": 6 * (4 * 3 + 2), "fold": 6 * (4 * 2 + 2)}  # six seeds: three variants, at one width two more
    data = {"corpus": 2, "tokenizer": 2, "tokens": 2, "scored_tokens": 2}  # to pre-train on, and for GPT-2
    gpt2 = {"base": 4, "published": 2 * 4, "finetune": 4 * 4, "finetune_fold": 3 * 4}  # four sizes, four methods
    scored = {"evaluate": 4 * 4, "evaluate_base": 4 + 2 * 4}
    report = REPORT | {"table": 8, "figure": 5, "rows_gpt2": 1}
    assert planned(done) == report | jobs | data | gpt2 | scored


def test_held_out_rows_can_be_filtered_too(tmp_path):
    folder = project(tmp_path)
    corpora = yaml.safe_load((folder / "config/test.yaml").read_text())["gpt2"]["corpora"]
    corpora[2]["of"] = "web"
    config = write_config(folder, "mine.yaml", gpt2__corpora=corpora)
    done = snakemake(folder, "-n", "-p", "table3", "--configfile", config)
    assert planned(done)["filter"] == 1
    assert "--rows results/test/gpt2/blocks/train --seen results/test/gpt2/blocks/base" in done.stdout + done.stderr


def test_a_misspelt_setting_is_one_clear_error(tmp_path):
    folder = project(tmp_path)
    config = write_config(folder, "misspelt.yaml", taper__anchor_wieght=0.1)
    done = snakemake(folder, "-n", "tables", "--configfile", config)
    assert done.returncode != 0
    assert "taper.anchor_wieght: unknown key; valid keys here are anchor_weight, ema_rate" in done.stdout + done.stderr
    assert not (folder / "results").exists()


def own_text(*files, **changes):
    data = {"source": "text", "files": list(files), "field": "text", "part": None}
    return {**data, "valid_fraction": 0.2, "max_train_documents": None, **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seeds": [10**22]}, "seeds.0: Input should be less than or equal to"),
        ({"seeds": [True]}, "seeds: True is not a number"),
        ({"data": own_text("no{wildcard}.txt")}, "no{wildcard}.txt has a brace in its name"),
        ({"gpt2__text": [own_text("absent.txt")]}, "data.files: 'absent.txt' matches no file"),
    ],
)
def test_a_config_that_cannot_be_is_one_clear_error(tmp_path, changes, said):
    folder = project(tmp_path)
    (folder / "no{wildcard}.txt").write_text("A text.")
    done = snakemake(folder, "-n", "table1", "--configfile", write_config(folder, "bad.yaml", **changes))
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not (folder / "results").exists()


def test_a_folder_of_parquet_files_stands_in_for_openwebtext(tmp_path):
    folder = project(tmp_path)
    (folder / "shards").mkdir()
    table = pyarrow.table({"text": ["one", "two"]})
    pyarrow.parquet.write_table(table, folder / "shards/a.parquet")
    text = own_text("shards", source="openwebtext", field=None, valid_fraction=None)
    done = snakemake(folder, "-n", "table3", "--configfile", write_config(folder, "mine.yaml", gpt2__text=[text]))
    assert planned(done)["corpus"] == 3


def test_a_config_that_lacks_a_setting_does_not_get_the_demos(tmp_path):
    folder = project(tmp_path)
    config = yaml.safe_load((folder / "config/test.yaml").read_text())
    del config["train"]["lr"]
    (folder / "config/lacking.yaml").write_text(yaml.safe_dump(config))
    done = snakemake(folder, "-n", "tables", "--configfile", "config/lacking.yaml")
    assert done.returncode != 0
    assert "train.lr: missing" in done.stdout + done.stderr


def test_an_edited_text_file_makes_the_corpus_anew(tmp_path):
    folder = project(tmp_path)
    text = folder / "mine.txt"
    text.write_text("<|endoftext|>".join(f"Document {i} says {i * i}." for i in range(200)))
    data = {"source": "text", "files": ["mi*.txt"], "field": "text", "part": None}
    data |= {"valid_fraction": 0.2, "max_train_documents": None}
    arguments = ("results/test/data/corpus/manifest.json", "--configfile", write_config(folder, "mine.yaml", data=data))
    assert snakemake(folder, *arguments).returncode == 0
    assert "Nothing to be done" in (again := snakemake(folder, *arguments)).stdout + again.stderr
    time.sleep(1.1)  # Snakemake compares whole seconds on some file systems
    text.write_text(text.read_text() + "<|endoftext|>One more.")
    assert planned(snakemake(folder, "-n", *arguments)) == {"corpus": 1}
    (folder / "mine2.txt").write_text("A new file that the pattern matches.")
    assert planned(snakemake(folder, "-n", *arguments)) == {"corpus": 1}


@pytest.mark.slow
def test_finished_models_are_tried_on_odd_inputs_and_their_tables_are_made_from_published_rows(finished, tmp_path):
    """One width, one stage and one seed: their models are there, and nothing is trained."""
    whole = yaml.safe_load((finished / "config/test.yaml").read_text())
    width, stage = whole["widths"][1], whole["study"][0]
    config = write_config(finished, "odd.yaml", seeds=[1], widths=[width], gpt2=None, study=[stage])
    plan = {"corpus": 1, "scored_tokens": 1, "robustness": 2, "study_S3": 1, "table": 3, "figure": 1}
    plan |= {"rows_study_S3": 1, "rows_study_S3_S1": 1}
    assert planned(snakemake(finished, "-n", "study_S3", "--configfile", config)) == plan
    done = snakemake(finished, "study_S3", "--configfile", config)
    assert done.returncode == 0, done.stdout + done.stderr
    scores = json.loads((finished / "results/test/robustness/d24/seed1.json").read_text())
    fused = finished / "results/test/fold/internal_aux/d24/seed1/fused/model.safetensors"
    assert scores["models"]["internal_aux"]["weights_sha256"] == hashlib.sha256(fused.read_bytes()).hexdigest()
    arms = json.loads((finished / "results/test/robustness/study/S1/seed1.json").read_text())
    run = finished / "results/test/study/S1/internal_50_75/seed1/model.safetensors"
    assert arms["models"]["internal_50_75"]["weights_sha256"] == hashlib.sha256(run.read_bytes()).hexdigest()
    assert arms["diverged"] == ["diverging"]
    assert "diverging" not in arms["models"]
    baseline = [[row for row in found["scores"] if row["model"] == "baseline"] for found in (scores, arms)]
    assert baseline[0] == baseline[1]  # the same run, on the same rows
    for rows in (finished / "results/test/tables").glob("study_S3*.csv"):
        (tmp_path / "results/test/tables").mkdir(parents=True, exist_ok=True)
        shutil.copy(rows, tmp_path / "results/test/tables")
    shutil.copytree(finished / "results/test/robustness", tmp_path / "results/test/robustness")
    where = ["--results", f"{tmp_path}/results", "--figures", f"{tmp_path}/figures"]
    assert (
        main(["compare", "--publish", "--run", "test", *where, "--config", f"{finished}/{config}", "--any-code"]) == 0
    )
    results, drawn = (files_below(tmp_path / root / "published/test") for root in ("results", "figures"))
    made = {
        f"tables/{name}.{kind}" for name in ("table_S3", "table_S3x", "table_S3_S1") for kind in ("csv", "md", "tex")
    }
    assert made == {name for name in results if name.startswith("tables/table")}
    assert drawn.keys() == {f"figure_S3.{kind}" for kind in ("csv", "md", "pdf", "png", "tex")}
    for name in made:
        assert results[name] == (finished / "results/test" / name).read_bytes()
    for name, content in drawn.items():
        assert content == (finished / "figures/test" / name).read_bytes()
