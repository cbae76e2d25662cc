"""The report that Snakemake makes, opened in a browser: every table and figure is in it, and nothing is fetched."""

import html as htmllib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import synthetic
import yaml
from chromium import CHROMIUM, Page, chromium
from matplotlib.figure import Figure
from places import ROOT

from tapernorm_lab.config.jobs import ReportJob
from tapernorm_lab.report import html
from tapernorm_lab.report.frames import pretraining as rows
from tapernorm_lab.report.table import ABSENT, Column, Table
from tapernorm_lab.report.tables import table1_pretraining as tables

SNAKEMAKE = Path(sys.executable).with_name("snakemake")
TABLES = tuple(f"table{n}" for n in ("1", "2", "2v1", "2x", "3", "3x", "4", "5", "_int8"))
FIGURES = ("figure1a", "figure1b", "figure2", "figure_decode", "figure_finetune")
PAGES = ("claims", "provenance")
NEXT_FRAME = "new Promise(done => requestAnimationFrame(() => done(0)))"
ODD = 'a_b *c* `d` |e| "f" <g> & h\\'  # what reStructuredText and HTML give a meaning

pytestmark = pytest.mark.slow
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: install Debian's package chromium")


def stub(name: str) -> Table:
    """A table that says its own name, with characters that HTML gives a meaning."""
    columns = [Column("a", align="l"), Column("b", "under"), Column("c", "under", code=True)]
    return Table(
        name=name,
        columns=columns,
        rows=[[f"row of {name}", "<1>", "x  &\ty"], ["second", ABSENT, ABSENT]],
        published=[["published", "3", "4"]],
        caption=f"Caption of {name}: {ODD}",
        notes=[f"note of {name}"],
        records=[],
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The report of a finished run: real rules and captions, files of a run that only claims to be finished."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("Snakefile", "environment.yml"):
        shutil.copy(ROOT / name, folder)
    for name in ("workflow", "config", "profiles"):
        shutil.copytree(ROOT / name, folder / name)
    config = yaml.safe_load((folder / "config/test.yaml").read_text())
    config["caption"] = ODD
    config["assumptions"] = [
        {"setting": "widths.steps", "assumed": True, "reason": f"why {ODD}"},
        {"setting": None, "assumed": True, "reason": "settled in the code"},
    ]
    (folder / "config/odd.yaml").write_text(yaml.safe_dump(config))
    for name in TABLES:
        html.write(stub(name), folder / "results/test/tables")
    for name in PAGES:
        html.write(stub(name), folder / "results/test")
    results = synthetic.write_run(folder / "runs", ("baseline", "internal_aux", "all_aux"), (64,), (1, 2))
    html.write(
        tables.table1(rows.collect(results, run="test"), ReportJob(run="test", caption=ODD, labels={})),
        folder / "results/test/tables",
    )
    (folder / "figures/test").mkdir(parents=True)
    for i, name in enumerate(FIGURES):  # of a size that tells them apart
        Figure(figsize=(2 + i, 1)).savefig(folder / f"figures/test/{name}.png", dpi=100)
        html.write_figure(f"Caption of {name}: {ODD}", folder / f"figures/test/{name}")
    command = [str(SNAKEMAKE), "report", "--configfile", "config/odd.yaml", "--report", "report.html"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "report.html"


@pytest.fixture(scope="module")
def page(made, tmp_path_factory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        opened.open(made)
        yield opened


def until(page: Page, expression: str) -> None:
    """Wait, frame by frame, until an expression holds."""
    for _ in range(600):
        if page.evaluate(expression):
            return
        page.evaluate(NEXT_FRAME)
    raise AssertionError(f"never came true: {expression}")


def text_of(node: dict) -> str:
    """All text below a node of the page, that of frames included, its code left out."""
    if node["nodeName"] in ("SCRIPT", "STYLE"):
        return ""
    parts = [node.get("nodeValue", "")] if node["nodeType"] == 3 else []
    below = [*node.get("children", []), *([node["contentDocument"]] if "contentDocument" in node else [])]
    return " ".join([*parts, *map(text_of, below)])


def shown(page: Page) -> str:
    """The text that is on the page now, its runs of white space made one space."""
    root = page.call("DOM.getDocument", depth=-1, pierce=True)["root"]
    return re.sub(r"\s+", " ", text_of(root))


def show(page: Page, category: str, file: str) -> None:
    """Click through to one result, as a reader does: the category, then the file's eye."""
    page.evaluate("app.setView({navbarMode: 'menu'})")
    entry = f"[...document.querySelectorAll('a')].find(a => a.textContent.trim() === {json.dumps(category)})"
    until(page, f"!!{entry}")
    page.evaluate(f"{entry}.click()")
    row = f"[...document.querySelectorAll('tbody tr')].find(r => r.textContent.includes({json.dumps(file)}))"
    until(page, f"!!{row}")
    page.evaluate(f"{row}.querySelector('a').click()")
    until(page, "!!document.querySelector('iframe')")


def read(page: Page, category: str, file: str, beginning: str) -> str:
    """The text of one result, once its frame holds how it begins."""
    show(page, category, file)
    for _ in range(600):
        if beginning in (text := shown(page)):
            return text
        page.evaluate(NEXT_FRAME)
    raise AssertionError(f"{file} never showed {beginning!r}")


@needs_browser
def test_every_table_and_page_can_be_clicked_to_and_read(page):
    for name in (*TABLES[1:], *PAGES):
        category = {"claims": "Claims", "provenance": "Provenance"}.get(name, "Tables")
        text = read(page, category, f"{name}.html", f"Caption of {name}: {ODD}")
        for part in (f"row of {name} <1> x & y", "published 3 4", f"note of {name}"):
            assert part in text, (name, part)


@needs_browser
def test_a_real_table_holds_its_numbers(page):
    text = read(page, "Tables", "table1.html", "Validation loss and relative gap")
    assert "Internal-Taper (+aux)" in text
    assert "0.7–1.5" in text


@needs_browser
def test_every_figure_stands_above_its_caption(page):
    for name in FIGURES:
        read(page, "Figures", f"{name}.html", f"Caption of {name}: {ODD}")


@needs_browser
def test_the_first_page_shows_the_results_and_the_assumptions_and_no_graph(made, tmp_path):
    with chromium(tmp_path / "profile") as opened:
        opened.open(made)
        until(opened, "document.querySelectorAll('.tapernorm').length === 5")
        text = shown(opened)
        parts = ["run test", "Caption of claims", "Validation loss and relative gap"]
        parts += [f"Caption of {name}" for name in FIGURES[:3]] + ["Assumptions", f"widths.steps : why {ODD}"]
        assert [part for part in parts if part not in text] == []
        places = [text.index(part) for part in parts]
        assert places == sorted(places)
        widths = "[...document.querySelectorAll('.tapernorm img')].map(image => image.complete && image.naturalWidth)"
        assert opened.evaluate(widths) == [200, 300, 400]
        assert opened.evaluate("document.querySelectorAll('svg.marks, canvas.marks').length") == 0
        tops = "['.prose', '.tapernorm table'].map(name => document.querySelector(name).getBoundingClientRect().top)"
        first, table = opened.evaluate(tops)
        assert 0 <= first < table < opened.evaluate("window.innerHeight")


@needs_browser
def test_the_graph_of_rules_has_a_page_of_its_own(page):
    page.evaluate("app.setView({content: 'rulegraph', navbarMode: 'menu'})")
    until(page, "!!document.querySelector('svg.marks, canvas.marks')")
    assert page.evaluate("[...document.querySelectorAll('.tapernorm')].every(one => one.offsetHeight === 0)")
    names = page.evaluate("rulegraph_spec.data[0].values.map(node => node.rule)")
    assert {"corpus", "pretrain", "finetune", "fold", "evaluate", "bench", "rows_training", "table", "claims"} <= set(
        names
    )
    drawn = "new Set(document.querySelector('canvas.marks').getContext('2d').getImageData(0, 0, 400, 400).data).size"
    assert page.evaluate(drawn) > 10  # shades: an empty canvas has one


@needs_browser
def test_no_error_reaches_the_console_and_nothing_is_asked_from_elsewhere(page):
    assert page.errors == []
    fetched = page.evaluate("performance.getEntriesByType('resource').map(r => r.name)")
    assert [name for name in fetched if not name.startswith(("data:", "blob:"))] == []


@needs_browser
def test_an_error_of_the_page_would_have_been_seen(tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text("<script src='https://absent.example/x.js'></script><script>throw new Error('mine')</script>")
    with chromium(tmp_path / "profile") as opened:
        opened.open(broken)
        opened.evaluate("0")
    assert any("mine" in error for error in opened.errors)
    assert any("ERR_NAME_NOT_RESOLVED" in error for error in opened.errors)


def test_every_result_has_a_caption_of_its_own(made):
    """Each table and figure is explained: no name falls through the templates."""
    found = re.search(r"^ *(?:let|var|const) results = (\{.*\});?$", made.read_text(), flags=re.MULTILINE)
    assert found is not None
    results = json.loads(found[1])
    captions = {Path(path).stem: htmllib.unescape(re.sub("<[^>]+>", "", r["caption"])) for path, r in results.items()}
    assert set(captions) == {*TABLES, *FIGURES, *PAGES}
    assert all(len(caption.split()) > 10 for caption in captions.values())
    assert len(set(captions.values())) == len(captions)
    assert "system-message" not in made.read_text()
