"""A published run as an RO-Crate: its files, the workflow that made them and where they come from, in one archive.

`ro-crate-metadata.json` follows RO-Crate 1.1 and the profile Workflow Run Crate 0.5, https://w3id.org/ro/wfrun/workflow.
"""

import csv
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from rocrate.model.contextentity import ContextEntity
from rocrate.model.entity import Entity
from rocrate.model.file import File
from rocrate.rocrate import ROCrate

from tapernorm.util.atomic_files import sha256_of, whole_file
from tapernorm.util.errors import UserError
from tapernorm.util.provenance import code_commit

from ..config.run import Config
from .parts import CONFIG, Contents, Part
from .publication import PROVENANCE
from .read_json import stored

WORKFLOW = "Snakefile"
_CITATION = "CITATION.cff"
_PROFILES = {  # address -> name
    "https://w3id.org/ro/wfrun/process/0.5": "Process Run Crate",
    "https://w3id.org/ro/wfrun/workflow/0.5": "Workflow Run Crate",
    "https://w3id.org/workflowhub/workflow-ro-crate/1.0": "Workflow RO-Crate",
}
_BIOSCHEMAS = "https://bioschemas.org/profiles"
_FORMATS = {
    ".cff": "text/yaml",
    ".csv": "text/csv",
    ".gz": "application/gzip",
    ".json": "application/json",
    ".md": "text/markdown",
    ".pdf": "application/pdf",
    ".png": "image/png",
    ".tex": "application/x-tex",
}
_INPUT = {"config": "The settings of the run, for snakemake --configfile."}
_OUTPUT = {"rows": "What the jobs measured.", "tables": "Tables of the rows.", "figures": "Figures of the rows."}
_DONE = {"actionStatus": "http://schema.org/CompletedActionStatus"}
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # that a ZIP can hold; the time of packing would make each archive another

Files = dict[str, Path]  # place in the archive -> the file


def write_crate(contents: Contents, published: Path, drawings: Path, archive: Path, *, checkout: Path) -> None:
    """Pack a published run, which lies in `published` and `drawings`, into the ZIP file `archive`.

    The same run and code give the same bytes.

    Args:
        checkout: folder with the Snakefile.

    Raises:
        UserError: the run is not one of the workflow; rows, a table or a figure of it are missing; or `checkout` has
            no workflow.
    """
    if contents.config is None:
        raise UserError(f"{contents.run} is no run of the workflow: an RO-Crate is made of one that has a config")
    made = _finished(contents, published, drawings)
    code = _code(checkout)
    citation = yaml.safe_load(code[_CITATION].read_text(encoding="utf-8"))
    crate = ROCrate(version="1.1")
    crate.metadata.extra_terms["sha256"] = "https://schema.org/sha256"
    _describe(crate, contents.config, citation)
    workflow = _workflow(crate, code, citation)
    _runs(crate, contents, published, made, workflow)
    _unwrap(crate)
    with tempfile.TemporaryDirectory() as folder:
        crate.write(folder)
        with whole_file(archive) as temporary:
            _pack(Path(folder), temporary)


def _finished(contents: Contents, published: Path, drawings: Path) -> dict[str, Files]:
    """The files of the run by what they are: config, provenance, rows, tables and figures."""
    if absent := [part.name for part in contents.parts if not part.is_in(published)]:
        raise UserError(
            f"the published run {contents.run} is not finished: it has no rows of {', '.join(absent)}; compute them,"
            f" then `make publish RUN={contents.run}`"
        )
    files = {
        "config": [("results", CONFIG)],
        "provenance": [("results", PROVENANCE)],
        "rows": [("results", file) for part in contents.parts for file in _rows(part, published)],
        "tables": [file for entry in contents.entries if not entry.is_figure for file in entry.files],
        "figures": [file for entry in contents.entries if entry.is_figure for file in entry.files],
    }
    folders = {"results": published, "figures": drawings}
    made = {
        kind: {_place(contents, root, file): folders[root] / file for root, file in found}
        for kind, found in files.items()
    }
    if absent := [str(path) for found in made.values() for path in found.values() if not path.is_file()]:
        raise UserError(
            f"the published run {contents.run} is not finished: it lacks {', '.join(absent[:3])}; make what is missing"
            f" with `tapernorm figure --published {contents.run}`"
        )
    return made


