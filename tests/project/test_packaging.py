"""The files that make the project installable agree with one another, and the wheel works with the core alone."""

import ast
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import distributions, packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from places import ROOT

import tapernorm

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
HEAVY = ("torch", "numpy", "pandas", "matplotlib", "snakemake", "datasets", "sentencepiece", "transformers")
FIRST_PARTY = {"tapernorm", "tapernorm_lab", "benchmarks", "generate"}  # docs/generate.py


def lock_lines() -> list[str]:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def locked() -> dict[str, Version]:
    pins = (line.split("==") for line in lock_lines())
    return {canonicalize_name(name): Version(version) for name, version in pins}


def installed() -> dict[str, Version]:
    """Public versions: torch's local part says which build of it a machine runs.

    Only of this environment itself: importing setuptools, as inductor does, adds its vendored packages to the path.
    """
    own = distributions(path=[sysconfig.get_paths()["purelib"]])
    return {canonicalize_name(d.name): Version(Version(d.version).public) for d in own}


def declared() -> list[Requirement]:
    """What is required of other projects; extras that include one another are left out."""
    texts = [text for group in (PROJECT["dependencies"], *EXTRAS.values()) for text in group]
    return [found for found in map(Requirement, texts) if found.name != PROJECT["name"]]


def project_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_lock_holds_plain_public_pins_each_once():
    names = []
    for line in lock_lines():
        pin = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!]+)", line)
        assert pin, f"not a plain pin: {line!r}"  # no hash, local version, address, marker or editable
        names.append(canonicalize_name(pin[1]))
    assert len(names) == len(set(names))
    assert canonicalize_name(PROJECT["name"]) not in names


def test_the_lock_pins_no_accelerator_build():
    assert not [name for name in locked() if name.startswith(("nvidia", "cuda", "triton"))]


def test_every_bound_starts_at_the_tested_version():
    pins = locked()
    for requirement in declared():
        pin = pins[canonicalize_name(requirement.name)]
        assert pin in requirement.specifier, f"{requirement}: the lock has {pin}"
        (bound,) = requirement.specifier
        assert bound.operator in {"~=", "=="}, f"{requirement} admits versions that no test run has passed"
        assert Version(bound.version) == pin, f"{requirement}: the tested version is {pin}"


def test_installed_versions_are_those_of_the_lock():
    have = installed()
    differing = {name: (pin, have.get(name)) for name, pin in locked().items() if have.get(name) != pin}
    assert not differing, f"(locked, installed): {differing}; `make setup` brings .venv up to date"


def test_the_lock_is_closed_under_requirements():
    pins = locked()
    by_name = {canonicalize_name(d.name): d for d in distributions()}
    accelerator = re.compile(r"nvidia|cuda|triton")
    pending = [(r.name, extra) for r in declared() for extra in ("", *r.extras)]
    seen = set()
    while pending:
        name, extra = pending.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for text in by_name[canonicalize_name(name)].requires or ():
            requirement = Requirement(text)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            if not wanted or accelerator.match(requirement.name):
                continue
            pin = pins.get(canonicalize_name(requirement.name))
            assert pin is not None, f"{name} needs {requirement}, which the lock does not pin"
            assert requirement.specifier.contains(pin, prereleases=True), f"{name} needs {requirement}, locked: {pin}"
            pending += [(requirement.name, e) for e in ("", *requirement.extras)]


def test_pyproject_and_environment_agree_on_python():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert environment["name"] == PROJECT["name"]
    assert "python=3.11" in environment["dependencies"]
    assert PROJECT["requires-python"] == ">=3.11,<3.12"
    assert sys.version_info[:2] == (3, 11)
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert pip == ["-r requirements.lock", "-e ."]


def test_the_library_needs_torch_and_safetensors_alone():
    assert [Requirement(text).name for text in PROJECT["dependencies"]] == ["torch", "safetensors"]


