"""What the dry run sees coming, on models with an outlier put into them and without."""

import re
import shlex
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
import transformers
from offline import offline
from own_models import EOS, story, write_model, write_stories
from places import ROOT
from taper_runs import run_of

import tapernorm_lab.own_model.resolve
from tapernorm import spread
from tapernorm.architectures import vocabulary_of
from tapernorm.checkpoints.pretrained import load_pretrained
from tapernorm.util.errors import UserError
from tapernorm_lab.data.hf_tokenizer import save_hub_tokenizer
from tapernorm_lab.data.tokenizers import open_tokenizer
from tapernorm_lab.own_model import dry_run, scale_warnings
from tapernorm_lab.own_model.dry_run import describe, scales_ahead
from tapernorm_lab.own_model.options import Request
from tapernorm_lab.own_model.taper_own_model import taper_model

SMOLLM2 = ROOT / "build/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WORD = " saw"  # one token of the tokenizer, made large below


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    write_model(folder / "llama", "llama")
    write_stories(folder / "train.txt")
    return folder


def request(home: Path, model: str = "llama", **changes) -> Request:
    base = {"model": str(home / model), "data": (str(home / "train.txt"),), "steps": 20, "out": home / "run"}
    return Request(**{**base, "threads": 1, "device": "cpu", **changes})


def shown_by(asked: Request) -> str:
    return describe(run_of(asked))


def sampled(asked: Request) -> scale_warnings.ScaleSample:
    run = run_of(asked)
    with tempfile.TemporaryDirectory() as folder:
        save_hub_tokenizer(run.base, Path(folder), vocab_size=vocabulary_of(run.skeleton))
        return scales_ahead(run, open_tokenizer(Path(folder)))