def _place(contents: Contents, root: str, file: str) -> str:
    """Where the archive has a file of the run: as the checkout has it."""
    return f"{root}/published/{contents.run}/{file}"


def _rows(part: Part, published: Path) -> list[str]:
    """The files of a part's rows, of which some are compressed, below the folder of the run."""
    return [stored(published / file).relative_to(published).as_posix() for file in part.files]


def _code(checkout: Path) -> Files:
    """The workflow and what goes with it."""
    if not (checkout / WORKFLOW).is_file():
        raise UserError(f"no {WORKFLOW} in {checkout.resolve()}: run this command in the checkout")
    below = sorted(path for path in (checkout / "workflow").rglob("*") if path.is_file())
    paths = [*(checkout / name for name in (WORKFLOW, _CITATION, "LICENSE", "requirements.lock")), *below]
    return {path.relative_to(checkout).as_posix(): path for path in paths}


def _entity(crate: ROCrate, address: str, kind: str, **facts: Any) -> Entity:
    made = ContextEntity(crate, address, {"@type": kind, **facts})
    crate.add(made)
    return made


def _file(crate: ROCrate, place: str, path: Path, **more: Any) -> Entity:
    made = File(crate, path, place, properties={"name": path.name, **_of_content(path), **more})
    crate.add(made)
    return made


def _of_content(path: Path) -> dict[str, str]:
    kind = _FORMATS.get(path.suffix, "text/plain")
    return {"contentSize": str(path.stat().st_size), "sha256": sha256_of(path), "encodingFormat": kind}


def _describe(crate: ROCrate, config: Config, citation: Mapping[str, Any]) -> None:
    """What the archive is, who wrote it, its license, and the paper that it replicates."""
    root, license = crate.root_dataset, citation["license"]
    root["name"] = f"{citation['title']}, run {config.run}"
    root["description"] = config.caption
    root["author"] = [_author(crate, author) for author in citation["authors"]]
    root["license"] = _entity(crate, f"https://spdx.org/licenses/{license}", "CreativeWork", name=license)
    root["citation"] = [
        _entity(crate, f"https://doi.org/{paper['doi']}", "ScholarlyArticle", name=paper["title"])
        for paper in citation["references"]
    ]
    root["conformsTo"] = [
        _entity(crate, address, "CreativeWork", name=name, version=address.rpartition("/")[2])
        for address, name in _PROFILES.items()
    ]


def _author(crate: ROCrate, author: Mapping[str, str]) -> Entity:
    """A person or an organization of CITATION.cff."""
    name = author.get("name") or f"{author['given-names']} {author['family-names']}"
    address = author.get("orcid") or author.get("website") or f"#{name.lower().replace(' ', '-')}"
    return _entity(crate, address, "Organization" if "name" in author else "Person", name=name)


def _workflow(crate: ROCrate, code: Files, citation: Mapping[str, Any]) -> Entity:
    """The main entity, its parameters, and the files beside it."""
    facts = {
        "name": f"{citation['title']}, workflow",
        "description": citation["abstract"],
        "creator": crate.root_dataset["author"],
        "license": crate.root_dataset["license"],
        "version": code_commit() or citation["version"],
        "conformsTo": {"@id": f"{_BIOSCHEMAS}/ComputationalWorkflow/1.0-RELEASE"},
        **_of_content(code[WORKFLOW]),
    }
    if "repository-code" in citation:
        facts["url"] = facts["codeRepository"] = citation["repository-code"]
    language = version("snakemake")
    crate.add_workflow(code[WORKFLOW], WORKFLOW, properties=facts, main=True, lang="snakemake", lang_version=language)
    for place, path in code.items():
        if place != WORKFLOW:
            _file(crate, place, path)
    workflow = crate.mainEntity
    assert workflow is not None
    of_profile = {"@id": f"{_BIOSCHEMAS}/FormalParameter/1.0-RELEASE"}
    for direction, parameters in (("input", _INPUT), ("output", _OUTPUT)):
        workflow[direction] = [
            _entity(
                crate,
                f"#{name}",
                "FormalParameter",
                name=name,
                description=said,
                additionalType="File",
                conformsTo=of_profile,
            )
            for name, said in parameters.items()
        ]
    return workflow


