"""What catalogues and citation tools read: one description, one workflow from two places."""

import json
import re
import tomllib

import pytest
import yaml
from places import ROOT
from snakemake_runs import planned, project, snakemake

import tapernorm

CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
CODEMETA = json.loads((ROOT / "codemeta.json").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_citation_names_this_version_and_the_paper():
    assert {"cff-version", "message", "title", "abstract", "keywords", "authors"} <= CITATION.keys()
    assert CITATION["version"] == tapernorm.__version__
    assert CITATION["license"] == PROJECT["license"] == "MIT"
    (paper,) = CITATION["references"]
    assert [author["family-names"] for author in paper["authors"]] == ["Kanavalau", "Amo Alonso", "Lall"]
    assert paper["doi"] == "10.48550/arXiv.2602.10408"
    assert CITATION["authors"][0]["name"] in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert paper["doi"] in (ROOT / "README.md").read_text(encoding="utf-8")


def test_codemeta_says_what_the_citation_says():
    (paper,) = CITATION["references"]
    cited = CODEMETA["referencePublication"]
    assert CODEMETA["name"] == CITATION["title"]
    assert CODEMETA["version"] == CITATION["version"]
    assert CODEMETA["description"] == CITATION["abstract"]
    assert CODEMETA["keywords"] == CITATION["keywords"] == PROJECT["keywords"]
    assert CODEMETA["license"].endswith(f"/{CITATION['license']}")
    assert [author["name"] for author in CODEMETA["author"]] == [author["name"] for author in CITATION["authors"]]
    assert cited["name"] == paper["title"]
    assert cited["identifier"].endswith(paper["doi"])
    assert [a["familyName"] for a in cited["author"]] == [a["family-names"] for a in paper["authors"]]
    assert CODEMETA["softwareRequirements"] == [re.match(r"[\w-]+", text)[0] for text in PROJECT["dependencies"]]


def test_no_address_of_the_repository_stands_anywhere_while_it_is_unknown():
    assert "repository-code" not in CITATION
    assert "codeRepository" not in CODEMETA
    assert "urls" not in PROJECT


def test_the_catalogue_finds_what_it_looks_for():
    usage = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text(encoding="utf-8"))["usage"]
    assert usage["report"] is True
    assert not any(usage["software-stack-deployment"].values())
    config = usage["mandatory-flags"]["flags"].split()[-1]
    assert (ROOT / config).is_file()
    assert (ROOT / "workflow/Snakefile").is_file()


@pytest.mark.parametrize(("folder", "kind"), [("config", "*.yaml"), ("profiles", "*/")])
def test_a_readme_lists_what_lies_beside_it(folder, kind):
    text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([\w.]+)` \|", text, flags=re.MULTILINE))
    there = {path.name for path in (ROOT / folder).glob(kind)} - {"README.md"}
    assert there
    assert there <= listed


def test_the_config_readme_explains_every_section():
    config = yaml.safe_load((ROOT / "config/paper.yaml").read_text(encoding="utf-8"))
    text = (ROOT / "config/README.md").read_text(encoding="utf-8")
    assert [section for section in config if f"`{section}`" not in text] == []


@pytest.mark.slow
def test_both_snakefiles_plan_the_same_jobs_with_the_profile_beside_them(tmp_path):
    folder = project(tmp_path)
    plans = []
    for snakefile in ("Snakefile", "workflow/Snakefile"):
        done = snakemake(folder, "-n", "tables", "figures", "claims", "--snakefile", snakefile)
        assert "profiles/default" in done.stdout + done.stderr
        plans.append(planned(done))
    assert plans[0] == plans[1]
    assert sum(plans[0].values()) > 80


def test_captions_of_the_report_lie_where_the_rules_look():
    rules = list((ROOT / "workflow/rules").glob("*.smk"))
    named = [(path, found) for path in rules for found in re.findall(r'caption="([^"]+)"', path.read_text())]
    assert len(named) >= 4
    assert not [found for path, found in named if not (path.parent / found).is_file()]
