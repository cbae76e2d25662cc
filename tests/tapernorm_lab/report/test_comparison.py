"""A computed run beside the published one: what counts as equal, what is listed, and what a terminal shows."""

import math
import re
import shutil

import pandas as pd
import publication_desk
import pytest

from tapernorm_lab.cli.main import main
from tapernorm_lab.report import comparison
from tapernorm_lab.report.table import ABSENT, Column, Table
from tapernorm_lab.report.tables import table1_pretraining as tables

COLUMNS = [
    Column("size", align="l"),
    Column("method", align="l"),
    Column("steps"),
    Column("loss", "Baseline"),
    Column("gap %", "Tapered"),
    Column("tok/s", timed="speed"),
    Column("ratio", timed="ratio"),
    Column("bound", timed="ratio"),
]
ROWS = [
    row.split("|")
    for row in (
        "tiny|plain|1,200|4.4858 ± 0.0045|—|4,978 [4,885, 5,070]|—|1.5",
        "|folded|1,200|4.4773 ± 0.0020|−0.19 [−0.69, 0.31]|6,883 [6,707, 7,117]|1.408 [1.336, 1.431]|1.6",
        "mini|folded|1,200|4.1000 ± 0.0020|0.49 [−1.02, 2.01]|6,000 [5,900, 6,100]|1.300 [1.250, 1.350]|2",
    )
]


def made(rows=ROWS, columns=COLUMNS, published=()):
    return Table("table9", columns, rows, published, "", [], [])


def changed(row, header, cell):
    """The rows with one cell changed."""
    rows = [list(cells) for cells in ROWS]
    rows[row][[column.header for column in COLUMNS].index(header)] = cell
    return rows


def test_equal_tables_have_every_printed_number_in_common_and_no_speed_counts():
    same = comparison.compare(made(), made())
    assert (same.values, same.equal) == (3 + 3 * 2 + 2 * 3, 15)  # steps; mean and spread; gap with its interval
    assert (same.inside, same.outside, same.differing) == (2, [], [])
    assert (same.only_here, same.only_published) == ([], [])
    assert comparison.compare(made(), made(published=[["theirs", "", "", "1", "2", "", "3", "4"]])).values == 15


@pytest.mark.parametrize(
    ("header", "cell", "equal", "change"),
    [
        ("loss", "4.4770 ± 0.0020", 14, -0.0003),
        ("gap %", "0.19 [−0.69, 0.31]", 14, 0.38),  # the sign counts
        ("gap %", "—", 12, None),
        ("loss", "4.4773", 14, 0.0),  # no spread
        ("steps", "1200", 14, 0.0),  # as printed
        ("loss", "not finite", 13, None),
    ],
)
def test_what_is_not_the_same_in_print_is_named_by_row_and_column_with_its_change(header, cell, equal, change):
    found = comparison.compare(made(changed(1, header, cell)), made())
    assert (found.values, found.equal) == (15, equal)
    (one,) = found.differing
    assert (one.row, one.column.rpartition(": ")[2], one.here) == ("tiny, folded", header, cell)
    assert one.published == ROWS[1][[column.header for column in COLUMNS].index(header)]
    assert math.isnan(one.change) if change is None else one.change == pytest.approx(change, abs=1e-12)


def test_speeds_are_compared_by_ratios_with_the_published_interval_alone():
    faster = changed(1, "tok/s", "9,000 [8,000, 9,500]")
    faster[1][6], faster[2][6], faster[2][7] = "1.431 [1.1, 1.8]", "1.351 [1.340, 1.360]", "9.9"
    found = comparison.compare(made(faster), made())
    assert (found.inside, found.values, found.equal) == (1, 15, 15)  # at the end of an interval is inside
    (one,) = found.outside
    assert (one.row, one.column, one.change) == ("mini, folded", "ratio", pytest.approx(0.051))
    back = comparison.compare(made(), made(faster))
    assert (back.inside, [other.row for other in back.outside]) == (1, ["mini, folded"])


def test_rows_and_columns_of_one_side_alone_are_named():
    fewer = made([row[:-1] for row in ROWS[:2]], COLUMNS[:-1])
    found = comparison.compare(fewer, made())
    assert (found.only_here, found.only_published) == ([], ["mini, folded", "bound"])
    found = comparison.compare(made(), fewer)
    assert (found.only_here, found.only_published) == (["mini, folded", "bound"], [])
    assert found.values == 2 + 2 * 2 + 3


def test_rows_are_told_apart_by_as_many_columns_as_that_takes():
    columns = [Column("arm", align="l"), Column("from"), Column("to"), Column("loss")]
    rows = [["A", "0.05", "0.7", "3.1"], ["A", "0.05", "1", "3.2"], ["B", "0.05", "1", "3.3"]]
    other = [*rows[:2], ["B", "0.05", "1", "3.4"]]
    (one,) = comparison.compare(made(rows, columns), made(other, columns)).differing
    assert one.row == "B, from 0.05, to 1"


def test_lines_give_counts_and_the_largest_changes_first():
    rows = [[f"row {i}", f"{100 + i * i}"] for i in range(12)]
    published = [[f"row {i}", "100"] for i in range(12)]
    columns = [Column("name", align="l"), Column("loss")]
    found = comparison.compare(made(rows, columns), made(published, columns))
    head, *listed, rest = comparison.lines(found)
    assert re.findall(r"\d+", head) == ["9", "1", "12"]
    assert [line.split(",")[0].strip() for line in listed] == ["row 11", "row 10", "row 9", "row 8", "row 7"]
    assert "(+121)" in listed[0]
    assert "6 more" in rest
    assert "--all" in rest
    every = list(comparison.lines(found, every=True))
    assert len(every) == 1 + 11


