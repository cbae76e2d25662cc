"""Rows and tables of finished tapers against the run folders that they are made from."""

import csv
import math
import re

import pandas as pd
import pytest
from own_runs import GONE, write_run
from scale_files import NORMS, document

from tapernorm.util.atomic_files import read_json, write_json
from tapernorm.util.errors import UserError
from tapernorm_lab.report import table
from tapernorm_lab.report.catalogue import OWN_FILES
from tapernorm_lab.report.frames import own_models as own_rows
from tapernorm_lab.report.frames import token_scales as spread_rows
from tapernorm_lab.report.tables import own_models as own_tables

SHARED = {"run": "tiny", "caption": "A trial."}


def scores(runs):
    return own_tables.scores_table(own_rows.collect(runs, **SHARED))


def cells(made):
    headers = [f"{c.group}: {c.header}" if c.group else c.header for c in made.columns]
    return [dict(zip(headers, row, strict=True)) for row in made.rows]


def test_scores_hold_the_base_model_once_and_every_run(tmp_path):
    runs = {"all": write_run(tmp_path / "all", after=3.0), "fewer": write_run(tmp_path / "fewer", after=2.5, steps=20)}
    made = scores(runs)
    base, every, fewer = cells(made)
    assert (base["model"], base["norms gone"], base["bits/byte"]) == ("base model", "0 of 7", "1.0000")
    assert (every["model"], every["norms gone"], every["over rows: mean"]) == ("all", "5 of 7", "3.0000")
    assert (fewer["over rows: p99.9"], fewer["over rows: worst"]) == ("5.50", "6.50")
    assert "stories, sha256 01." in made.notes[2]
    assert "20 steps of 4 rows of 128 tokens" in made.notes[2]
    gone = "model.layers.{0,2}.a, model.layers.{0-2}.b"
    assert re.match(rf"fewer: .*base\.gguf \(digest 0123abcd\)\. Gone: {re.escape(gone)}\.", made.notes[2])
    for fact in ("scale loss 0.1.", "level loss is 0.2.", "30–210.", "float32, the seed 1.", "90.0 min on cpu."):
        assert fact in made.notes[1]
    assert made.notes[1].endswith("c0ffee, PyTorch 2.13.0, transformers 5.24.0.")


def test_runs_of_other_base_models_show_both(tmp_path):
    runs = {"one": write_run(tmp_path / "one", after=3.0), "two": write_run(tmp_path / "two", after=3.0, before=2.2)}
    shown = [(row["model"], row["over rows: mean"]) for row in cells(scores(runs))]
    assert shown == [("base model", "2.0000"), ("one", "3.0000"), ("base model", "2.2000"), ("two", "3.0000")]


def test_a_mean_that_is_not_finite_is_said_and_a_huge_one_is_short(tmp_path):
    runs = {"lost": write_run(tmp_path / "lost", after=None), "huge": write_run(tmp_path / "huge", after=123456.0)}
    _, lost, huge = cells(scores(runs))
    assert lost["bits/byte"] == lost["over rows: mean"] == "not finite"
    assert huge["over rows: mean"] == "1.2e+05"
    table.write(scores(runs), tmp_path)
    with open(tmp_path / "scores.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["row_mean"] for row in rows] == ["2.0", "", "123456.0"]


def test_norms_are_shown_in_their_order_with_multiples_of_the_median(tmp_path):
    run = write_run(tmp_path, after=3.0)
    made = own_tables.norms_table(own_rows.collect({"all": run}, **SHARED), "all")
    assert made.name == "norms_all"
    shown = cells(made)
    rows = spread_rows.read(run / "spread.json").to_dict("records")
    assert [row["norm"] for row in shown] == NORMS
    assert [row["becomes"] for row in shown] == ["linear" if name in GONE else "kept" for name in NORMS]
    for line, before, after in zip(shown, rows[::2], rows[1::2], strict=True):
        for form, source in (("before", before), ("after", after)):
            assert float(line[f"{form}: median"]) == pytest.approx(source["median"], rel=6e-3)
            for header, key in (("p99.9", "p99_9"), ("largest", "largest"), ("position 0", "first")):
                times = float(line[f"{form}: {header}"].rstrip("×"))
                assert times == pytest.approx(source[key] / source["median"], rel=6e-3)
            assert line[f"{form}: its token"] == repr(source["piece"])
        assert line["1/c"] == ("—" if math.isnan(before["constant"]) else f"{before['constant']:.3g}")
    assert len(made.records) == 2 * len(NORMS)


def test_rows_come_back_as_they_were_and_name_no_folder(tmp_path):
    runs = {"lost": write_run(tmp_path / "lost", after=None), "kept": write_run(tmp_path / "kept", after=3.0)}
    collected = own_rows.collect(runs, **SHARED)
    collected.spread.loc[[0, 1, 2], "piece"] = ["\r\n", 'a "quoted", one', "NA"]
    collected.spread.loc[0, ["largest", "p99"]] = [float("nan"), 0.1 + 0.2]
    own_rows.write(collected, tmp_path / "rows")
    back = own_rows.read(tmp_path / "rows")
    pd.testing.assert_frame_equal(back.spread, collected.spread, check_exact=True)
    assert (back.run, back.caption, back.runs, back.scores) == (*SHARED.values(), collected.runs, collected.scores)
    assert [row["row_mean"] for row in back.scores] == [2.0, None, 3.0]
    for name in OWN_FILES:
        assert str(tmp_path) not in (tmp_path / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["scores.json", "spread.json"])
def test_what_tells_of_the_weights_of_an_earlier_run_is_refused(tmp_path, name):
    run = write_run(tmp_path, after=3.0)
    scores({"all": run})
    write_json(run / name, read_json(run / name) | {"provenance": {"weights_sha256": "of others"}})
    with pytest.raises(UserError, match=rf"{name} .*model\.safetensors"):
        scores({"all": run})


def test_a_folder_that_holds_something_else_is_refused(tmp_path):
    run = write_run(tmp_path, after=3.0)
    write_json(run / "spread.json", {**document(), "kind": "fold"})
    with pytest.raises(UserError, match=r"kind 'fold'.* 'spread'"):
        own_rows.collect({"all": run}, **SHARED)
