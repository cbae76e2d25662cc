"""The RO-Crate of a published run: the package reads it back, what it lists is there, and it is made of whole runs."""

import csv
import hashlib
import shutil
import zipfile
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import yaml
from places import ROOT
from publication_desk import Desk
from rocrate.rocrate import ROCrate

from tapernorm_lab.cli.main import main

DEMO = "results/published/demo"
CHECKOUT = ("Snakefile", "workflow", "CITATION.cff", "LICENSE", "requirements.lock")


def pack(run: str, archive: Path, *more: str) -> int:
    return main(["compare", "--run", run, "--crate", str(archive), *more])


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        made = tmp_path_factory.mktemp("crate") / "demo.zip"
        assert pack("demo", made) == 0
    return made


@pytest.fixture(scope="module")
def crate(archive) -> ROCrate:
    return ROCrate(archive)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A small run, published from a folder that has the workflow too."""
    made = Desk(tmp_path_factory.mktemp("desk"))
    made.write_config()
    made.compute()
    made.score_int8()
    assert made.publish() == 0
    for name in CHECKOUT:
        (made.folder / name).symlink_to(ROOT / name)
    return made.folder


@pytest.fixture
def desk(whole, tmp_path, monkeypatch) -> Desk:
    made = Desk(tmp_path / "desk")
    shutil.copytree(whole, made.folder, symlinks=True)
    monkeypatch.chdir(made.folder)
    return made


def files_of(crate: ROCrate) -> dict[str, dict]:
    return {entity.id: entity.properties() for entity in crate.data_entities}


def unlike(files: dict[str, dict], folder: Path) -> list[str]:
    """The files that a folder lacks, or has with another content."""

    def same(place: str, facts: dict) -> bool:
        if not (folder / place).is_file():
            return False
        content = (folder / place).read_bytes()
        return facts["sha256"] == hashlib.sha256(content).hexdigest() and facts["contentSize"] == str(len(content))

    return [place for place, facts in files.items() if not same(place, facts)]


def test_every_file_is_listed_and_every_listed_file_is_there_with_its_digest(archive, crate, tmp_path):
    zipfile.ZipFile(archive).extractall(tmp_path)
    files = files_of(crate)
    there = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert there == files.keys() | {"ro-crate-metadata.json"}
    assert unlike(files, tmp_path) == []
    assert unlike(files, ROOT) == []  # at the same places in the checkout
    with open(tmp_path / DEMO / "tables/table1.csv", "a", encoding="utf-8") as file:
        file.write("one more\n")
    assert unlike(files, tmp_path) == [f"{DEMO}/tables/table1.csv"]


def test_it_has_the_published_run_whole_and_the_workflow(crate):
    published = {
        path.relative_to(ROOT).as_posix()
        for kind in ("results", "figures")
        for path in (ROOT / kind / "published/demo").rglob("*")
        if path.is_file()
    }
    rules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "workflow/rules").iterdir()}
    assert len(published) > 60
    assert published | rules | {"CITATION.cff", "LICENSE", "Snakefile"} <= files_of(crate).keys()
    workflow = crate.mainEntity
    assert workflow.id == "Snakefile"
    assert set(workflow.type) == {"File", "SoftwareSourceCode", "ComputationalWorkflow"}
    assert workflow["programmingLanguage"]["name"] == "Snakemake"
    assert [entity.id for entity in (workflow["input"], *workflow["output"])] == [
        "#config",
        "#rows",
        "#tables",
        "#figures",
    ]
    assert crate.license.id == "https://spdx.org/licenses/MIT"
    assert crate.root_dataset["author"]["name"] in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_the_actions_say_what_ran_when_on_what_and_what_came_of_it(crate):
    with open(ROOT / DEMO / "provenance.csv", encoding="utf-8", newline="") as file:
        jobs = list(csv.DictReader(file))
    spans = [
        (end - timedelta(seconds=float(job["wall_time_s"])), end, job)
        for job in jobs
        for end in [datetime.fromisoformat(job["written_at"])]
    ]
    run, *parts = crate.root_dataset["mentions"]
    assert (run.type, run["instrument"].id, run["object"].id) == ("CreateAction", "Snakefile", f"{DEMO}/config.json")
    of_run = {entity.id for entity in run["result"]}
    assert {f"{DEMO}/tables/table1.csv", f"{DEMO}/claims.md", "figures/published/demo/figure2.pdf"} <= of_run
    gathered = ("training", "gpt2", "decode", "last_token", "int8")
    assert [part.id for part in parts] == [f"#rows-{name}" for name in gathered]
    for action, name in [(run, None), (parts[0], "training"), (parts[1], "gpt2")]:
        mine = [span for span in spans if name in (None, span[2]["part"])]
        times = [datetime.fromisoformat(action[name]) for name in ("startTime", "endTime")]
        seconds = timedelta(seconds=1)  # to which they are written
        assert abs(times[0] - min(start for start, *_ in mine)) <= seconds
        assert times[1] == max(end for _, end, _ in mine)
    assert parts[0]["instrument"]["version"] == jobs[0]["commit"]
    assert {entity.id for entity in parts[0]["result"]} == {
        f"{DEMO}/rows/results.csv",
        f"{DEMO}/rows/curves.csv.gz",
    }


def test_the_same_run_gives_the_same_bytes(archive, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert pack("demo", tmp_path / "again.zip") == 0
    assert (tmp_path / "again.zip").read_bytes() == archive.read_bytes()


def test_jobs_without_a_time_give_none_and_a_person_is_one(desk):
    (desk.folder / "CITATION.cff").unlink()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    citation["authors"] = [{"given-names": "Ada", "family-names": "King", "orcid": "https://orcid.org/0"}]
    citation["repository-code"] = "https://example.org/code"
    (desk.folder / "CITATION.cff").write_text(yaml.safe_dump(citation), encoding="utf-8")
    assert pack("mine", desk.folder / "mine.zip") == 0
    made = ROCrate(desk.folder / "mine.zip")
    run = made.get("#run")
    assert "startTime" not in run
    assert "endTime" not in run
    assert made.get("#rows-training")["instrument"]["version"] == "a" * 40
    author = made.root_dataset["author"]
    assert (author.id, author.type, author["name"]) == ("https://orcid.org/0", "Person", "Ada King")
    assert made.mainEntity["codeRepository"] == "https://example.org/code"


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ("results/published/mine/tables/table1.tex", "table1.tex"),
        ("figures/published/mine/figure2.png", "figure2.png"),
        ("results/published/mine/tables/study_S1.csv", "no rows of S1"),
        ("results/published/mine/provenance.csv", "provenance.csv"),
        ("Snakefile", "Snakefile"),
    ],
)
def test_a_run_that_is_not_whole_is_refused(desk, capsys, lost, named):
    (desk.folder / lost).unlink()
    assert pack("mine", desk.folder / "mine.zip") == 2
    assert named in capsys.readouterr().err
    assert not (desk.folder / "mine.zip").exists()


@pytest.mark.parametrize("run", ["cpu_rounding", "smollm2", "bench", "nowhere"])
def test_a_run_in_part_and_one_of_no_workflow_are_refused(tmp_path, monkeypatch, run):
    monkeypatch.chdir(ROOT)
    assert pack(run, tmp_path / "run.zip") == 2
    assert not (tmp_path / "run.zip").exists()


def test_a_file_of_someone_else_is_kept_and_options_of_other_uses_are_refused(desk, capsys):
    (desk.folder / "notes.zip").write_text("mine")
    assert pack("mine", desk.folder / "notes.zip") == 2
    assert (desk.folder / "notes.zip").read_text() == "mine"
    assert pack("mine", desk.folder / "mine.zip", "--publish") == 2
    assert pack("mine", desk.folder / "mine.zip", "--all") == 2
    assert pack("mine", desk.folder / "mine.zip") == 0
    shutil.rmtree(desk.computed)  # what was computed is not needed
    assert pack("mine", desk.folder / "mine.zip") == 0  # its own is replaced
