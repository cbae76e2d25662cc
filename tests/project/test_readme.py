"""What the README says is what the files say."""

import json
import re

import yaml
from places import ROOT

from benchmarks.report import short

README = (ROOT / "README.md").read_text(encoding="utf-8")
PUBLISHED = ROOT / "results/published"


def test_every_assumption_of_the_paper_config_is_listed():
    config = yaml.safe_load((ROOT / "config/paper.yaml").read_text(encoding="utf-8"))
    for assumption in config["assumptions"]:
        assert f"| `{assumption['setting'] or 'in the code'}` | {assumption['reason']} |" in README


def test_the_tables_are_the_published_ones():
    tables = ["demo/tables/table1", "demo/tables/table2", "demo/tables/table3"]
    for table in [*tables, "cpu/tables/table1", "cpu/tables/table_S1confirm", "cpu/tables/table_S2_oddities"]:
        text = (PUBLISHED / f"{table}.md").read_text(encoding="utf-8")
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert len(rows) > 4
        assert "\n".join(rows) in README


def test_the_scores_of_smollm2_are_the_published_ones():
    text = (PUBLISHED / "smollm2/tables/scores.md").read_text(encoding="utf-8")
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    assert rows.count("\n") == 4
    assert rows in README
    assert rows in (ROOT / "docs/smollm2.md").read_text(encoding="utf-8")


def test_nothing_is_left_to_fill_in():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert "@@" not in page.read_text(encoding="utf-8"), page


def test_every_bound_of_the_benchmark_is_quoted_as_measured():
    figures = json.loads((PUBLISHED / "bench/bench.json").read_text())
    bounded = [figure for figure in figures if figure["bound"]]
    assert len(bounded) > 10
    for figure in bounded:
        assert f"| `{figure['name']}` | {short(figure['value'])} {figure['unit']} |" in README


def test_make_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|^    )make (\w+)", README, flags=re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_continuous_integration_runs_the_readmes_commands_and_the_slow_tests_and_wants_no_file_changed():
    commands = re.findall(r"^    (make \w+) +#", README, flags=re.MULTILINE)[:2]
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


def test_pictures_that_are_shown_exist():
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README)
    pictures += re.findall(r'<img src="([^"]+)"', README)
    assert len(pictures) > 6
    assert all((ROOT / picture).is_file() for picture in pictures)
    assert all(picture.startswith("figures/published/") for picture in pictures)


def test_pages_name_files_that_are_published_where_they_are():
    """What a run computes is not there in a clone: a link to it leads nowhere."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"\]\((?:\.\./)?((?:results|figures)/[^)]+)\)", text)
        named += re.findall(r"`(results/[\w/]+\.(?:md|csv))`", text)
        for name in named:
            assert (ROOT / name).is_file(), f"{page.name}: {name}"
            assert "/published/" in name, f"{page.name}: {name}"
