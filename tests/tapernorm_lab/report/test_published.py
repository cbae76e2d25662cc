"""The published runs: small, drawn from their own rows; nothing else of results/ and figures/ is tracked."""

import csv
import gzip
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from places import ROOT

from tapernorm_lab.cli.main import main
from tapernorm_lab.report import parts

RESULTS, FIGURES = (ROOT / root / "published" for root in ("results", "figures"))
RUNS = ("bench", "cpu", "cpu_rounding", "demo", "smollm2")
OWN_FOLDERS = re.compile(rb"(?<![\w.\]])/(?:home|root|tmp|work|Users|mnt|srv|scratch)/")


def content(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def tracked(*places: str) -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z", *places], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name]


in_a_checkout = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git checkout: nothing is tracked")


def test_these_runs_are_published():
    assert {path.name for path in RESULTS.iterdir() if path.is_dir()} == set(RUNS)
    assert {path.name for path in FIGURES.iterdir() if path.is_dir()} == {"cpu", "demo", "smollm2"}


@in_a_checkout
def test_nothing_else_of_results_and_figures_is_tracked():
    names = tracked("results", "figures")
    assert len(names) > 150
    assert [name for name in names if not re.match(r"(results|figures)/published/", name)] == []


@in_a_checkout
@pytest.mark.parametrize("name", ["results/demo/rows/results.csv", "figures/demo/a.pdf", "results/bench/bench.json"])
def test_what_a_run_computes_is_ignored_and_what_is_published_is_not(name):
    def ignored(path: str) -> bool:
        return subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT, check=False).returncode == 0

    assert ignored(name)
    root, _, rest = name.partition("/")
    assert not ignored(f"{root}/published/{rest}")


def test_no_file_is_large_or_names_a_folder_of_the_machine_that_made_it():
    found = [path for folder in (RESULTS, FIGURES) for path in folder.rglob("*") if path.is_file()]
    assert len(found) > 150
    assert max(path.stat().st_size for path in found) <= 1_000_000
    for path in (path for path in found if path.suffix not in (".png", ".pdf")):
        assert not OWN_FOLDERS.search(content(path)), path
    assert OWN_FOLDERS.search(b'"model": "/' + b'home/me/model"')  # would have been found


@pytest.mark.parametrize("run", RUNS)
def test_every_part_is_of_its_config_and_tells_where_it_comes_from(run):
    contents = parts.contents_of(RESULTS / run)
    assert contents.run == run
    there = [part for part in contents.parts if part.is_in(RESULTS / run)]
    for part in there:
        part.require(RESULTS / run)
    with open(RESULTS / run / "provenance.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [part.name for part in there] == list(dict.fromkeys(row["part"] for row in rows))
    for row in rows:
        assert re.fullmatch(r"[0-9a-f]{40}", row["commit"])
        assert row["dirty"] == "no"
        assert "torch " in row["versions"]
        assert re.fullmatch(r"|[0-9a-f]{12}", row["host"])


@pytest.mark.slow
@pytest.mark.parametrize("run", [run for run in RUNS if run != "bench"])
def test_every_table_and_figure_is_what_is_drawn_from_the_rows(run, tmp_path):
    contents = parts.contents_of(RESULTS / run)
    made = {place for entry in contents.entries for place in entry.files}
    drawn = {Path(name) for folder, name in made if folder == "results"} & files(RESULTS / run)
    for name in files(RESULTS / run) - drawn:  # rows, config, provenance
        place = tmp_path / "results/published" / run / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(RESULTS / run / name, place)
    words = ["figure", "--published", run, "--results", f"{tmp_path}/results", "--figures", f"{tmp_path}/figures"]
    assert main(words) == 0
    assert drawn
    for root, published in (("results", RESULTS / run), ("figures", FIGURES / run)):
        anew = tmp_path / root / "published" / run
        assert files(anew) == files(published)
        different = [name for name in files(anew) if (anew / name).read_bytes() != (published / name).read_bytes()]
        assert different == []