@pytest.fixture(scope="module")
def outlying(home) -> Path:
    """The same model with the embedding of WORD made fifty times as large."""
    coder = transformers.AutoTokenizer.from_pretrained(home / "llama")
    (token,) = coder(WORD, add_special_tokens=False)["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[token] *= 50
    model.save_pretrained(home / "outlying")
    coder.save_pretrained(home / "outlying")
    return home / "outlying"


def test_the_rows_are_the_text_end_to_end_with_an_end_after_each_document(home):
    seen = sampled(request(home))
    coder = transformers.AutoTokenizer.from_pretrained(home / "llama")
    end = coder.convert_tokens_to_ids(EOS)
    stream = [i for k in range(60) for i in [*coder(story(k))["input_ids"], end]]
    assert seen.rows.shape[1] == 16
    assert seen.rows.flatten().tolist() == stream[: seen.rows.numel()]
    assert seen.rows.numel() > len(stream) - 16
    assert seen.spreads == spread.measure(load_pretrained(home / "llama"), seen.rows)


@pytest.mark.parametrize("final", [False, True])
def test_the_dry_run_marks_and_names_the_norms_that_go_and_that_a_constant_cannot_stand_for(home, outlying, final):
    asked = request(home, "outlying", final=final)
    assert all(one.misfits == ("tail",) for one in sampled(asked).spreads.values())  # of a residual stream: everywhere
    count = 5 if final else 4
    table, found, warning = shown_by(asked).partition(f" {count} of the {count} ")
    assert found
    marked = [line.split()[0] for line in table.splitlines() if "!" in line and line.startswith("model")]
    assert len(marked) == count
    assert ("model.norm" in marked) == final
    lines = warning.splitlines()
    names = "model.layers.{0-1}.{input,post_attention}_layernorm"
    assert lines[1].endswith(f": {names}, model.norm" if final else f": {names}")
    assert f": {WORD!r} at position " in lines[2]
    assert len(lines) == 4  # and no norm is left to taper
    assert lines[3].startswith("  --level 0.2 ")


def test_what_was_chosen_against_outliers_is_told_and_norms_left_out_are_not_warned_of(home, outlying):
    shown = shown_by(request(home, "outlying", level_weight=0.5, sites=("*.1.*",)))
    assert "level loss 0.5" in shown
    assert " 2 of the 2 " in shown
    assert re.search(r"\n  --level 0\.5 .*\(given\)$", shown, re.MULTILINE)


def test_the_norms_that_a_constant_can_stand_for_come_as_an_option_to_paste(home, outlying):
    """An outlier that a middle block makes and takes back, as real models do."""
    quiet, loud = (sampled(request(home, name)) for name in ("llama", "outlying"))
    names = [f"model.layers.{block}.{norm}_layernorm" for block in range(13) for norm in ("input", "post_attention")]
    model = [*names, "model.norm"]
    one, other = next(iter(quiet.spreads.values())), next(iter(loud.spreads.values()))
    spreads = {name: other if ".3." in name or name in (names[8], "model.norm") else one for name in model}
    made = scale_warnings.ScaleSample(spreads, loud.rows, loud.coder)
    *_, option = made.warnings(model, level_weight=0.0)
    words = shlex.split(option)
    assert words[0] == "--sites"
    end = words.index("without")
    assert words[end + 1] == "--final"
    sites = words[1:end]
    chosen = {name for name in names if any(fnmatchcase(name, site) for site in sites)}
    assert chosen == {name for name in names if not spreads[name].misfits}
    assert len(sites) == 4


def test_a_model_without_an_outlier_gets_no_warning(home):
    """The control of the test above."""
    shown = shown_by(request(home))
    assert "the weights were not read" not in shown
    assert "--level" not in shown
    assert not [line for line in shown.splitlines() if "!" in line and line.startswith("model.")]


def test_columns_are_the_measured_numbers(home, outlying):
    spreads = sampled(request(home, "outlying")).spreads
    lines = [line.split() for line in shown_by(request(home, "outlying")).splitlines() if line.startswith("model.")]
    assert [line[0] for line in lines] == list(spreads)
    for line in lines:
        one = spreads[line[0]]
        multiples = (one.p99_9, one.largest, one.first)
        assert [float(cell.rstrip("!").rstrip("x")) for cell in line[3:7]] == pytest.approx(
            [one.median, *(value / one.median for value in multiples)], rel=6e-3
        )


def test_what_is_not_here_is_said_and_nothing_is_fetched(home, tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(dry_run, "load_pretrained", never)
    coder = transformers.AutoTokenizer.from_pretrained(home / "llama")
    transformers.AutoConfig.from_pretrained(home / "llama").save_pretrained(tmp_path)
    coder.save_pretrained(tmp_path)
    here = {str(home / "a/model"): tmp_path}  # what the hub's small files lie in
    monkeypatch.setattr(tapernorm_lab.own_model.resolve, "find", lambda source, **_: here.get(source, Path(source)))
    cases = {
        "weights": {"model": "a/model"},
        "'openwebtext'": {"data": ("openwebtext",)},
    }
    for reason, changes in cases.items():
        with offline():
            shown = shown_by(request(home, **changes))
        (told,) = (line for line in shown.splitlines() if line.startswith("scales not measured: "))
        assert reason in told
        assert "; 4 norms " in shown
        assert "median" not in shown


def test_what_the_run_would_refuse_is_refused(home, tmp_path):
    """The same requests fail in the run itself, in the same words."""
    transformers.AutoConfig.from_pretrained(home / "llama").save_pretrained(tmp_path / "empty")
    (tmp_path / "short.txt").write_text("".join(map(story, range(4)))[:330])  # 16 characters are held out
    (tmp_path / "two.txt").write_text("ab")
    (tmp_path / "broken.parquet").write_text("PAR1")
    (tmp_path / "file").write_text("mine")
    text = str(home / "train.txt")
    cases = {
        "matches no file": {"data": ("nowhere.txt",)},
        "broken.parquet is not a Parquet file": {"data": (str(tmp_path / "broken.parquet"),)},
        "A split by passages needs": {"data": (str(tmp_path / "two.txt"),)},
        "not one row of": {"data": (str(tmp_path / "short.txt"),)},
        "'held-out'": {"scored": (("held-out", text),)},
        "two.txt matches no file": {"scored": (("more", "two.txt"),)},
        "tokens and not one row": {"scored": (("more", str(tmp_path / "two.txt")),)},
        "--valid-fraction 2 ": {"valid_fraction": 2.0},
        f"--model {tmp_path / 'empty'} ": {"model": str(tmp_path / "empty")},
        "is a file: name another folder": {"out": tmp_path / "file/run"},
        "--context 17 ": {"context": 17},
        "matches no internal norm": {"sites": ("*.ln_9",)},
    }
    for reason, changes in cases.items():
        asked = request(home, **{"out": tmp_path / "run", **changes})
        said = []
        for refused in (shown_by, lambda asked: taper_model(run_of(asked))):
            with pytest.raises(UserError) as raised:
                refused(asked)
            said.append(str(raised.value))
        assert reason.removeprefix("two.txt ") in said[0], reason
        assert said[0] == said[1]
        assert "\n" not in said[0]
        assert not (tmp_path / "run/model.safetensors").exists()


def test_a_model_too_large_for_a_dry_run_is_not_loaded_and_that_is_said(home, monkeypatch):
    monkeypatch.setattr(dry_run, "_LARGEST", 10)
    shown = shown_by(request(home))
    assert "scales not measured: " in shown
    assert "at most 10" in shown


@pytest.mark.parametrize(
    ("parameters", "context", "shape"),
    [(135e6, 1024, (8, 128)), (135e6, 64, (17, 64)), (1e4, 512, (64, 128)), (3e9, 512, (2, 128))],
)
def test_a_sample_costs_about_the_same_for_every_size(parameters, context, shape):
    assert scale_warnings.shape_of_sample(int(parameters), context) == shape


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_file(), reason="SmolLM2 is not there: make smollm2-model")
def test_the_massive_activations_of_a_real_model_are_seen_coming(tmp_path):
    """Its first position is far off from layer 12 on, and a few later tokens in layers 3 to 9."""
    asked = Request(model=str(SMOLLM2), data=("web",), steps=100, out=tmp_path, device="cpu", threads=2)
    seen = sampled(asked)
    marked = {where: {n for n, s in seen.spreads.items() if where in s.misfits} for where in ("first", "tail")}
    norms = ("input_layernorm", "post_attention_layernorm")
    of_layers = {i: {f"model.layers.{i}.{norm}" for norm in norms} for i in range(30)}
    assert marked["tail"] == set().union(*(of_layers[i] for i in range(3, 10)))
    assert marked["first"] >= set().union(*(of_layers[i] for i in range(12, 30)))
    assert not marked["first"] & set().union(*(of_layers[i] for i in (0, 1, 2, 10, 11)))
    *_, option = seen.warnings(list(seen.spreads)[:-1], level_weight=0.0)
    assert option.startswith("  --sites 'model.layers.[012].*' 'model.layers.1[01].*' ")
