"""Every code block of README and docs runs in its order, with fewer steps; what is too dear is checked otherwise."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from doc_blocks import SHORTER, blocks, check_unrun, play, runnable
from own_models import write_model, write_stories
from places import ROOT, SHARED
from transformers import AutoModelForCausalLM, AutoTokenizer

from tapernorm import fold
from tapernorm.architectures import logits_of

README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = {page.stem: page for page in (README, *sorted(DOCS.glob("*.md")))}
SHORTER |= {"start=30, end=210": "start=3, end=9"}
FIRST_VISIT = {"=250": "=20", "range(250)": "range(20)", "--steps 200": "--steps 12", "limit=5": "limit=1"}
EXAMPLE = {"--steps 300": "--steps 80 --batch 8 --context 64 --threads 1"}
UNRUN = {  # page -> how each of its marked blocks is checked
    "README": ["dry run", "parser", "dry run", "dry run"],
    "artifact": ["dry run", "dry run"],
    "benchmarks": ["dry run", "dry run", "parser"],
    "clusters": ["dry run", "dry run", "dry run", "dry run", "dry run", "parser", "parser"],
    "own-models": ["needs"],
    "replicate": ["dry run"],
    "smollm2": ["dry run", "parser"],
    "study": ["dry run", "parser", "parser", "parser"],
}
PLAYED = {"README", "artifact", "interpretability", "own-models", "replicate", "results", "study"}
PLAYED |= {"taper-in-two-minutes", "training-loops"}  # interpretability: tests/tapernorm/interop


def test_the_blocks_that_no_test_runs_are_these():
    marked = {name: [block.mark for block in blocks(page) if block.mark] for name, page in PAGES.items()}
    assert {name: marks for name, marks in marked.items() if marks} == UNRUN
    assert {name for name, page in PAGES.items() if runnable(page)} == PLAYED


def marked_lines(slow: bool) -> list[tuple[str, str]]:
    marked = [block for page in PAGES.values() for block in blocks(page) if block.mark in ("dry run", "parser")]
    found = {(line, block.mark) for block in marked for line in block.commands}
    return [(line, mark) for line, mark in sorted(found) if slow == (mark == "dry run" and "snakemake" in line)]


@pytest.mark.parametrize(("line", "mark"), marked_lines(slow=False))
def test_commands_that_are_too_dear_parse(line, mark):
    check_unrun(line, mark)


@pytest.mark.slow
@pytest.mark.parametrize(("line", "mark"), marked_lines(slow=True))
def test_workflows_that_are_too_dear_plan_their_jobs(line, mark):
    check_unrun(line, mark)


@pytest.mark.parametrize(
    ("line", "mark"), [("tapernorm taper --no-such-option", "parser"), ("make no-such-target", "dry run")]
)
def test_a_wrong_command_is_found(line, mark):
    with pytest.raises((AssertionError, SystemExit)):
        check_unrun(line, mark)


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A working folder with what the pages take for granted."""
    write_model(tmp_path / "my-model", "llama")
    write_stories(tmp_path / "stories.txt", 120)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    return tmp_path


def play_all(page: Path, shorter: dict[str, str] = SHORTER) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for block in runnable(page):
        play(block, known, shorter)
    return known


def test_readme(desk, capsys):
    """The name gpt2 resolves to a small model in the working folder."""
    write_model(desk / "gpt2", "gpt2", n_positions=64)
    shutil.copy(README, desk)
    known = play_all(README)
    assert known["taper"].gate.item() == 0
    assert len(known["taper"].kept) == 1
    assert "torch.Size([1, 64," in capsys.readouterr().out
    assert AutoTokenizer.from_pretrained("gpt2") is not None


def test_own_models(desk, capsys):
    known = play_all(PAGES["own-models"])
    assert (desk / "work/figures/figure_spread_mine.png").is_file()
    assert type(known["stock"]) is type(known["normfree"])
    ids = torch.arange(12)[None]
    with torch.no_grad():
        stock, normfree = known["stock"](ids).logits, known["normfree"](ids).logits
    assert (stock - normfree).abs().max() < 0.05 * stock.abs().max()  # bfloat16
    assert "self-check passed" in capsys.readouterr().out


