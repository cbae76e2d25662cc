"""The recipe on a modern model: a slice of SmolLM2, its first layers and most frequent tokens, from its GGUF file.

Layer 2 is the first to write massive activations: a few tokens leave its MLP many times as large as the others. So the
norms before it can go, as they do in `make smollm2`, and those behind it, which meet such tokens, stay.
"""

import json
import math
import shlex
import signal
from itertools import islice
from pathlib import Path

import pytest
import torch
import transformers
from places import ROOT
from tokenizers import Tokenizer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tapernorm
from tapernorm.architectures import architecture_of, select_norms
from tapernorm.checkpoints.gguf import load_gguf, tokenizer_of_gguf
from tapernorm.checkpoints.pretrained import skeleton
from tapernorm.spread import FIRST_LIMIT, TAIL_LIMIT
from tapernorm.util.atomic_files import read_json
from tapernorm_lab.cli.main import main
from tapernorm_lab.data.sources import open_source
from tapernorm_lab.own_model.options import data_config
from tapernorm_lab.training.stop_signals import Stopped
from tapernorm_lab.training.trainer import Trainer

SMOLLM2 = ROOT / "build/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS, VOCABULARY = 4, 4096
STEPS, CUT = 12, 10
INPUT, AFTER = "input_layernorm", "post_attention_layernorm"
GONE = [f"model.layers.{name}" for name in (f"0.{INPUT}", f"0.{AFTER}", f"1.{INPUT}", f"1.{AFTER}", f"2.{INPUT}")]
WHOLE = [*GONE, *(f"model.layers.{name}" for name in (f"10.{INPUT}", f"10.{AFTER}", f"11.{INPUT}"))]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SMOLLM2.is_file(), reason="SmolLM2 is not there: make smollm2-model"),
]


def sites() -> list[str]:
    """The patterns of `make smollm2`."""
    _, option, rest = (ROOT / "Makefile").read_text(encoding="utf-8").partition("--sites ")
    assert option
    return shlex.split(rest.partition("\n")[0])


def slice_of_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """The first tokens of the model's own: each merge makes the next one."""
    whole = tokenizer_of_gguf(SMOLLM2)
    backend = json.loads(whole.backend_tokenizer.to_str())
    vocabulary = {token: i for token, i in backend["model"]["vocab"].items() if i < VOCABULARY}
    merges = [pair for pair in backend["model"]["merges"] if "".join(pair) in vocabulary]
    backend["model"] |= {"vocab": vocabulary, "merges": merges}
    marks = {"bos_token": whole.bos_token, "eos_token": whole.eos_token}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(backend)), **marks)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with the model's slice and its tokenizer, in slice/, and a text, text.txt."""
    folder = tmp_path_factory.mktemp("smollm2")
    model = load_gguf(SMOLLM2)
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    model.resize_token_embeddings(VOCABULARY)
    model.model.norm.weight.data.mul_(0.3)  # so early in the model its logits are too sure
    model.save_pretrained(folder / "slice")
    slice_of_tokenizer().save_pretrained(folder / "slice")
    chapters = open_source(data_config("web", "text", 0.05)).documents()
    texts = [text[:800] for _, text in islice(chapters, 30)]
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(texts), encoding="utf-8")
    return folder


def words_of(home: Path) -> list[str]:
    """The taper of `make smollm2`, smaller."""
    files = ["--model", str(home / "slice"), "--data", str(home / "text.txt"), "--out", str(home / "run")]
    sizes = ["--steps", str(STEPS), "--batch", "2", "--context", "32", "--valid-fraction", "0.2"]
    chosen = ["--level", "0.2", "--precision", "bf16", "--lr", "1e-4", "--threads", "1", "--device", "cpu"]
    return ["taper", *files, *sizes, *chosen, "--sites", *sites()[:2]]  # the others are of later layers


@pytest.fixture(scope="module")
def run(home) -> Path:
    """A run that was stopped, and went on to its end."""
    stock = Trainer.step

    def cut(trainer: Trainer, k: int) -> object:
        if k == CUT:
            raise Stopped(signal.SIGTERM)
        return stock(trainer, k)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trainer, "step", cut)
        assert main(words_of(home)) == 128 + signal.SIGTERM
    run = home / "run"
    assert list(run.glob("resume/*/step-*.pt"))
    assert not (run / "result.json").exists()
    assert main(words_of(home)) == 0
    return run


@pytest.fixture(scope="module")
def measured(run) -> Path:
    words = ["rows", "tapers", f"taper={run}", "--run", "slice", "--scale-tokens", "1024", "--device", "cpu"]
    assert main([*words, "--out", str(run.parent / "measured/rows")]) == 0
    return run


def test_the_norms_of_ones_choice_are_gone_and_the_others_are_norms(home, run):
    assert list(read_json(run / "result.json")["norms"]) == GONE
    exported, base = tapernorm.load(run / "export"), skeleton(home / "slice")
    names = architecture_of(exported).norms(exported)
    assert len(names) == 2 * LAYERS + 1
    for name in names:
        kind = torch.nn.Identity if name in GONE else LlamaRMSNorm
        assert type(exported.get_submodule(name)) is kind, name
        assert type(base.get_submodule(name)) is LlamaRMSNorm  # the control


def test_the_run_goes_on_where_it_was_stopped_and_ends_with_finite_scores(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(math.isfinite(row["ce"]) for row in rows)
    assert rows[-1]["gate"] == 0
    scores = read_json(run / "scores.json")["corpora"]["held-out"]
    assert all(math.isfinite(scores[form]["rows"]["mean"]) for form in ("before", "after"))
    assert all(scores[form]["rows"]["nonfinite"] == 0 for form in ("before", "after"))


def test_the_massive_activations_meet_only_norms_that_stay(measured):
    for entry in read_json(measured / "spread.json")["norms"]:
        before, behind = entry["before"], entry["norm"] in (f"model.layers.3.{INPUT}", f"model.layers.3.{AFTER}")
        median = before["quantiles"]["0.5"]
        if behind or entry["norm"] == "model.norm":
            assert entry["c"] is None
            assert before["quantiles"]["0.999"] > TAIL_LIMIT * median
            assert before["first"] > FIRST_LIMIT * median
        else:
            assert before["quantiles"]["0.999"] < TAIL_LIMIT * median
            assert before["first"] < FIRST_LIMIT * median
        assert entry["after"]["nonfinite"] == 0


def test_its_tables_and_figure_are_written(measured, tmp_path):
    for verb in ("table", "figure"):
        words = ["--results", str(measured.parent / "measured"), "--out", str(tmp_path / f"{verb}s")]
        assert main([verb, "tapers", *words]) == 0
    for name in ("tables/scores", "tables/norms_taper"):
        assert all((tmp_path / f"{name}.{kind}").stat().st_size for kind in ("csv", "md", "tex"))
    assert all((tmp_path / f"figures/figure_spread_taper.{kind}").stat().st_size for kind in ("csv", "pdf", "png"))
    assert f"{len(GONE)} of {2 * LAYERS + 1}" in (tmp_path / "tables/scores.md").read_text(encoding="utf-8")


def test_the_patterns_of_the_makefile_are_eight_norms_of_the_whole_model():
    assert select_norms(skeleton(SMOLLM2), final=False, sites=sites()) == WHOLE
