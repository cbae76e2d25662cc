"""The list of runs behind a table names every fact of each, and the versions in which they differ."""

import csv
import json

import pytest
import synthetic
import synthetic_bench

from tapernorm.util.errors import UserError
from tapernorm_lab.cli.main import main
from tapernorm_lab.report import provenance as origin
from tapernorm_lab.report import table

FACTS = {"host": "0123456789ab", "wall_time_s": 12.5, "written_at": "2026-01-01T00:00:00+00:00", "python": "3.11.9"}


def write(folder, name, document, **facts):
    document = {**document, "provenance": {**document["provenance"], **FACTS, **facts}}
    (folder / name).write_text(json.dumps(document))
    return folder / name


@pytest.fixture
def files(tmp_path):
    evaluation = {
        "schema_version": 1,
        "kind": "evaluate",
        "job": {"model": {"kind": "finetuned", "size": "small", "method": "fakeln", "seed": 2}},
        "corpora": {"web": {"targets": 630, "forms": {"gated": {}, "fused": {}}}},
        "provenance": {"config_hash": "e", "commit": None, "device": "cpu", "seed": 2},
    }
    bench = synthetic_bench.decode(modes=("eager",), batches=(1,), prompts=(128,), rounds=3)
    return [
        write(tmp_path, "a.json", synthetic.result("all_aux", 64, 3), packages={"torch": "2.13.0", "numpy": "2.4.6"}),
        write(
            tmp_path,
            "b.json",
            synthetic.fold_result("all_aux", 64, 3),
            packages={"torch": "2.12.1", "numpy": "2.4.6"},
            commit="b" * 40 + "+dirty",
        ),
        write(tmp_path, "c.json", evaluation, packages={"torch": "2.13.0", "numpy": "2.4.6", "transformers": "5.24.0"}),
        write(tmp_path, "d.json", bench, packages={"torch": "2.13.0", "numpy": "2.4.6"}, python="3.11.2"),
    ]


def test_every_result_is_named_by_its_kind_job_code_and_machine(files):
    pretrain, fold, evaluation, bench = origin.collect(files)
    assert [row["kind"] for row in (pretrain, fold, evaluation, bench)] == [
        "pretrain",
        "fold",
        "evaluate",
        "bench_decode",
    ]
    assert [row["job"] for row in (pretrain, fold, evaluation, bench)] == [
        "all_aux d64",
        "all_aux d64",
        "fakeln small",
        "internal_aux d512",
    ]
    assert (pretrain["commit"], pretrain["dirty"]) == ("a" * 40, "no")
    assert (fold["commit"], fold["dirty"]) == ("b" * 40, "yes")
    assert (evaluation["commit"], evaluation["dirty"]) == ("", "")
    assert {row["host"] for row in (pretrain, fold, evaluation, bench)} == {"0123456789ab"}
    assert (pretrain["wall_time_s"], pretrain["train_time_s"], pretrain["seed"]) == (12.5, 4.0, 3)


def test_tokens_are_those_trained_on_or_else_scored_or_decoded(files):
    pretrain, fold, evaluation, bench = origin.collect(files)
    assert pretrain["tokens"] == 40 * 1024
    assert fold["tokens"] is None
    assert evaluation["tokens"] == 2 * 630
    assert bench["tokens"] == 5 * 3 * (32 + 128)  # arms, rounds, tokens of a sample: decoded, or read as the prompt


def test_only_versions_that_differ_are_listed(files):
    versions = [row["versions"] for row in origin.collect(files)]
    assert versions[0] == "python 3.11.9, torch 2.13.0, transformers absent"
    assert versions[1] == "python 3.11.9, torch 2.12.1, transformers absent"
    assert not any("numpy" in listed for listed in versions)
    assert origin.collect(files[:1])[0]["versions"] == ""


def test_what_is_written_reads_back(files, tmp_path):
    rows = origin.collect(files)
    table.write_csv(origin.provenance_table(rows, run="r"), tmp_path / "out")
    with open(tmp_path / "out" / "provenance.csv", encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    assert read == [{key: "" if row[key] is None else str(row[key]) for key in origin.COLUMNS} for row in rows]


def test_the_verb_writes_the_list_in_place_of_rows(files, tmp_path):
    arguments = ["--run", "r", "--out", str(tmp_path / "out")]
    assert main(["rows", "provenance", *map(str, files), *arguments]) == 0
    assert {path.name for path in (tmp_path / "out").glob("[!.]*")} == {"provenance.csv", "provenance.html"}
    page = (tmp_path / "out/provenance.html").read_text()
    assert "The 4 results behind run r" in page


def test_a_file_of_another_kind_and_no_file_at_all_are_refused(tmp_path):
    with pytest.raises(UserError, match="RESULT"):
        origin.collect([])
    (tmp_path / "m.json").write_text(json.dumps({"schema_version": 1, "kind": "corpus"}))
    with pytest.raises(UserError, match="kind 'corpus'"):
        origin.collect([tmp_path / "m.json"])


def test_a_sentence_says_whether_runs_agree():
    assert origin.same_or_not("PyTorch", ["2.13.0", "2.13.0"]) == "PyTorch 2.13.0"
    assert origin.same_or_not("PyTorch", ["2.13.0", "2.12.1"]) == "PyTorch, not all the same (2): 2.12.1, 2.13.0"