def test_table_1_fits_a_terminal():
    common = {"size": "105K", "d_model": 48, "seeds_counted": tables.ALL_SEEDS, "n": 2, "n_pairs": 2}
    losses = {"valid_ce_mean": 3.92551, "valid_ce_std": 0.00481, "gap_percent": -0.61, "gap_low": -11, "gap_high": 9.78}
    rows = [{**common, **losses, "variant": "baseline", "n_pairs": 0}, {**common, **losses, "variant": "internal"}]
    rows += [{**common, **losses, "variant": variant} for variant in ("internal_aux", "all_aux")]
    rows += [{**rows[0], "seeds_counted": tables.TRIMMED}]
    lines = list(tables.table1_lines(rows))
    assert max(map(len, lines)) <= 100
    assert lines[1].split() == ["105K", "48", "2", "Baseline", "3.9255", "±", "0.0048", ABSENT]
    assert lines[2].endswith("3.9255 ± 0.0048  −0.61 [−11.00, 9.78]")
    assert lines[4].startswith("105K†")
    assert [line.split()[0] for line in lines[5:]] == ["paper", "paper"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was computed and published."""
    desk = publication_desk.Desk(tmp_path_factory.mktemp("desk"))
    desk.write_config()
    desk.compute()
    assert desk.publish() == 0
    return desk


def copy_of(desk, folder):
    shutil.copytree(desk.folder, folder / "desk")
    return publication_desk.Desk(folder / "desk")


def compared(desk, capsys, *more):
    capsys.readouterr()
    assert main(["compare", "--run", "mine", *desk.where[:2], *more]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_run_computed_anew_is_shown_and_compared(whole, capsys):
    told = compared(whole, capsys)
    assert told[0].startswith("Table 1 of run mine")
    assert not any("rounding" in line for line in told)
    assert max(map(len, told)) <= 110
    named = {line.partition(":")[0]: re.findall(r"(\d+) of (\d+)", line) for line in told}
    for name in ("table1", "table4", "claims", "table_S1"):
        ((equal, values),) = named[name]
        assert equal == values != "0"
    results = whole.computed / "rows/results.csv"
    frame = pd.read_csv(results)
    frame.loc[frame["seed"] == 1, "valid_ce"] += 0.002
    before = results.read_bytes()
    frame.to_csv(results, index=False)
    try:
        told = compared(whole, capsys, "--all")
    finally:
        results.write_bytes(before)
    place = next(i for i, line in enumerate(told) if line.startswith("table1: "))
    ((equal, values),) = re.findall(r"(\d+) of (\d+)", told[place])
    assert int(equal) < int(values)
    assert "14K, Baseline: loss: " in told[place + 1] or "26K, Baseline: loss: " in told[place + 1]
    assert "(+0.001)" in "".join(told[place:])
    assert "rounding" in told[-1]


def test_other_settings_than_the_published_are_told(whole, capsys, tmp_path):
    desk = copy_of(whole, tmp_path)
    raw = desk.config.read_text(encoding="utf-8")
    desk.config.write_text(raw.replace("clip_norm: 1.0", "clip_norm: 2.0"), encoding="utf-8")
    desk.compute()
    told = compared(desk, capsys, "--config", str(desk.config))
    assert any(line.startswith("8 of 8 trainings") for line in told)


def test_a_table_that_cannot_be_made_is_told_and_the_others_are_compared(whole, capsys, tmp_path):
    desk = copy_of(whole, tmp_path)
    frame = pd.read_csv(desk.computed / "rows/results.csv")
    frame.loc[0, "steps"] = 7
    frame.to_csv(desk.computed / "rows/results.csv", index=False)
    told = compared(desk, capsys)
    assert any(line.startswith("table1: not compared: ") and "steps" in line for line in told)
    assert any(line.startswith("table_S1: ") and "values equal" in line for line in told)


def test_rows_that_cannot_be_read_are_told_and_the_other_tables_are_compared(whole, capsys, tmp_path):
    desk = copy_of(whole, tmp_path)
    (desk.computed / "rows/results.csv").write_text("run,seed\nmine\n")
    told = compared(desk, capsys)
    assert any(line.startswith("table1: not compared: ") for line in told)
    assert any(line.startswith("table_S1: ") and "values equal" in line for line in told)


@pytest.mark.parametrize("made", ["bench", "tapers"])
def test_a_config_is_refused_where_none_is_read(whole, capsys, tmp_path, made):
    desk = copy_of(whole, tmp_path)
    if made == "tapers":
        (desk.computed / "rows/runs.json").write_text("{}")
    run = {"bench": "bench", "tapers": "mine"}[made]
    shutil.copytree(desk.computed.parent / "published/mine", desk.computed.parent / "published/bench")
    assert main(["compare", "--run", run, *desk.where[:2], "--config", str(desk.config)]) == 2
    assert "--config" in capsys.readouterr().err


def test_tables_of_one_side_alone_are_named_and_none_in_common_is_refused(whole, capsys, tmp_path):
    desk = copy_of(whole, tmp_path)
    (desk.computed / "rows/curves.csv").unlink()
    told = compared(desk, capsys)
    assert told[-1] == "only published: claims, table1, table4"
    shutil.rmtree(desk.computed)
    assert main(["compare", "--run", "mine", *desk.where[:2]]) == 2
    assert "compute the run" in capsys.readouterr().err
