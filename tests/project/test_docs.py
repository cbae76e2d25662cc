"""Every code block of the pages for users of the library runs, in its order; shorter than the pages say."""

import pkgutil
import re
import sys
from typing import Any

import pytest
import torch
from doc_blocks import SHORTER, blocks, play
from own_models import write_model, write_stories
from places import ROOT
from transformers import AutoModelForCausalLM

from tapernorm import fold

SHARED = ROOT.parent / "shared"
SHORTER |= {"start=30, end=210": "start=3, end=9"}
EXAMPLE = {"--steps 300": "--steps 80 --batch 8 --context 64 --threads 1"}
OWN_MODELS, LOOPS = (ROOT / "docs" / name for name in ("own-models.md", "training-loops.md"))


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A working folder with what the pages take for granted."""
    write_model(tmp_path / "my-model", "llama")
    write_stories(tmp_path / "stories.txt", 120)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_own_models(desk, capsys):
    known: dict[str, Any] = {}
    played = [block for block in blocks(OWN_MODELS) if "stories260k" not in block[1]]
    for language, code in played:
        play(language, code, known)
    assert len(played) == 5
    assert (desk / "work/figures/figure_spread_mine.png").is_file()
    assert type(known["stock"]) is type(known["normfree"])
    ids = torch.arange(12)[None]
    with torch.no_grad():
        stock, normfree = known["stock"](ids).logits, known["normfree"](ids).logits
    assert (stock - normfree).abs().max() < 0.05 * stock.abs().max()  # bfloat16
    assert "self-check passed" in capsys.readouterr().out


def test_training_loops(desk):
    ids = torch.randint(250, (48, 12), generator=torch.Generator().manual_seed(0))
    loop, folded, trainer = blocks(LOOPS)
    known = {"batches": list(ids.split(4)), "model": AutoModelForCausalLM.from_pretrained("my-model")}
    play(*loop, known)
    assert known["taper"].gate.item() == 0
    play(*folded, known)
    assert (desk / "work/stock/config.json").is_file()
    known["model"] = AutoModelForCausalLM.from_pretrained("my-model")
    known["rows"] = [{"input_ids": row, "labels": row} for row in ids]
    play(*trainer, known)
    assert known["taper"].gate.item() == 0
    fold(known["model"])


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "models/stories260K").is_dir(), reason="stories260K is not there: ../shared")
def test_the_worked_example(tmp_path, monkeypatch, capsys):
    (tmp_path / "models").mkdir()
    (tmp_path / "models/stories260K").symlink_to(SHARED / "models/stories260K")
    for split in ("train", "valid"):
        text = (SHARED / f"data/tinystories/{split}.txt").read_text(encoding="utf-8")
        (tmp_path / f"{split}.txt").write_text(text[:400_000], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    (example,) = [block for block in blocks(OWN_MODELS) if "stories260k" in block[1]]
    play(*example, {}, EXAMPLE)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("valid")]
    before, after = (float(value) for value in re.findall(r"([\d.]+) nats/token", line))
    assert 1.2 < before < 1.6  # near 1.3 with all of its context
    assert after < 3.0  # of a model without norms, after so short a taper


CHANGES = ("A new architecture", "A new variant", "A new table", "A new corpus")


def test_contributing_walks_through_four_changes_and_names_what_each_touches():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for title in CHANGES:
        (change,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
        marked = re.findall(r"`([^`\s]+)`", change)
        files = [ROOT / mark for mark in marked if "/" in mark]
        assert len(files) > 2
        assert not [str(file) for file in files if not file.exists()]
        code = "".join(file.read_text(encoding="utf-8") for file in files if file.suffix == ".py")
        names = [mark.split(".")[0] for mark in marked if re.fullmatch(r"[A-Za-z_.]+", mark)]
        assert names
        assert not [name for name in names if not re.search(rf"\b{name}\b", code)]


def test_the_map_of_the_house_names_every_room():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(src/[^`]+)/` \|", text, flags=re.MULTILINE))
    rooms = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "src").glob("*/*/__init__.py")}
    assert named == rooms | {"src/tapernorm"}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
def test_pages_name_modules_and_files_that_exist_in_lines_of_120_columns(page):
    text = page.read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:src|tests|workflow|profiles|config|docs|benchmarks)/[^`\s*{}<>]+)`", text))
    assert not [path for path in paths if not (ROOT / path).exists()]
    for dotted in set(re.findall(r"\btapernorm(?:_lab)?(?:\.[a-zA-Z_]+)+", text)):
        pkgutil.resolve_name(dotted)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = [line for line in outside.splitlines() if not line.startswith(("|", "    ", "<img", "!["))]
    assert not [line for line in prose if len(line) > 120]


@pytest.mark.parametrize("page", [ROOT / "README.md", LOOPS], ids=lambda page: page.name)
def test_loops_for_loaded_models_put_them_into_training_mode(page):
    """from_pretrained hands a model over in eval mode, in which nothing is observed."""
    text = page.read_text(encoding="utf-8")
    observed = text.index("with taper.observe()")
    start = text.rindex("attach(model", 0, observed)
    assert "model.train()" in text[start:observed]
