"""Every verb on inputs that are not what they should be: one line that names them, exit code 2, never a traceback."""

import json
from pathlib import Path

import pytest
from places import ROOT

from tapernorm_lab.cli.main import main

CONFIG = ["--config", str(ROOT / "config/test.yaml")]
CPU = ["--device", "cpu"]
STAGE = [*CONFIG, "--stage", "S4"]
ODD = ["evaluate", *CONFIG, "--width", "24", "--seed", "1", *CPU]

# BAD is where the bad input goes; where a verb reads several, all of them are it.
VERBS = {
    "corpus": ["corpus", "--config", "BAD", "--out", "OUT"],
    "tokenizer": ["tokenizer", *CONFIG, "--corpus", "BAD", "--out", "OUT"],
    "tokens": ["tokens", *CONFIG, "--corpus", "BAD", "--tokenizer", "BAD", "--out", "OUT"],
    "tokens in blocks": ["tokens", *CONFIG, "--text", "train", "--corpus", "BAD", "--tokenizer", "BAD", "--out", "OUT"],
    "filtered tokens": [
        *("tokens", *CONFIG, "--text", "stdlib_filtered", "--rows", "BAD", "--seen", "BAD", "--out", "OUT"),
    ],
    "pretrain": ["pretrain", *CONFIG, "--variant", "all", "--width", "24", "--seed", "1", "--tokens", "BAD"],
    "an arm": ["pretrain", *STAGE, "--arm", "baseline", "--seed", "1", "--tokens", "BAD", "--out", "OUT"],
    "a GPT-2": ["pretrain", *CONFIG, "--size", "tiny", "--blocks", "BAD", "--out", "OUT"],
    "finetune": ["finetune", *CONFIG, "--method", "vanilla", "--size", "tiny", "--seed", "1", "--base", "BAD"],
    "evaluate": ["evaluate", "--model", "BAD", "--tokens", "BAD", *CPU],
    "evaluate blocks": ["evaluate", "--model", "BAD", "--blocks", "a=BAD", "--tokenizer", "BAD", "--out", "OUT", *CPU],
    "fold": ["fold", "--model", "BAD", "--tokens", "BAD", "--out", "OUT", *CPU],
    "generate": ["generate", "--checkpoint", "BAD", "--tokenizer", "BAD", "--prompt", "dog", *CPU],
    "bench": ["bench", "decode", *CONFIG, "--model", "BAD", "--out", "OUT", *CPU],
    "rows": ["rows", "training", "BAD", "--run", "a", "--out", "OUT"],
    "rows of the GPT-2 track": ["rows", "gpt2", "BAD", "--run", "a", "--out", "OUT"],
    "rows of provenance": ["rows", "provenance", "BAD", "--run", "a", "--out", "OUT"],
    "rows of int8": ["rows", "int8", "BAD", "--run", "a", "--tokens", "BAD", "--out", "OUT"],
    "rows of tapers": ["rows", "tapers", "a=BAD", "--run", "a", "--out", "OUT", *CPU],
    "rows of odd inputs": ["rows", "study_S3", "BAD", *CONFIG, "--out", "OUT"],
    "rows of a stage": ["rows", "study_S1", *CONFIG, "--results", "BAD", "--out", "OUT"],
    "rows of oddities": [
        *("rows", "study_S4_oddities", *CONFIG, "--results", "BAD", "--tokens", "BAD", "--out", "OUT", *CPU),
    ],
    **{
        name: ["table", name, *CONFIG, "--results", "BAD", "--out", "OUT"]
        for name in ("table1", "table2", "table3", "table_int8", "claims", "table_S1", "table_S3", "table_S4_oddities")
    },
    **{
        name: ["figure", name, *CONFIG, "--results", "BAD", "--out", "OUT"]
        for name in ("figure2", "figure_decode", "figure_S1", "figure_S3")
    },
    "tables of tapers": ["table", "tapers", "--results", "BAD", "--out", "OUT"],
    "figures of tapers": ["figure", "tapers", "--results", "BAD", "--out", "OUT"],
    "a published run": ["figure", "--published", "a", "--results", "BAD"],
    "compare": ["compare", "--run", "a", "--results", "BAD"],
    "compare --publish": ["compare", "--run", "a", "--results", "BAD", "--config", "BAD", "--publish"],
    "plan": ["plan", *CONFIG, "--rows", "BAD"],
    "plan of a config": ["plan", "--config", "BAD"],
    "export": ["export", "--model", "BAD", "--form", "normfree", "--out", "OUT"],
    "export --check": ["export", "--check", "BAD"],
    "taper": ["taper", "--model", "BAD", "--data", "web", "--steps", "10", "--out", "OUT", *CPU],
    "taper on a text": ["taper", "--model", "BAD", "--data", "BAD", "--steps", "10", "--out", "OUT", *CPU],
    "taper --dry-run": ["taper", "--model", "BAD", "--data", "web", "--steps", "10", "--out", "OUT", "--dry-run", *CPU],
    "odd inputs": [*ODD, "--models", "baseline=BAD", "--tokens", "BAD", "--tokenizer", "BAD", "--out", "OUT"],
}
REST = {"pretrain": ["--out", "OUT"], "finetune": ["--blocks", "BAD", "--out", "OUT"]}

