"""The provenance of a table: a row per result file, and notes where code, config or versions differ."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tapernorm.util.errors import UserError

from .read_json import read_document, value_at
from .table import ABSENT, Column, Table

KINDS = (
    *("base", "pretrain", "arm", "finetune", "fold", "evaluate", "robustness"),
    *("bench_decode", "bench_last_token", "bench_rivals"),
)
COLUMNS = (
    *("file", "kind", "job", "seed", "commit", "dirty", "config_hash", "device", "host", "written_at"),
    *("wall_time_s", "train_time_s", "tokens", "versions"),
)
_NUMBERS = ("seed", "wall_time_s", "train_time_s", "tokens")
_DIRTY = "+dirty"

Row = dict[str, Any]


def collect(paths: Iterable[Path]) -> list[Row]:
    """Return one row per result file, in the order given. `versions` holds only the packages in which the files differ.

    Raises:
        UserError: no file, or one is missing, damaged, or of a kind or schema that this version does not read.
    """
    documents = [(Path(path), read_document(Path(path), *KINDS)) for path in paths]
    if not documents:
        raise UserError("no RESULT is given: give at least one, such as results/RUN/pretrain/*/*/*/result.json")
    differing = _differing([_versions(document, path) for path, document in documents])
    return [_row(path, document, differing) for path, document in documents]


def collect_below(places: Iterable[str], results: Path) -> list[Row]:
    """Return one row per result file at these places inside `results`, with all versions. Its `file` is the place.

    Raises:
        UserError: as `collect`.
    """
    return [row(place, read_document(results / place, *KINDS)) for place in places]


def row(name: str, document: Row) -> Row:
    """Return the row of one result, with `name` as its file. `versions` holds all of its packages."""
    path = Path(name)
    return _row(path, document, list(_versions(document, path)))


def provenance_table(rows: Sequence[Row], *, run: str) -> Table:
    """Return the rows as a table."""
    jobs = [row for row in rows if row["train_time_s"] is not None]
    hours = sum(row["train_time_s"] for row in jobs) / 3600
    commits = {row["commit"] for row in rows}
    return Table(
        name="provenance",
        columns=[Column(name, align="r" if name in _NUMBERS else "l") for name in COLUMNS],
        rows=[[_shown(row[name]) for name in COLUMNS] for row in rows],
        published=[],
        caption=(
            f"The {len(rows)} results behind run {run}: {hours:.2f} h of training in {len(jobs)} jobs, on"
            f" {len({row['host'] for row in rows})} host(s), by {len(commits)} version(s) of the code."
        ),
        notes=[
            "host: a hash of the machine's name. wall_time_s: of the process that wrote the file, of a resumed job its"
            " last; train_time_s: of all optimizer steps. tokens: trained on, or else scored or decoded, form by form."
            " versions: the packages in which these results differ; empty where they agree."
        ],
        records=[{name: row[name] for name in COLUMNS} for row in rows],
    )


def _shown(value: Any) -> str:
    if value is None or value == "":
        return ABSENT
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}" if isinstance(value, float) else str(value)


def _row(path: Path, document: Row, differing: Sequence[str]) -> Row:
    facts = value_at(document, "provenance", path)
    commit = facts.get("commit") or ""  # null outside git
    versions = _versions(document, path)
    return {
        "file": path.as_posix(),
        "kind": document["kind"],
        "job": _job(document),
        "seed": facts.get("seed"),
        "commit": commit.removesuffix(_DIRTY),
        "dirty": "yes" if commit.endswith(_DIRTY) else "no" if commit else "",
        **{key: facts.get(key) for key in ("config_hash", "device", "host", "written_at", "wall_time_s")},
        "train_time_s": _value(document, "train_time_s"),
        "tokens": _tokens(document),
        "versions": ", ".join(f"{name} {versions.get(name, 'absent')}" for name in differing),
    }


def _job(document: Row) -> str:
    """Name the job by variant, method, size and width, as far as it has them."""
    within = {"evaluate": "model", "arm": "pretrain"}.get(document["kind"])
    job = document.get("job", {})
    job = job.get(within, {}) if within else job
    width = job.get("d_model", (job.get("model") or {}).get("d_model"))
    named = [job.get("variant"), job.get("method"), job.get("size"), None if width is None else f"d{width}"]
    return " ".join(str(word) for word in named if word is not None) or str(document.get("source", ""))


def _tokens(document: Row) -> int | None:
    """Count the tokens of the training; without one, those scored or decoded, summed over forms or arms."""
    if (trained := _value(document, "train_tokens")) is not None:
        return trained
    if "corpora" in document:
        return sum(corpus["targets"] * len(corpus["forms"]) for corpus in document["corpora"].values())
    if "cells" in document:
        return sum(cell["tokens"] * len(cell["seconds"]) for cell in document["cells"])
    return None


def _value(document: Row, name: str) -> Any:
    return (document.get("values", {}).get(name) or {}).get("value")


def _versions(document: Row, path: Path) -> dict[str, str]:
    facts = value_at(document, "provenance", path)
    own = {name: facts[name] for name in ("tapernorm", "python", "kernels") if name in facts}
    own |= {"linear": facts["hardware"]["linear"]} if "linear" in facts.get("hardware", {}) else {}
    return own | facts.get("packages", {})


def _differing(versions: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the packages that are missing somewhere, or whose versions differ."""
    names = dict.fromkeys(name for some in versions for name in some)
    return [name for name in names if len({some.get(name) for some in versions}) > 1]


def linear_kernel(document: Row) -> str:
    """The kernel of the linear maps of a training; results that name none were made by PyTorch's default."""
    return document["provenance"].get("hardware", {}).get("linear", "aten")


def same_or_not(what: str, found: Iterable[Any]) -> str:
    """Return 'PyTorch 2.13.0', or a list of the versions if the runs behind a table differ."""
    names = sorted({str(name) for name in found})
    several = f", not all the same ({len(names)})" if len(names) > 1 else ""
    return f"{what}{several}: {', '.join(names)}" if several else f"{what} {', '.join(names)}"


def device_and_code(jobs: Sequence[Mapping[str, Any]]) -> str:
    """Return the note on device, PyTorch and code behind a table."""
    commits = short_commits(jobs)
    several = f"s, not all the same ({len(commits)})" if len(commits) > 1 else ""
    devices = ", ".join(sorted({job["device"] for job in jobs}))
    torch = same_or_not("PyTorch", (job["torch"] for job in jobs))
    kernels = {kernel for job in jobs if isinstance(kernel := job.get("linear"), str)}  # of trainings
    linear = f" {same_or_not('Kernel of linear maps', kernels)}." if kernels - {"aten"} else ""
    return f"Device {devices}. {torch}.{linear} Code commit{several}: {', '.join(commits)}."


def of_several_codes(commits: Sequence[str]) -> str:
    """Return the sentence of a caption whose numbers come from different code; empty for one commit."""
    return " Built from runs of different code: see the notes." if len(commits) > 1 else ""


def short_commits(jobs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the short code commits behind some jobs, with `+dirty`; 'unknown' for code outside git."""
    names = {job["commit"] if isinstance(job["commit"], str) else "unknown" for job in jobs}
    return sorted({name[:12] + ("+dirty" if name.endswith("+dirty") else "") for name in names})
