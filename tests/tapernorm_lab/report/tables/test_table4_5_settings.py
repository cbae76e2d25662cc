"""Tables 4 and 5 say what the config says, and mark exactly what it calls assumed."""

import csv

import pytest
from places import ROOT

from tapernorm.util.errors import UserError
from tapernorm_lab.config.gpt2 import Gpt2Size
from tapernorm_lab.config.load import load_config
from tapernorm_lab.report import table
from tapernorm_lab.report.tables import table4_5_settings as settings_tables


@pytest.fixture(scope="module")
def paper():
    return load_config(ROOT / "config/paper.yaml").settings_job()


def test_table4_holds_steps_tokens_and_the_steps_at_which_things_happen(paper):
    made = settings_tables.table4(None, paper)
    assert [row[1] for row in made.rows] == ["64", "128", "256", "512"]
    steps = [100_000, 100_000, 200_000, 300_000]
    assert [record["steps"] for record in made.records] == steps
    assert [record["train_tokens"] for record in made.records] == [n * 16 * 512 for n in steps]
    assert [record["warmup_steps"] for record in made.records] == [5_000, 5_000, 10_000, 15_000]
    assert [(record["gate_start"], record["gate_end"]) for record in made.records] == [(n // 20, n) for n in steps]
    assert made.rows[3] == [
        "30M",
        "512",
        "1368",
        "300,000",
        "2,457,600,000",
        "15,000",
        "15,000",
        "300,000",
        "0.0003",
        "6",
    ]


def test_assumptions_and_nothing_else_are_marked(paper):
    headers = [column.header for column in settings_tables.table4(None, paper).columns]
    assert [header for header in headers if header.endswith("†")] == ["SwiGLU width†", "steps†", "tokens†"]
    names = [row[0] for row in settings_tables.table5(None, paper).rows]
    assert [name for name in names if name.endswith("†")] == [
        "taper start†",
        "g = 0 from†",
        "lambda of the scale loss†",
        "FakeLN: rate of sigma's mean†",
    ]


def test_every_mark_has_its_reason_in_the_notes(paper):
    for made in (settings_tables.table4(None, paper), settings_tables.table5(None, paper)):
        reasons = [note for note in made.notes if note.startswith("† assumed: ")]
        assert reasons
        for note in reasons:
            setting = note.split(": ")[1]
            (assumption,) = (a for a in paper.assumptions if a.setting == setting)
            assert assumption.reason in note


def test_an_assumed_section_marks_what_lies_in_it_and_a_longer_name_does_not_count(paper):
    def marked(setting):
        job = paper.model_copy(update={"assumptions": (paper.assumptions[0].model_copy(update={"setting": setting}),)})
        return [row[0] for row in settings_tables.table5(None, job).rows if row[0].endswith("†")]

    assert len(marked("gpt2.sizes.fakeln")) == 5
    assert marked("gpt2.sizes.fakeln_weight") == ["FakeLN: lambda of its loss†"]
    assert marked("gpt2.sizes.lr") == ["peak LR†"]
    assert marked(None) == []


def test_table5_holds_every_setting_of_the_schedule(paper):
    made = settings_tables.table5(None, paper)
    assert [column.header for column in made.columns] == ["setting", "small", "medium", "large", "xl"]
    rows = {row[0].rstrip("†"): row[1:] for row in made.rows}
    assert rows["taper start"] == ["20", "20", "30", "50"]
    assert rows["g = 0 from"] == ["104", "188", "534", "722"]
    assert rows["cosine length"] == ["300", "500", "1,200", "1,200"]
    assert rows["FakeLN: ln_1 v start / gap"] == ["68 / 3", "116 / 3", "318 / 6", "434 / 6"]
    hardware = {"devices_per_job", "activation_checkpointing", "checkpoint_every"}
    scheduled = set(Gpt2Size.model_fields) - {"name", "source", "fresh", "published"} - hardware
    assert {record["setting"].split(".")[2] for record in made.records} == scheduled


def test_a_run_without_assumptions_says_so_and_one_without_gpt2_has_no_table5(tmp_path):
    config = load_config(ROOT / "config/test.yaml")
    job = config.settings_job()
    assert "No setting here is marked as an assumption in the config." in settings_tables.table4(None, job).notes
    with pytest.raises(UserError, match=r"table5 .*gpt2"):
        settings_tables.table5(None, job.model_copy(update={"gpt2": None}))
    table.write(settings_tables.table4(None, job), tmp_path)
    with open(tmp_path / "table4.csv", encoding="utf-8", newline="") as file:
        assert [int(row["steps"]) for row in csv.DictReader(file)] == [w.steps for w in config.widths]
