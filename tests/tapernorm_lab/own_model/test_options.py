"""Options of `tapernorm taper`: each in range, each text once, all checked before anything slow is imported."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tapernorm.util.errors import UserError
from tapernorm_lab.cli.main import main
from tapernorm_lab.own_model.options import HELD_OUT, Request, check

REFUSED = """
import sys
from tapernorm_lab.cli.main import main
for words in {commands!r}:
    assert main(words) == 2, words
print(sorted({{"torch", "transformers", "datasets", "pyarrow"}} & set(sys.modules)))
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a.txt", "b.txt", "c.jsonl"):
        (tmp_path / name).write_text(f"text {name}")
    os.symlink(tmp_path / "a.txt", tmp_path / "link.txt")
    os.link(tmp_path / "a.txt", tmp_path / "hard.txt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def request(*data: str, **changes: Any) -> Request:
    given: dict[str, Any] = {"model": "m", "data": data or ("a.txt",), "steps": 20, "out": Path("run"), **changes}
    return Request(**given)


def said(asked: Request) -> str:
    with pytest.raises(UserError) as raised:
        check(asked)
    return str(raised.value)


OUT_OF_RANGE = {
    "--steps": ("steps", [9, 0, -1, 2**31]),
    "--lr": ("lr", [0.0, -1.0, math.nan, math.inf]),
    "--batch": ("batch", [0, -3, 2**40]),
    "--micro-batch": ("micro_batch", [0]),
    "--context": ("context", [1, 0, -5]),
    "--seed": ("seed", [-1, 2**63, 10**22]),
    "--valid-fraction": ("valid_fraction", [0.0, 1.0, 2.0, -0.1, math.nan]),
    "--level": ("level_weight", [-1.0, math.nan, math.inf]),
    "--threads": ("threads", [0, -1, 100_000]),
    "--field": ("field", [""]),
    "--model": ("model", [""]),
}


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("option", OUT_OF_RANGE)
def test_an_option_out_of_range_is_refused_in_its_own_words(option: str) -> None:
    field, values = OUT_OF_RANGE[option]
    for value in values:
        told = said(request(**{field: value}))
        assert told.startswith(f"{option} ")
        assert "\n" not in told


@pytest.mark.usefixtures("home")
def test_options_in_range_are_taken() -> None:
    """The control of the test above, at the borders."""
    given = {"steps": 10, "lr": 1e-9, "batch": 1, "context": 2, "seed": 2**63 - 1, "threads": 1, "level_weight": 0.0}
    assert list(check(request(**given)).corpora) == [HELD_OUT]
    assert list(check(request(valid_fraction=0.999, seed=0)).corpora) == [HELD_OUT]


def files_of(asked: Request, corpus: str = HELD_OUT) -> list[str]:
    return [file for data in check(asked).corpora[corpus] for file in data.files]


@pytest.mark.usefixtures("home")
def test_a_file_counts_once_whatever_its_names() -> None:
    assert files_of(request("b.txt", "*.txt")) == ["b.txt", "a.txt"]  # its link and its second name are the same file
    assert files_of(request("a.txt", "./a.txt", "link.txt", "hard.txt")) == ["a.txt"]
    assert check(request("a.txt", "./a.txt", "web", "web")).repeated == ("a.txt", "web")
    assert [data.source for data in check(request("web", "a.txt", "web")).corpora[HELD_OUT]] == ["web", "text"]
    scored = check(request("a.txt", scored=(("more", "*.txt"),)))
    assert [file for data in scored.corpora["more"] for file in data.files] == ["a.txt", "b.txt"]


@pytest.mark.usefixtures("home")
def test_texts_that_differ_stay_as_they_were_given() -> None:
    """The control of the test above: a glob stays a glob, so that what was made of it is found again."""
    os.remove("link.txt")
    os.remove("hard.txt")
    assert files_of(request("*.jsonl", "*.txt")) == ["*.jsonl", "*.txt"]
    assert check(request("*.jsonl", "*.txt")).repeated == ()


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("name", ["", "a b", "../x", "a/b", "-x", "a.b", "a" * 65, "ü" * 33, "a\nb"])
def test_a_name_that_could_lead_elsewhere_is_refused(name: str) -> None:
    assert said(request(scored=((name, "b.txt"),))).startswith("--score: ")


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("names", [("more", "more"), (HELD_OUT,)])
def test_names_of_texts_differ(names: tuple[str, ...]) -> None:
    assert "--score: " in said(request(scored=tuple((name, "b.txt") for name in names)))


@pytest.mark.usefixtures("home")
def test_a_text_that_is_not_there_is_named_by_its_option() -> None:
    assert said(request(scored=(("more", "none.txt"),))).startswith("--score more: 'none.txt' matches no file")


@pytest.mark.usefixtures("home")
def test_a_control_asks_for_no_taper() -> None:
    for changes in ({"final": True}, {"sites": ("*",)}, {"form": "stock"}, {"form": "stock", "level_weight": 0.1}):
        assert "--keep-norms " in said(request(keep_norms=True, **changes))


@pytest.mark.usefixtures("home")
def test_a_control_takes_the_level_loss_of_its_taper() -> None:
    for changes in ({}, {"final": True}, {"sites": ("*",)}):
        check(request(keep_norms=True, level_weight=0.1, **changes))


def taper(*words: str) -> list[str]:
    return ["taper", "--model", "m", "--data", "a.txt", "--steps", "20", "--out", "run", *words]


# Each is refused by what `taper` calls it; the keys of a config are not for its users.
TYPOS = {
    "lr": ["--lr", "-1"],
    "lr that is no number": ["--lr", "nan"],
    "context": ["--context", "1"],
    "seed": ["--seed", "-1"],
    "large seed": ["--seed", "1" * 23],
    "share": ["--valid-fraction", "2"],
    "steps": ["--steps", "5"],
    "field": ["--field", ""],
    "batch": ["--batch", "0"],
    "threads": ["--threads", "100000"],
    "file": ["--data", "none.txt"],
    "kind of file": ["--data", "odd.csv"],
    "empty file": ["--data", "empty.txt"],
    "score": ["--score", "more=none.txt"],
    "long name": ["--score", f"{'a' * 300}=a.txt"],
    "no name": ["--score", "a.txt"],
    "control": ["--keep-norms", "--final"],
    "long file": ["--data", "a" * 300 + ".txt"],
}
KEYS = ("data.", "gpt2.", "model.", "hardware.", "train.", "taper.", "pydantic", "validation error")


@pytest.mark.parametrize("case", TYPOS)
def test_a_typo_is_one_line_in_the_words_of_the_option(home: Path, case: str, capsys) -> None:
    (home / "odd.csv").write_text("a,b")
    (home / "empty.txt").write_text("")
    assert main(taper(*TYPOS[case])) == 2
    told = capsys.readouterr().err
    assert told.startswith("tapernorm: --")
    assert told.count("\n") == 1
    assert not [key for key in KEYS if key in told]
    assert not (home / "run").exists()


def test_typos_are_refused_before_torch_is_imported(home: Path) -> None:
    commands = [taper(*words) for case, words in TYPOS.items() if case not in ("kind of file", "empty file")]
    code = REFUSED.format(commands=[*commands, *([*command, "--dry-run"] for command in commands)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=home)
    assert done.stdout == "[]\n"
