"""What README.md and the pages show is what the published files hold."""

import importlib.util
import json
import re
import shutil

import pandas as pd
import pytest
import yaml
from places import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PUBLISHED = ROOT / "results/published"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ORDER = ["Install", "Use it on a model", "Replicate the paper", "Results", "What is in the box", "Supported models"]

_spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
assert _spec is not None
assert _spec.loader is not None
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)


def test_readme_is_one_page_in_the_order_of_a_readers_questions():
    assert len(README.splitlines()) <= 180
    assert len(README.encode()) <= 14_000
    assert re.findall(r"^## (.*)$", README, flags=re.MULTILINE) == [*ORDER, "Limits", "Cite"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_between_marks_are_made_from_what_is_published(page):
    """Otherwise run `python docs/generate.py`."""
    assert generate.made(_text(page)) == _text(page)


def test_every_table_that_is_made_stands_on_one_page():
    marked = [name for page in PAGES for name in generate.MADE.findall(_text(page))]
    assert sorted(marked) == sorted(generate.MAKERS)
    assert 8 <= generate.results_table().count("\n") - 2 <= 9


def test_the_table_of_results_follows_its_rows(tmp_path):
    shutil.copytree(PUBLISHED / "demo", tmp_path / "demo")
    path = tmp_path / "demo/tables/table2.csv"
    rows = pd.read_csv(path)
    rows.loc[rows["arm"] == "fused", "ratio_baseline_naive"] *= 2
    rows.to_csv(path, index=False)
    assert generate.results_table(tmp_path) != generate.results_table()


def test_a_gap_whose_interval_leaves_zero_out_is_not_called_undecided(tmp_path):
    shutil.copytree(PUBLISHED / "demo", tmp_path / "demo")
    path = tmp_path / "demo/tables/table1.csv"
    rows = pd.read_csv(path)
    rows["gap_low"] = 0.1
    rows.to_csv(path, index=False)
    with pytest.raises(AssertionError):
        generate.results_table(tmp_path)


def test_every_assumption_of_the_paper_config_is_listed():
    config = yaml.safe_load((ROOT / "config/paper.yaml").read_text(encoding="utf-8"))
    listed = generate.assumptions()
    for assumption in config["assumptions"]:
        assert f"| `{assumption['setting'] or 'in the code'}` | {assumption['reason']} |" in listed


def test_every_bound_of_the_benchmark_is_shown():
    figures = json.loads((PUBLISHED / "bench/bench.json").read_text())
    shown = generate.bench()
    bounded = [figure for figure in figures if figure["bound"]]
    assert len(bounded) > 10
    for figure in bounded:
        (row,) = [line for line in shown.splitlines() if line.startswith(f"| `{figure['name']}` |")]
        assert (", missed" in row) == (not figure["passes"])
        value = float(row.split("|")[2].split()[0])
        assert value == pytest.approx(figure["value"], rel=5e-3)


def test_every_arm_of_the_comparisons_is_shown_with_its_speed_or_the_reason_why_it_has_none():
    comparisons = json.loads((PUBLISHED / "bench/rivals.json").read_text())["comparisons"]
    tables = generate.rivals().split("**d ")[1:]
    assert len(tables) == len(comparisons) > 0
    for comparison, table in zip(comparisons, tables, strict=True):
        shown = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
        assert table.startswith(f"{comparison['job']['d_model']}, {comparison['job']['threads']} thread")
        for row, cells in zip(comparison["rows"], shown, strict=False):
            assert row["engine"] in cells[0]
            assert cells[1] == row["weights"]
            if row["state"] == "measured":
                seconds = sorted(row["seconds"])
                rate = (comparison["job"]["new_tokens"] - 1) / seconds[len(seconds) // 2]
                assert float(cells[2]) == pytest.approx(rate, rel=0.2 if len(seconds) % 2 == 0 else 5e-3)
            else:
                assert row["reason"] in cells[2]


def test_every_published_table_and_figure_is_on_a_page():
    """As a link on a line of its own, in whose place the site has the table or figure itself."""
    link = r"^ *!?\[[^]]*\]\(\.\./((?:results|figures)/published/[\w/]+\.(?:md|png))\)$"
    shown = {found for page in PAGES for found in re.findall(link, _text(page), flags=re.MULTILINE)}
    there = [*PUBLISHED.glob("*/tables/*.md"), *(ROOT / "figures/published").glob("*/*.png")]
    assert len(there) > 40
    assert {path.relative_to(ROOT).as_posix() for path in there} - shown == set()


def test_nothing_is_left_to_fill_in():
    assert not [page for page in PAGES if "@@" in _text(page)]


def test_make_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = {target for page in PAGES for target in re.findall(r"(?:`|^)make ([\w-]+)", _text(page), re.MULTILINE)}
    assert len(named) > 10
    for target in named:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_continuous_integration_runs_the_readmes_commands_and_the_slow_tests_and_wants_no_file_changed():
    commands = re.findall(r"^(make \w+) +#", README, flags=re.MULTILINE)[:2]
    assert commands == ["make tables", "make test"]
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    slow = next(line for line in lines if re.search(r"timeout .*make test-slow", line))  # what is left of forty minutes
    places = [lines.index(line) for line in (*commands, slow)]
    last = [i for i, line in enumerate(lines) if "git status --porcelain" in line]
    assert places == sorted(places)
    assert places[-1] < last[0]
    assert "exit 1" in "".join(lines[last[0] :])


def test_the_two_targets_of_tests_leave_none_out():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = dict(re.findall(r"^([\w-]+):[^\n]*\n((?:\t[^\n]*\n)+)", makefile, flags=re.MULTILINE))
    assert re.search(r'/pytest .*-m "not slow"$', targets["test"], flags=re.MULTILINE)
    assert re.search(r"/pytest .*-m slow$", targets["test-slow"], flags=re.MULTILINE)


def test_pages_name_files_that_are_published_where_they_are():
    """What a run computes is not there in a clone: a link to it leads nowhere."""
    for page in PAGES:
        named = re.findall(r"\]\((?:\.\./)?((?:results|figures)/[^)]+)\)", _text(page))
        named += re.findall(r"`(results/[\w/]+\.(?:md|csv))`", generate.MADE.sub("", _text(page)))
        for name in named:
            assert (ROOT / name).is_file(), f"{page.name}: {name}"
            assert "/published/" in name, f"{page.name}: {name}"


INTERVAL = r"−?\d+\.\d+ \[−?[\d.]+, −?[\d.]+\]"


def unpublished(page, *runs):
    """Estimates with an interval in the prose of `page` that no published table of `runs` has, a changed sign apart."""
    shown = "".join(_text(path) for run in runs for path in PUBLISHED.glob(f"{run}/**/*.md"))
    known = {frozenset(re.findall(r"[\d.]+", found)) for found in re.findall(INTERVAL, shown)}
    said = re.findall(INTERVAL, re.sub(r"^\|.*$", "", page, flags=re.MULTILINE).replace("\n", " "))
    assert len(said) > 2
    return [found for found in said if frozenset(re.findall(r"[\d.]+", found)) not in known]


def test_estimates_in_the_text_about_the_study_are_published():
    page = _text(ROOT / "docs/study-results.md")
    assert unpublished(page, "cpu", "cpu_rounding") == []
    assert unpublished(page.replace("[0.28, 1.25]", "[0.29, 1.25]"), "cpu", "cpu_rounding") == ["0.77 [0.29, 1.25]"]


def test_estimates_about_rounding_are_published():
    page = _text(ROOT / "docs/study.md").replace("| ", "")
    assert unpublished(page, "cpu", "cpu_rounding") == []


def test_what_the_norms_of_smollm2_cost_is_the_published_difference():
    scores = pd.read_csv(PUBLISHED / "smollm2/tables/scores.csv").set_index("model")
    cost, tail = (scores.loc["taper", key] - scores.loc["control", key] for key in ("row_mean", "row_max"))
    gain = scores.loc["base model", "row_mean"] - scores.loc["control", "row_mean"]
    page = " ".join(_text(ROOT / "docs/smollm2.md").split())
    assert f"cost {cost:.2f} nats/token beyond" in page
    assert f"The tail costs more: {tail:.1f} at the worst row" in page
    assert 8 < gain / cost < 12  # "ten times as much"


def _text(page):
    return page.read_text(encoding="utf-8")
