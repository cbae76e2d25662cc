"""The rooms of `src`, read off its syntax: who imports whom, and how large a room, a file and a function may be."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from places import ROOT

SRC = ROOT / "src"
LAB = "tapernorm_lab"
ROOMS = (  # upper ones import from lower ones; rooms of one line may import from each other, without a circle
    ("cli",),
    ("own_model", "report"),
    ("experiments",),
    ("training", "models", "data"),
    ("config",),
)
LEVEL = {room: level for level, rooms in enumerate(reversed(ROOMS), start=1) for room in rooms}
MODULES_OF_A_FOLDER, LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 15, 350, 60

# What was beyond a limit when these tests came, each with the size that it may not exceed. Take out what is mended.
LARGE_FOLDERS: dict[str, int] = {}
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS = {}
# Strings that read like a module and are none: the name of the entry-point group.
NO_MODULES = {"tapernorm.norms"}


def name_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(SRC.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def package_of(module: str) -> str:
    return module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]


def imports_of(module: str, tree: ast.AST) -> set[str]:
    """The modules of ours that `tree` imports, within functions too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                base = package_of(module).split(".")
                source = ".".join([*base[: len(base) - node.level + 1], *filter(None, [node.module])])
            inside = {f"{source}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else source for name in inside}
    return {name for name in found if name in FILES and name != module}


def level_of(module: str) -> int:
    """0 for the library, more for each room above it; the lab's own package stands on no room."""
    package, *rest = module.split(".")
    return LEVEL[rest[0]] if package == LAB and rest else 0


IMPORTS = {module: imports_of(module, tree) for module, tree in TREES.items()}


def against_the_order(imports: dict[str, set[str]]) -> set[tuple[str, str]]:
    edges = ((module, other) for module, others in imports.items() for other in others)
    return {(module, other) for module, other in edges if level_of(other) > level_of(module)}


def between_neighbours(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Which rooms of one line import from which, room by room."""
    graph: dict[str, set[str]] = {room: set() for room in LEVEL}
    for module, others in imports.items():
        room = ".".join(module.split(".")[1:2])
        for other in others:
            theirs = ".".join(other.split(".")[1:2])
            if room in graph and theirs in graph and room != theirs and LEVEL[room] == LEVEL[theirs]:
                graph[room].add(theirs)
    return graph


def test_every_room_has_its_place_in_the_order():
    rooms = {path.name for path in (SRC / LAB).iterdir() if (path / "__init__.py").is_file()}
    assert rooms == set(LEVEL)


def test_imports_go_downward():
    assert against_the_order(IMPORTS) == set()


def test_rooms_of_one_line_form_no_circle():
    tuple(TopologicalSorter(between_neighbours(IMPORTS)).static_order())


def test_modules_form_no_circle():
    """A package's own file is left out: it names its modules for others."""
    edges = {module: {o for o in others if FILES[o].name != "__init__.py"} for module, others in IMPORTS.items()}
    modules = {module: others for module, others in edges.items() if FILES[module].name != "__init__.py"}
    try:
        tuple(TopologicalSorter(modules).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def strings_that_name_modules(tree: ast.Module) -> set[str]:
    """Strings that an import by string would take: a full name of a module of ours."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {text for text in texts if "." in text and text in FILES}


def test_no_string_names_a_module():
    found = {module: texts for module, tree in TREES.items() if (texts := strings_that_name_modules(tree) - NO_MODULES)}
    assert found == {}


def functions_of(module: str) -> dict[str, int]:
    """Lines of each function, its decorators left out."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = (node for node in ast.walk(TREES[module]) if isinstance(node, kinds))
    return {f"{module}.{node.name}": (node.end_lineno or 0) - node.lineno + 1 for node in found}


def beyond(sizes: dict[str, int], limit: int) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size > limit}


def modules_by_folder() -> dict[str, int]:
    folders = [str(path.parent.relative_to(SRC)) for path in FILES.values() if path.name != "__init__.py"]
    return {folder: folders.count(folder) for folder in folders}


@pytest.mark.parametrize(
    ("sizes", "limit", "allowed"),
    [
        pytest.param(modules_by_folder(), MODULES_OF_A_FOLDER, LARGE_FOLDERS, id="folder"),
        pytest.param(
            {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in FILES.items()},
            LINES_OF_A_FILE,
            LONG_FILES,
            id="file",
        ),
        pytest.param(
            {name: size for module in FILES for name, size in functions_of(module).items()},
            LINES_OF_A_FUNCTION,
            LONG_FUNCTIONS,
            id="function",
        ),
    ],
)
def test_nothing_is_larger_than_a_reader_can_hold(sizes, limit, allowed):
    grown = {name: size for name, size in beyond(sizes, limit).items() if size > allowed.get(name, 0)}
    assert grown == {}


# The readers above, on code that they must catch


def test_an_import_within_a_function_counts():
    tree = ast.parse("def f():\n    from tapernorm_lab.report import table\n    from ..cli import main\n")
    found = imports_of("tapernorm_lab.config.run", tree)
    assert found == {"tapernorm_lab.report.table", "tapernorm_lab.cli.main"}
    assert against_the_order({"tapernorm_lab.config.run": found}) == {("tapernorm_lab.config.run", n) for n in found}


def test_the_library_that_imports_the_lab_is_caught():
    tree = ast.parse("import tapernorm_lab.config.run")
    assert against_the_order({"tapernorm.taper": imports_of("tapernorm.taper", tree)})


def test_a_module_named_by_a_string_is_caught():
    assert strings_that_name_modules(ast.parse("import_module('tapernorm_lab.models.fakeln')"))