GARBAGE = bytes(range(256)) * 40
FILES = {  # name -> content, of what stands in a folder where a verb looks for its own
    "garbage": GARBAGE,
    "empty": b"",
    "deep": b"[" * 100_000,
    "a list": b"[1]",
    "no keys": b"{}",
    "cut": b'{"kind": "corp',
}
NAMES = ("manifest.json", "result.json", "config.json", "model.safetensors", "selfcheck.safetensors", "spread.json")
NAMES += ("results.csv", "curves.csv", "scores.csv", "train.jsonl", "tokenizer.model")


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name of a fault -> the path that has it."""
    folder = tmp_path_factory.mktemp("bad")
    found = {"missing": folder / "missing", "below a file": folder / "a file/x", "a long name": folder / ("a" * 300)}
    for name, content in FILES.items():
        found[f"a folder of files: {name}"] = folder / f"folder of {name}"
        found[f"a folder of files: {name}"].mkdir()
        for file in NAMES:
            (folder / f"folder of {name}" / file).write_bytes(content)
        found[f"a file: {name}"] = folder / f"{name}.json"
        found[f"a file: {name}"].write_bytes(content)
    for name in ("an empty folder", "a folder of folders"):
        found[name] = folder / name
        found[name].mkdir()
    for file in NAMES:
        (folder / "a folder of folders" / file).mkdir()
    found["a file"] = folder / "a file"
    found["a file"].write_text("hello")
    whole = {"schema_version": 1, "kind": "corpus", "splits": {}}
    found["another kind"] = folder / "another kind"
    found["another kind"].mkdir()
    (folder / "another kind/manifest.json").write_text(json.dumps(whole))
    return found


def test_every_verb_is_tried(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.partition("text and tokens:")[2].splitlines()
    assert {line.split()[0] for line in lines if line.startswith("  ")} == {words[0] for words in VERBS.values()}


@pytest.mark.parametrize("verb", VERBS)
def test_bad_inputs_are_one_line_each(verb: str, bad: dict[str, Path], tmp_path: Path, capsys) -> None:
    for fault, path in bad.items():
        words = [*VERBS[verb], *REST.get(verb, [])]
        words = [word.replace("BAD", str(path)).replace("OUT", str(tmp_path / "out")) for word in words]
        assert main(words) == 2, fault
        told = capsys.readouterr().err
        assert told.startswith("tapernorm: "), fault
        lines = [line for line in told.splitlines() if not line.startswith("tapernorm: ")]
        assert all(line.startswith("  ") for line in lines), fault  # a line per fault of a config
        assert "Traceback" not in told


@pytest.mark.parametrize("verb", [verb for verb, words in VERBS.items() if "OUT" in words])
def test_an_output_that_cannot_be_is_one_line(verb: str, tmp_path: Path, capsys) -> None:
    """Below a file, and of a name that no file can have."""
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file/out", tmp_path / ("a" * 300)):
        words = [word.replace("BAD", str(tmp_path)).replace("OUT", str(out)) for word in VERBS[verb]]
        assert main(words) == 2
        told = capsys.readouterr().err
        assert told.startswith("tapernorm: ")
        assert "Traceback" not in told
    assert (tmp_path / "file").read_text() == "mine"
