"""The page for a first visit: every block of it runs, in its order, with fewer steps."""

import re
from typing import Any

import pytest
import torch
from doc_blocks import blocks, play
from places import ROOT
from transformers import AutoModelForCausalLM

from tapernorm.architectures import logits_of

PAGE = ROOT / "docs/taper-in-two-minutes.md"
SHORTER = {"=250": "=20", "range(250)": "range(20)", "--steps 200": "--steps 12", "limit=5": "limit=1"}


@pytest.mark.slow
def test_every_block_of_the_page_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "config").symlink_to(ROOT / "config")
    monkeypatch.chdir(tmp_path)
    threads, known = torch.get_num_threads(), {}
    played = blocks(PAGE)
    for language, code in played:
        play(language, code, known, SHORTER)
    torch.set_num_threads(threads)
    assert [language for language, _ in played].count("python") == 5
    shown = capsys.readouterr().out
    assert "9 norms go" in shown
    assert "self-check passed" in shown
    assert len(re.findall(r"(?:held-out|valid), (?:before|after): mean \d", shown)) == 4
    base = AutoModelForCausalLM.from_pretrained("work/base")
    check_functions(base, known)
    assert 1.0 < known["scored"]["results"]["bible"]["bits_per_byte,none"] < 8.0


def check_functions(base: Any, known: dict[str, Any]) -> None:
    """Both exports are one function, which is not the base's."""
    ids = known["ids"]
    with torch.no_grad():
        stock, normfree, before = (logits_of(model, ids) for model in (known["stock"], known["normfree"], base))
    scale = stock.abs().max()
    assert (stock - normfree).abs().max() < 1e-4 * scale
    assert (stock - before).abs().max() > 1e-2 * scale


def test_the_page_names_files_and_targets_that_exist():
    text = PAGE.read_text(encoding="utf-8")
    for page in re.findall(r"\]\(([\w-]+\.md)\)", text):
        assert (PAGE.parent / page).is_file()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"make ([\w-]+)", text):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    (file,) = set(re.findall(r"build/[\w./-]+\.gguf", text))
    assert file in makefile
