"""`tapernorm taper` is read in one go: options are resolved in one place, and few files know what they became."""

import ast
import re
from collections.abc import Iterator

from places import ROOT

from tapernorm_lab import own_model

SRC = ROOT / "src/tapernorm_lab"
DRY_RUN, MOST = "own_model/dry_run.py", 12
WALK = re.findall(r"^ +([\w/]+\.py) ", own_model.__doc__ or "", flags=re.MULTILINE)


def readers_of(name: str) -> Iterator[str]:
    """The files that import `name` of own_model, or define it."""
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            imported = isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]
            if imported or (isinstance(node, ast.ClassDef) and node.name == name):
                yield path.relative_to(SRC).as_posix()


def test_the_walk_names_files_that_are_there_and_not_too_many() -> None:
    assert all((SRC / name).is_file() for name in WALK)
    assert len(WALK) == len(set(WALK))
    assert len([name for name in WALK if name != DRY_RUN]) == MOST


def test_the_walk_names_every_file_that_knows_of_a_taper() -> None:
    own = {path.relative_to(SRC).as_posix() for path in (SRC / "own_model").glob("[!_]*.py")}
    assert own - set(WALK) == {"own_model/scales_before_after.py"}
    assert {*readers_of("TaperRun"), *readers_of("TaperJob")} <= set(WALK)


def test_options_are_read_where_they_are_resolved_and_nowhere_else() -> None:
    known = ["cli/own_model.py", *(f"own_model/{name}.py" for name in ("job", "options", "resolve"))]
    assert sorted(readers_of("Request")) == known
