"""Publishing: what is refused, what is kept, and that the rows that are kept draw what all rows draw."""

import csv
import gzip
import json
import shutil
from pathlib import Path

import own_runs
import pytest
import yaml
from publication_desk import TABLES, Desk

from tapernorm_lab.cli.main import main
from tapernorm_lab.config.load import load_config
from tapernorm_lab.report import catalogue, makers, publication


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that was computed and published."""
    desk = Desk(tmp_path_factory.mktemp("desk"))
    desk.write_config()
    desk.compute()
    assert desk.publish() == 0
    return desk.folder


@pytest.fixture
def desk(whole, tmp_path) -> Desk:
    folder = tmp_path / "desk"
    shutil.copytree(whole, folder)
    return Desk(folder)


def refused(desk: Desk, capsys, *more: str) -> str:
    """The message; nothing that is published has changed, and nothing is left beside it."""
    before = desk.files()
    assert desk.publish(*more) == 2
    assert desk.files() == before
    assert [path.name for path in desk.published.parent.iterdir()] == ["mine"]
    return capsys.readouterr().err


def test_what_is_published_draws_what_the_whole_rows_draw(desk, tmp_path):
    config = load_config(desk.config)
    found = makers.Rows(desk.computed)
    for entry in publication.drawable(catalogue.entries(config), desk.computed):
        makers.write(entry, found, tmp_path / "all", tmp_path / "all/figures")
    published = desk.files()
    drawn = {path.relative_to(tmp_path / "all") for path in (tmp_path / "all").rglob("*") if path.is_file()}
    assert set(map(str, drawn)) >= TABLES
    assert len([name for name in drawn if name.parts[0] == "figures"]) == 3 * 5
    for name in drawn:
        assert published[str(name).removeprefix("figures/")] == (tmp_path / "all" / name).read_bytes(), name


def test_curves_are_kept_as_far_as_they_are_drawn_and_letter_by_letter(desk):
    with open(desk.computed / "rows/curves.csv", encoding="utf-8", newline="") as file:
        computed = list(csv.DictReader(file))
    packed = desk.published / "rows/curves.csv.gz"
    kept = list(csv.DictReader(gzip.decompress(packed.read_bytes()).decode().splitlines()))
    columns = ("variant", "d_model", "seed", "step", "ce", "gate", "grad_norm", "logit_rms", "logit_max")
    assert set(kept[0]) == set(columns)
    assert {"lr", "elapsed_s", "valid_ce"} <= set(computed[0])
    assert [[row[column] for column in columns] for row in kept] == [[r[c] for c in columns] for r in computed]
    assert (desk.published / "rows/results.csv").read_bytes() == (desk.computed / "rows/results.csv").read_bytes()
    before = packed.read_bytes()
    assert desk.publish() == 0
    assert packed.read_bytes() == before


def test_every_result_behind_the_rows_is_told(desk):
    told = desk.provenance()
    training = {row["file"]: row for row in told if row["part"] == "training"}
    assert training.keys() == {str(path.relative_to(desk.computed)) for path in desk.computed.rglob("result.json")}
    assert len(training) == 8 + 4
    assert {row["file"] for row in told if row["part"] == "S1"} == {
        f"pretrain/{variant}/d24/seed{seed}/result.json" for variant in ("baseline", "all_aux") for seed in (1, 2)
    }
    document = json.loads((desk.computed / "fold/all_aux/d16/seed2/result.json").read_text(encoding="utf-8"))
    row, facts = training["fold/all_aux/d16/seed2/result.json"], document["provenance"]
    assert (row["commit"], row["dirty"], row["config_hash"]) == (facts["commit"], "no", facts["config_hash"])
    assert (row["written_at"], row["versions"]) == (facts["written_at"], "torch 2.13.0")
    assert all(row["published_at"] for row in told)


def test_a_stage_that_alone_was_computed_replaces_its_part_and_keeps_the_others(desk):
    before, told = desk.files(), desk.provenance()
    desk.compute(commit="b" * 40)
    for path in (desk.computed / "rows").iterdir():
        path.unlink()
    assert desk.publish() == 0
    after = desk.files()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"provenance.csv", "tables/study_S1.csv", "tables/table_S1.md", "tables/table_S1.tex"}
    assert after.keys() == before.keys()
    kept = [row for row in desk.provenance() if row["part"] == "training"]
    assert kept == [row for row in told if row["part"] == "training"]
    assert {row["commit"] for row in desk.provenance() if row["part"] == "S1"} == {"b" * 40}


def test_what_the_config_has_no_more_goes_and_what_others_put_there_stays(desk):
    (desk.published / "tables/notes.txt").write_text("mine", encoding="utf-8")
    desk.write_config(study=None)
    assert desk.publish() == 0
    found = desk.files()
    assert [name for name in found if "S1" in name] == []
    assert found["tables/notes.txt"] == b"mine"
    assert "tables/table1.md" in found


@pytest.mark.parametrize("commit", ["c" * 40 + "+dirty", None])
def test_results_of_edited_or_unknown_code_are_published_only_when_asked_to(desk, capsys, commit):
    desk.compute(commit=commit)
    message = refused(desk, capsys)
    assert "12 of the 12 results behind training" in message
    assert "--any-code" in message
    assert desk.publish("--any-code") == 0
    assert {row["dirty"] for row in desk.provenance()} == {"yes" if commit else ""}


def test_rows_that_are_older_than_their_results_are_refused(desk, capsys):
    path = desk.computed / "pretrain/all_aux/d16/seed1/result.json"
    path.write_text(path.read_text(encoding="utf-8").replace("a" * 40, "b" * 40), encoding="utf-8")
    assert "rows/results.csv" in refused(desk, capsys)
    desk.gather([str(found) for found in sorted(desk.computed.rglob("result.json"))])
    assert desk.publish() == 0


def test_rows_of_other_settings_than_the_configs_are_refused(desk, capsys):
    raw = yaml.safe_load(desk.config.read_text(encoding="utf-8"))
    raw["train"]["lr"] = 0.5
    desk.config.write_text(yaml.safe_dump(raw), encoding="utf-8")
    assert "all_aux 16 1" in refused(desk, capsys)
    shutil.rmtree(desk.computed / "rows")  # so that they would be kept, beside a stage of the new config
    shutil.rmtree(desk.computed / "tables")
    desk.compute()
    shutil.rmtree(desk.computed / "rows")
    assert "all_aux 16 1" in refused(desk, capsys)


@pytest.mark.parametrize("lost", ["rows/curves.csv", "pretrain/baseline/d24/seed1/result.json"])
def test_a_part_of_which_something_is_missing_is_refused_by_name(desk, capsys, lost):
    (desk.computed / lost).unlink()
    assert lost in refused(desk, capsys)


def test_a_run_that_was_not_computed_is_refused(desk, capsys):
    shutil.rmtree(desk.computed)
    assert "holds no rows" in refused(desk, capsys)


def test_a_large_file_is_refused_by_name(desk, capsys, monkeypatch):
    monkeypatch.setattr(publication, "LARGEST", 10_000)
    assert "at most 10,000" in refused(desk, capsys)


def test_a_file_that_names_a_folder_of_the_machine_is_refused(desk, capsys, monkeypatch):
    monkeypatch.chdir(desk.folder)
    desk.write_config(caption=f"Texts of {desk.folder}/books.")
    assert f"names {desk.folder}" in refused(desk, capsys)


def test_a_run_is_drawn_anew_from_what_is_published_alone(desk, capsys):
    before = desk.files()
    shutil.rmtree(desk.computed)
    desk.config.unlink()
    for name in ("tables/table1.md", "claims.csv"):
        (desk.published / name).unlink()
    (desk.drawn / "figure2.pdf").write_bytes(b"old")
    assert main(["figure", "--published", "mine", *desk.where]) == 0
    assert desk.files() == before
    assert not desk.computed.exists()
    (desk.published / "rows/results.csv").unlink()
    assert main(["figure", "--published", "mine", *desk.where]) == 2
    assert "rows/results.csv" in capsys.readouterr().err


@pytest.mark.parametrize("call", [["figure", "--published"], ["compare", "--run"]])
def test_a_run_that_is_not_published_is_told(tmp_path, capsys, call):
    assert main([*call, "absent", "--results", str(tmp_path)]) == 2
    assert "make publish RUN=absent" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "../demo", "a/b", ".hidden"])
def test_a_name_that_leads_elsewhere_is_refused(name):
    for call in (["figure", "--published"], ["compare", "--run"]):
        with pytest.raises(SystemExit):
            main([*call, name])


def test_a_run_without_a_config_of_its_name_asks_for_one(tmp_path, capsys):
    assert (
        main(["compare", "--publish", "--run", "absent", "--results", str(tmp_path), "--figures", str(tmp_path)]) == 2
    )
    assert "--config" in capsys.readouterr().err


def test_the_figures_of_a_benchmark_are_published_with_their_provenance(tmp_path, capsys):
    where = ["--results", f"{tmp_path}/results", "--figures", f"{tmp_path}/figures"]
    computed, published = tmp_path / "results/bench", tmp_path / "results/published/bench"
    computed.mkdir(parents=True)
    written = {"bench": [{"name": "a", "value": 1}], "samples": {"a": [1.0]}, "provenance": {"commit": "d" * 40}}
    for name, value in written.items():
        (computed / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    assert main(["compare", "--publish", "--run", "bench", *where]) == 0
    for name in written:
        assert (published / f"{name}.json").read_bytes() == (computed / f"{name}.json").read_bytes()
    with open(published / "provenance.csv", newline="") as file:
        assert [(row["file"], row["commit"]) for row in csv.DictReader(file)] == [("bench.json", "d" * 40)]
    (computed / "provenance.json").write_text(json.dumps({"commit": "d" * 40 + "+dirty"}), encoding="utf-8")
    assert main(["compare", "--publish", "--run", "bench", *where]) == 2
    assert main(["figure", "--published", "bench", *where]) == 2
    assert "--published RUN" in capsys.readouterr().err


def test_comparisons_with_other_engines_are_published_beside_the_figures_and_without_them(tmp_path):
    where = ["--results", f"{tmp_path}/results", "--figures", f"{tmp_path}/figures"]
    computed, published = tmp_path / "results/bench", tmp_path / "results/published/bench"
    computed.mkdir(parents=True)
    told = [{"provenance": {"commit": letter * 40}, "rows": []} for letter in "de"]
    (computed / "rivals.json").write_text(json.dumps({"comparisons": told}), encoding="utf-8")
    assert main(["compare", "--publish", "--run", "bench", *where]) == 0
    for name, value in {"bench": [], "samples": {}, "provenance": {"commit": "f" * 40}}.items():
        (computed / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    (computed / "rivals.json").unlink()  # what is not computed now stays published
    assert main(["compare", "--publish", "--run", "bench", *where]) == 0
    assert json.loads((published / "rivals.json").read_text())["comparisons"] == told
    with open(published / "provenance.csv", newline="") as file:
        found = [(row["part"], row["file"], row["commit"][0]) for row in csv.DictReader(file)]
    assert found == [("bench", "bench.json", "f"), ("rivals", "rivals.json", "d"), ("rivals", "rivals.json", "e")]
    told[1]["provenance"]["commit"] += "+dirty"
    (computed / "rivals.json").write_text(json.dumps({"comparisons": told}), encoding="utf-8")
    assert main(["compare", "--publish", "--run", "bench", *where]) == 2


def test_tapers_of_ones_own_are_published_and_drawn_anew(tmp_path):
    runs = [f"{label}={own_runs.write_run(tmp_path / label, after=3.0)}" for label in ("one", "two")]
    results, drawn = tmp_path / "results/tiny", tmp_path / "figures/tiny"
    assert main(["rows", "tapers", *runs, "--run", "tiny", "--out", f"{results}/rows"]) == 0
    assert main(["table", "tapers", "--results", str(results), "--out", f"{results}/tables"]) == 0
    assert main(["figure", "tapers", "--results", str(results), "--out", str(drawn)]) == 0
    where = ["--results", f"{tmp_path}/results", "--figures", f"{tmp_path}/figures"]
    assert main(["compare", "--publish", "--run", "tiny", *where]) == 0
    for made, published in ((results, results.parent), (drawn, drawn.parent)):
        names = {path.relative_to(made) for path in made.rglob("[!.]*") if path.suffix != ".html" and path.is_file()}
        assert len(names) >= 6
        for name in names:
            assert (published / "published/tiny" / name).read_bytes() == (made / name).read_bytes()
    before = (drawn.parent / "published/tiny/figure_spread_two.pdf").read_bytes()
    shutil.rmtree(results)
    shutil.rmtree(tmp_path / "one")
    assert main(["figure", "--published", "tiny", *where]) == 0
    assert (drawn.parent / "published/tiny/figure_spread_two.pdf").read_bytes() == before