@pytest.mark.parametrize("extra", ["workflow", "hf", "tensorboard", "cluster"])
def test_an_extra_of_the_command_line_includes_the_lab(extra):
    pending, included = [extra], set()
    while pending:
        included.add(name := pending.pop())
        own = (found for found in map(Requirement, EXTRAS[name]) if found.name == PROJECT["name"])
        pending += [more for requirement in own for more in requirement.extras]
    assert "lab" in included


def imported_modules(path: Path) -> set[str]:
    """Top-level packages that a file imports absolutely, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def undeclared(files: list[Path], allowed: list[str]) -> set[tuple[str, str]]:
    local = {path.stem for path in (ROOT / "tests").glob("*.py")} | FIRST_PARTY | {"tests"}
    home = packages_distributions()
    names = {canonicalize_name(Requirement(text).name) for text in allowed}
    return {
        (str(path.relative_to(ROOT)), module)
        for path in files
        for module in imported_modules(path) - set(sys.stdlib_module_names) - local
        if not names & {canonicalize_name(name) for name in home.get(module, [module])}
    }


def test_every_import_is_of_a_declared_dependency():
    library = [path for path in project_files() if path.suffix == ".py" and path.is_relative_to(ROOT / "src")]
    others = [path for path in project_files() if path.suffix == ".py" and path not in library]
    core = [*PROJECT["dependencies"], "numpy"]  # numpy comes with safetensors[torch]
    extras = [text for name, group in EXTRAS.items() if name != "test" for text in group]
    assert undeclared(library, core + extras) == set()
    rivals = (ROOT / "benchmarks/rivals/requirements.txt").read_text(encoding="utf-8").splitlines()  # of another .venv
    of_rivals = [path for path in others if path.is_relative_to(ROOT / "benchmarks/rivals")]
    everything = core + extras + EXTRAS["test"]
    assert undeclared([path for path in others if path not in of_rivals], everything) == set()
    assert undeclared(of_rivals, everything + [line for line in rivals if not line.startswith("#")]) == set()


def test_the_import_check_sees_an_undeclared_package(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    stray = tmp_path / "stray.py"
    stray.write_text("import json\n\ndef late():\n    from pandas.api import types\n", encoding="utf-8")
    assert undeclared([stray], ["torch"]) == {("stray.py", "pandas")}


def test_importing_the_package_imports_nothing_heavy():
    code = f"import sys, tapernorm; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert run(sys.executable, "-c", code, cwd=ROOT).strip() == "[]"


@pytest.mark.parametrize("words", [["--help"], ["pretrain", "--help"], ["table", "--help"]])
def test_help_imports_nothing_heavy(words):
    code = (
        "import atexit, json, sys\n"
        f"atexit.register(lambda: print('LOADED', json.dumps([m for m in {HEAVY!r} if m in sys.modules])))\n"
        "from tapernorm_lab.cli.main import main\n"
        f"sys.argv = ['tapernorm', *{words!r}]\n"
        "sys.exit(main())\n"
    )
    text, _, loaded = run(sys.executable, "-c", code, cwd=ROOT).partition("LOADED")
    assert "usage: tapernorm" in text
    assert json.loads(loaded) == []


def test_no_file_names_a_registry_or_a_path_of_one_machine():
    hosts = [".".join(words) for words in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"))]
    hosts += [".".join(words) for words in (("npmjs", "com"), ("anaconda", "org"), ("download.pytorch", "org"))]
    hosts += [".".join(words) for words in (("debian", "org"), ("ubuntu", "com"))]
    paths = ["".join(words) for words in (("/ro", "ot/"), ("/wo", "rk/"), ("/ho", "me/"), ("/opt/", "wheels"))]
    found = [
        (str(path.relative_to(ROOT)), phrase)
        for path in project_files()
        for phrase in hosts + paths
        if phrase.encode() in path.read_bytes()
    ]
    assert found == []


def test_local_hooks_run_the_tools_of_the_environment():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    tools = {canonicalize_name(Requirement(text).name) for text in EXTRAS["test"]}
    (repo,) = hooks["repos"]
    assert repo["repo"] == "local"
    for hook in repo["hooks"]:
        program = hook["entry"].split()[0]
        assert program.startswith(".venv/bin/")
        assert program.rpartition("/")[2] in tools


def test_make_test_lints_checks_types_and_runs_the_tests():
    recipe = run("make", "--dry-run", "--always-make", "test", cwd=ROOT)
    steps = ("ruff check", "ruff format --check", "snakefmt --check", "basedpyright", "pytest")
    positions = [recipe.index(f"bin/{step}") for step in steps]
    assert positions == sorted(positions)
    assert "-r requirements.lock" in recipe


BARE_CHECK = """
import sys
import tapernorm