def _runs(crate: ROCrate, contents: Contents, published: Path, made: Mapping[str, Files], workflow: Entity) -> None:
    """The files of the run, the action that made them, and for each part one of the code that ran its jobs."""
    captions = dict(_captions(contents, made))
    added = {
        kind: {place: _file(crate, place, path, **captions.get(place, {})) for place, path in files.items()}
        for kind, files in made.items()
    }
    for kind in (*_INPUT, *_OUTPUT):
        for entity in added[kind].values():
            entity["exampleOfWork"] = {"@id": f"#{kind}"}
    with open(published / PROVENANCE, encoding="utf-8", newline="") as file:
        jobs = list(csv.DictReader(file))
    crate.root_dataset["datePublished"] = max(job["published_at"] for job in jobs)
    config = list(added["config"].values())

    def act(name: str, what: str, of: Sequence[Mapping[str, str]], instrument: Any, result: list[Entity]) -> Entity:
        said = f"{len(of)} jobs, each with its settings, code, machine and time in {PROVENANCE}."
        facts = {"name": what, "description": said, **_span(of), **_DONE}
        facts |= {"instrument": instrument, "object": config, "result": result}
        return _entity(crate, f"#{name}", "CreateAction", **facts)

    results = [entity for kind in _OUTPUT for entity in added[kind].values()]
    actions = [act("run", f"Run {contents.run}", jobs, workflow, results)]
    for entity in added["provenance"].values():
        entity["about"] = actions[0]
    for part in contents.parts:
        of_part = [job for job in jobs if job["part"] == part.name]
        software = [_software(crate, commit, jobs) for commit in sorted({job["commit"] for job in of_part})]
        rows = [added["rows"][_place(contents, "results", file)] for file in _rows(part, published)]
        actions.append(act(f"rows-{part.name}", f"Rows {part.name}", of_part, software, rows))
    crate.root_dataset["mentions"] = actions


def _captions(contents: Contents, made: Mapping[str, Files]) -> Iterator[tuple[str, dict[str, str]]]:
    """Place of a table's or figure's file -> its description, the first line of its Markdown."""
    for entry in contents.entries:
        files = made["figures" if entry.is_figure else "tables"]
        places = [_place(contents, root, file) for root, file in entry.files]
        (caption,) = (files[place] for place in places if place.endswith(".md"))
        with open(caption, encoding="utf-8") as file:
            first = file.readline().strip()
        yield from ((place, {"description": first}) for place in places)


def _software(crate: ROCrate, commit: str, jobs: Iterable[Mapping[str, str]]) -> Entity:
    """The code of some jobs, with the versions of what it ran on; parts share it."""
    address = f"#tapernorm-{commit[:12]}"
    known = crate.get(address)
    if known is not None:
        return known
    versions = "; ".join(sorted({job["versions"] for job in jobs if job["commit"] == commit}))
    return _entity(crate, address, "SoftwareSourceCode", name="tapernorm", version=commit, description=versions)


def _span(jobs: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Start of the first process and end of the last; nothing where a job does not tell its time."""
    if not all(job["written_at"] and job["wall_time_s"] for job in jobs):
        return {}
    ends = [datetime.fromisoformat(job["written_at"]) for job in jobs]
    starts = [end - timedelta(seconds=float(job["wall_time_s"])) for end, job in zip(ends, jobs, strict=True)]
    return {"startTime": min(starts).isoformat(timespec="seconds"), "endTime": max(ends).isoformat(timespec="seconds")}


def _unwrap(crate: ROCrate) -> None:
    """Write a property of one value without a list, as RO-Crate recommends."""
    for facts in (entity.properties() for entity in crate.get_entities()):
        for name, value in facts.items():
            if isinstance(value, list) and len(value) == 1:
                facts[name] = value[0]


def _pack(folder: Path, archive: Path) -> None:
    """Zip the files below a folder, in their order and without their times."""
    with zipfile.ZipFile(archive, "w") as packed:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix(), _EARLIEST)
            entry.external_attr = 0o644 << 16
            packed.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