def test_training_loops(desk):
    ids = torch.randint(250, (48, 12), generator=torch.Generator().manual_seed(0))
    loop, folded, trainer, decoder, decoding = runnable(PAGES["training-loops"])
    known = {"batches": list(ids.split(4)), "model": AutoModelForCausalLM.from_pretrained("my-model")}
    play(loop, known)
    assert known["taper"].gate.item() == 0
    play(folded, known)
    assert (desk / "work/stock/config.json").is_file()
    known["model"] = AutoModelForCausalLM.from_pretrained("my-model")
    known["rows"] = [{"input_ids": row, "labels": row} for row in ids]
    play(trainer, known)
    assert known["taper"].gate.item() == 0
    fold(known["model"])
    play(decoder, known)
    assert known["logits"].shape == (2, 12, 256)
    play(decoding, known)
    assert known["written"].shape == (2, 5)


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "models/stories260K").is_dir(), reason="stories260K is not there: ../shared")
def test_the_worked_example(desk, capsys):
    (desk / "models").mkdir()
    (desk / "models/stories260K").symlink_to(SHARED / "models/stories260K")
    for split in ("train", "valid"):
        text = (SHARED / f"data/tinystories/{split}.txt").read_text(encoding="utf-8")
        (desk / f"{split}.txt").write_text(text[:400_000], encoding="utf-8")
    (example,) = [block for block in blocks(PAGES["own-models"]) if block.mark == "needs"]
    play(example, {}, EXAMPLE)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("valid")]
    before, after = (float(value) for value in re.findall(r"([\d.]+) nats/token", line))
    assert 1.2 < before < 1.6  # near 1.3 with all of its context
    assert after < 3.0  # of a model without norms, after so short a taper


@pytest.mark.slow
def test_the_first_visit(desk, capsys):
    (desk / "config").symlink_to(ROOT / "config")
    threads = torch.get_num_threads()
    known = play_all(PAGES["taper-in-two-minutes"], FIRST_VISIT)
    torch.set_num_threads(threads)
    shown = capsys.readouterr().out
    assert "; 9 norms " in shown
    assert "self-check passed" in shown
    assert len(re.findall(r"(?:held-out|valid), (?:before|after): mean \d", shown)) == 4
    check_functions(AutoModelForCausalLM.from_pretrained("work/base"), known)
    assert 1.0 < known["scored"]["results"]["bible"]["bits_per_byte,none"] < 8.0


def check_functions(base: Any, known: dict[str, Any]) -> None:
    """Both exports are one function, which is not the base's."""
    ids = known["ids"]
    with torch.no_grad():
        stock, normfree, before = (logits_of(model, ids) for model in (known["stock"], known["normfree"], base))
    scale = stock.abs().max()
    assert (stock - normfree).abs().max() < 1e-4 * scale
    assert (stock - before).abs().max() > 1e-2 * scale


@pytest.mark.slow
def test_replicate_step_by_step(desk):
    """Each verb by hand, on the demo's config with fewer steps."""
    shutil.copytree(ROOT / "config", desk / "config")
    config = yaml.safe_load((desk / "config/demo.yaml").read_text(encoding="utf-8"))
    config["widths"] = [{**width, "steps": 40} for width in config["widths"]]
    config["bench"] |= {"rounds": 2, "warmup": 1, "batches": [1], "prompts": [128], "modes": ["eager"]}
    for size in config["gpt2"]["sizes"]:
        size["fresh"]["steps"], size["steps"], size["decay_steps"] = 20, 110, 110
    (desk / "config/demo.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    play_all(PAGES["replicate"])
    assert (desk / "work/decode.json").is_file()
    assert (desk / "work/scores.json").is_file()


def published_desk(desk: Path) -> None:
    for kind in ("results", "figures"):
        shutil.copytree(ROOT / kind / "published", desk / kind / "published")
    for name in ("config", "workflow", "Snakefile", "CITATION.cff", "LICENSE", "requirements.lock"):
        (desk / name).symlink_to(ROOT / name)


def same_files(desk: Path) -> bool:
    """Whether the published files of the desk are the repository's."""
    names = [
        path.relative_to(ROOT) for kind in ("results", "figures") for path in (ROOT / kind).glob("published/**/*.*")
    ]
    return all((desk / name).read_bytes() == (ROOT / name).read_bytes() for name in names if (ROOT / name).is_file())


def test_results(desk):
    published_desk(desk)
    play_all(PAGES["results"])
    assert same_files(desk)
    (desk / "results/published/demo/tables/table1.csv").write_text("edited")
    assert not same_files(desk)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["study", "artifact"])
def test_published_runs_are_drawn_again(desk, page):
    published_desk(desk)
    elsewhere = {"make figures RUN=demo": "", "make figures RUN=cpu\n": "\n"} if page == "artifact" else {}
    play_all(PAGES[page], elsewhere)  # results and study have these
    assert same_files(desk)
    assert page != "study" or (desk / "work/figures/figure_S1confirm.png").is_file()
