"""Every table and figure has rows, a reader and a maker, under one name; naming them imports nothing heavy."""

import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from tapernorm.util.errors import UserError
from tapernorm_lab.config.load import load_config
from tapernorm_lab.report import catalogue, makers
from tapernorm_lab.report.frames import gpt2, int8, odd_inputs, own_models, pretraining, study_stages


def test_every_name_has_rows_a_reader_and_a_maker():
    own = {product.pattern for product in catalogue.own_entries(["a"])}
    named = {
        name.replace("STAGE", "{stage}") for figure in (0, 1) for name in catalogue.names(figure=figure).split(", ")
    }
    assert set(makers.MAKERS) == named | own
    assert set(makers.READERS) == set(catalogue.SOURCES) - {catalogue.CLAIMS} | {catalogue.TAPERS}


def test_the_files_of_a_source_are_those_that_its_frames_write():
    def files(folder, frames, name=""):
        return [f"{folder}/{frame.file.format(name)}" for frame in frames]

    at = {name: list(source.at("S2")) for name, source in catalogue.SOURCES.items()}
    assert at["training"] == files("rows", pretraining.FRAMES.values())
    assert at["gpt2"] == files("gpt2_rows", gpt2.FRAMES.values())
    assert at["int8"] == files("rows", [int8.FRAME])
    assert at["stage"] == at["stage_figure"] == files("tables", [study_stages.FRAME], "S2")
    assert at["odd_inputs"] == files("tables", odd_inputs.FRAMES.values(), "S3")
    assert at["odd_inputs_of_arms"] == files("tables", odd_inputs.FRAMES.values(), "S3_S2")
    assert list(catalogue.OWN_FILES[1:]) == files("rows", [own_models.SCORES, own_models.spread_rows.FRAME])


def test_a_name_is_found_with_its_stage_and_an_unknown_one_is_refused():
    found = {
        name: catalogue.named(name)
        for name in ("table_S3", "table_S3_S2", "table_S2_oddities", "table_S2", "table_int8")
    }
    assert [(product.source, product.stage) for product in found.values()] == [
        ("odd_inputs", ""),
        ("odd_inputs_of_arms", "S2"),
        ("oddities", "S2"),
        ("stage", "S2"),
        ("int8", ""),
    ]
    assert all(product.name == name for name, product in found.items())
    for figure in (False, True):
        with pytest.raises(UserError, match=r"'tabel1' .*_STAGE"):
            catalogue.named("tabel1", figure=figure)


def test_a_config_has_what_it_asks_for():
    demo, cpu = (load_config(Path(ROOT, f"config/{name}.yaml")) for name in ("demo", "cpu"))
    assert {"table3", "table5", "figure_finetune"} <= catalogue.products_of(demo).keys()
    assert not {"table3", "table5", "figure_finetune"} & catalogue.products_of(cpu).keys()
    assert "gpt2_rows/scores.csv" in catalogue.products_of(demo)["claims"].needs
    assert {"table_S2_oddities", "table_S3_S2", "figure_S1"} <= catalogue.products_of(cpu).keys()
    assert [one.needs for one in catalogue.entries(cpu) if one.name == "table4"] == [
        ("rows/results.csv", "rows/curves.csv")  # published with the rows that it tells of
    ]


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("catalogue", ["numpy", "pandas", "scipy", "matplotlib", "torch"]), ("makers", ["torch"])],
)
def test_naming_them_imports_nothing_heavy_and_making_them_no_torch(module, heavy):
    code = f"import sys, tapernorm_lab.report.{module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
