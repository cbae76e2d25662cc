"""The base model of a fine-tune: brought from elsewhere once, or trained here and resumed like any run."""

from functools import partial
from pathlib import Path

import pytest
import torch
from crashing import at_step, kill
from finetuning import CONTEXT, MICRO, write_blocks
from torch import nn
from training import HARDWARE, VOCABULARY, leftovers, outcome_of

from tapernorm.checkpoints.store import load
from tapernorm.util.atomic_files import read_json
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json
from tapernorm.util.rng import generator
from tapernorm_lab.cli.main import main
from tapernorm_lab.config.gpt2 import Gpt2Shape
from tapernorm_lab.config.jobs import BaseJob
from tapernorm_lab.experiments.gpt2_base import bring_model, make_base
from tapernorm_lab.models.gpt2 import GPT2LMHeadModel, fresh

FRESH = {
    "shape": {"d_model": 12, "n_layer": 2, "n_head": 3, "dropout": 0.1, "norm_eps": 1e-5},
    "steps": 12,
    "train": {
        "batch": 4,
        "lr": 1e-2,
        "warmup_fraction": 0.25,
        "betas": [0.9, 0.95],
        "adam_eps": 1e-8,
        "weight_decay": 0.0,
        "clip_norm": 1.0,
        "precision": "float32",
        "log_every": 2,
        "eval_every": 0,
    },
}
JOB = BaseJob.model_validate({"size": "tiny", "source": None, "fresh": FRESH, "context": CONTEXT, "seed": 3})


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_blocks(tmp_path_factory.mktemp("data") / "blocks")


def stock_gpt2(folder: Path, eps: float = 1e-5) -> GPT2LMHeadModel:
    """A GPT-2 as transformers itself saves it."""
    shape = Gpt2Shape(d_model=12, n_layer=2, n_head=3, dropout=0.1, norm_eps=eps)
    model = fresh(shape, vocab_size=VOCABULARY, context=CONTEXT, generator=generator(5, "init")).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.5, 1.5, generator=generator(6, "gains"))
                module.weight.mul_(1e6 if eps > 1 else 1.0)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("eps", [1e-5, 1e12])
def test_a_published_model_is_brought_as_it_is(tmp_path: Path, eps: float) -> None:
    """A plain one, and one whose norms are disarmed by an eps of 1e12, as the predecessors publish theirs."""
    stock = stock_gpt2(tmp_path / "published", eps)
    result = bring_model(str(tmp_path / "published"), tmp_path / "run")
    assert result == read_json(tmp_path / "run" / "result.json")
    assert result["normalises"] is (eps < 1)
    brought = load(tmp_path / "run")
    ids = torch.randint(VOCABULARY, (2, CONTEXT), generator=generator(0, "ids"))
    with torch.no_grad():
        assert torch.equal(brought(ids).logits, stock(ids).logits)


def test_a_model_that_cannot_be_had_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="folder"):
        bring_model(str(tmp_path / "nothing" / "here"), tmp_path / "run")
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_fresh_model_needs_blocks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give the blocks"):
        make_base(JOB, None, tmp_path, HARDWARE)


def test_blocks_of_another_length_are_refused(tmp_path: Path) -> None:
    short = write_blocks(tmp_path / "short", context=CONTEXT - 1)
    with pytest.raises(UserError, match="blocks of 8 tokens and the job asks for 9"):
        make_base(JOB, short, tmp_path / "run", HARDWARE)


def test_a_published_model_takes_no_blocks(blocks: Path, tmp_path: Path) -> None:
    job = BaseJob.model_validate({**JOB.model_dump(), "source": "gpt2", "fresh": None})
    with pytest.raises(UserError, match="is gpt2 as it is, and needs no blocks"):
        make_base(job, blocks, tmp_path, HARDWARE)


def test_a_fresh_model_is_trained_and_resumed_bitwise(blocks: Path, tmp_path: Path) -> None:
    make_base(JOB, blocks, tmp_path / "whole", MICRO)
    whole = outcome_of_base(tmp_path / "whole")
    settings = ["--job", canonical_json(JOB), "--hardware", canonical_json(MICRO)]
    command = ["pretrain", *settings, "--blocks", str(blocks), "--out", str(tmp_path / "killed")]
    kill(partial(at_step, 6, "within"), command, tmp_path / "log")
    assert main(command) == 0
    assert outcome_of_base(tmp_path / "killed") == whole
    assert leftovers(tmp_path / "killed") == []
    rows = whole["metrics"]
    assert rows[-1]["ce"] < rows[0]["ce"] - 0.1


def outcome_of_base(run: Path) -> dict[str, object]:
    return outcome_of(run, details=("normalises",))