assert "torch" not in sys.modules, "importing the package imported torch"

import torch
from tapernorm import export
from tapernorm.models.decoder_config import DecoderConfig

config = DecoderConfig(
    vocab_size=37, d_model=24, n_layer=2, n_head=6, n_kv_head=3, d_ff=40, context=16,
    norm="rmsnorm", norm_eps=1e-5, rope_theta=1e4, tie_head=False,
)
torch.manual_seed(0)
model = tapernorm.Decoder(config)
tokens = torch.randint(0, 37, (2, 11))
logits = lambda module: getattr(output := module(tokens), "logits", output)
before = logits(model)
assert before.shape == (2, 11, 37)
taper = tapernorm.attach(model, schedule=tapernorm.GateSchedule(start=1, end=3), anchor_weight=0.1)
assert len(taper.swapped) == 4, taper.swapped
assert torch.equal(logits(model), before), "at g = 1 nothing changes"
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(3):
    taper.set_step(step)
    with taper.observe():
        (logits(model).logsumexp(-1).mean() + taper.anchor_loss()).backward()
    optimizer.step()
    optimizer.zero_grad()
taper.set_step(3)
model.eval()
tapered = logits(model)
assert not torch.allclose(tapered, before, atol=1e-2)
folded, report = tapernorm.fold(model)
assert torch.allclose(logits(folded), tapered, atol=1e-5)
export.save(model, "normfree", form="normfree")
assert torch.equal(logits(tapernorm.load("normfree")), logits(folded))
print(tapernorm.__version__, tapernorm.__file__)
"""


def assert_names_the_extra(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pydantic" in done.stderr
    assert "pip install '.[lab]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_command_without_its_extra_names_it():
    code = "import sys; sys.modules['pydantic'] = None; from tapernorm_lab.cli.main import main; sys.exit(main())"
    assert_names_the_extra([sys.executable, "-c", code, "--help"])


@pytest.mark.slow
def test_a_wheel_works_in_an_environment_with_the_library_alone(tmp_path):
    tree = tmp_path / "tree"
    for path in project_files():
        target = tree / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, tree, cwd=tmp_path)
    (wheel,) = tmp_path.glob("tapernorm-*.whl")
    assert wheel.name == f"tapernorm-{tapernorm.__version__}-py3-none-any.whl"

    bare = tmp_path / "bare"
    run(sys.executable, "-m", "venv", bare, cwd=tmp_path)
    python = bare / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "requirements.lock", wheel, cwd=tmp_path)
    run(python, "-m", "pip", "check", cwd=tmp_path)
    names = {
        canonicalize_name(d["name"])
        for d in json.loads(run(python, "-m", "pip", "list", "--format=json", cwd=tmp_path))
    }
    extras = {canonicalize_name(Requirement(text).name) for group in EXTRAS.values() for text in group}
    assert names & extras <= {"numpy", "setuptools", "tapernorm"}  # which safetensors and torch need, and itself

    version, home = run(python, "-c", BARE_CHECK, cwd=tmp_path).split()
    assert version == tapernorm.__version__
    assert Path(home).is_relative_to(bare)
    installed_files = {path.relative_to(Path(home).parent) for path in Path(home).parent.rglob("*")}
    source = ROOT / "src" / "tapernorm"
    tracked = [path.relative_to(source) for path in project_files() if path.is_relative_to(source)]
    assert [path for path in tracked if path not in installed_files] == []
    for words in (["--help"], ["pretrain", "--help"]):
        assert_names_the_extra([str(bare / "bin" / "tapernorm"), *words])
