"""lm-evaluation-harness on a folded model: its scores are those of the model's own logits, in float64."""

import copy
import json
import sys

import datasets
import lm_eval
import numpy as np
import pytest
import torch
import yaml
from builders import decoder, snapshot
from lm_eval.tasks import TaskManager
from offline import offline
from own_models import EOS, story, tokenizer
from tiny_models import gated
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tapernorm import interop
from tapernorm.architectures import architecture_of, has_tied_head, logits_of
from tapernorm.folding import fold
from tapernorm.util.errors import UserError

CONTEXT = 24
QUESTIONS = [{"before": story(i, 5), "ends": [" the cat", " a dog who ran", " sea"], "right": i % 3} for i in range(5)]
TEXTS = [story(20, 6), story(21, 55)]  # within one window of the context, and over several
TASKS = {
    "ends": {
        "output_type": "multiple_choice",
        "doc_to_text": "before",
        "doc_to_choice": "{{ends}}",
        "doc_to_target": "right",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "goes_on": {
        "output_type": "generate_until",
        "doc_to_text": "before",
        "doc_to_target": "right",
        "generation_kwargs": {"until": ["zzz"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """The tasks above out of local files; whoever reaches for the network fails."""
    rows = {"ends": QUESTIONS, "texts": [{"text": text} for text in TEXTS], "goes_on": QUESTIONS}
    for name, settings in TASKS.items():
        data = tmp_path / f"{name}.jsonl"
        data.write_text("\n".join(map(json.dumps, rows[name])), encoding="utf-8")
        source = {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": source, "test_split": "test", **settings}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)  # it would tell that local files are read
    with offline():
        yield TaskManager(include_path=str(tmp_path), include_defaults=False)


def folded(name: str = "llama, biased and tied", **options) -> nn.Module:
    """A model without norms, in float64."""
    sizes = {"n_positions": CONTEXT} if name == "gpt2" else {"max_position_embeddings": CONTEXT}
    model = gated(name, vocab_size=len(tokenizer(bos=True)), **sizes, options={"final": True, **options})[1]
    made = fold(model)[0].eval()
    made.get_submodule(architecture_of(made).head).weight.data.mul_(0.1)  # so that no choice is certain
    return made


def samples(model: nn.Module, tasks: TaskManager, name: str, coder, **options) -> list:
    """What the harness asked of the model in task `name`, in the order of its rows, and the answers."""
    language_model = interop.lm_eval(model, coder, **options)
    result = lm_eval.simple_evaluate(language_model, tasks=[name], task_manager=tasks, bootstrap_iters=0)
    found = sorted(result["samples"][name], key=lambda sample: sample["doc_id"])
    return [result["results"][name], *[sample["resps"] for sample in found]]


def log_probabilities(model: nn.Module, ids: list[int]) -> np.ndarray:
    """Of each id but the first, after those before it."""
    with torch.no_grad():
        logits = logits_of(model, torch.tensor([ids]))[0, :-1].double().numpy()
    top = logits.max(-1, keepdims=True)
    logs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return logs[np.arange(len(ids) - 1), ids[1:]]


def renormalising(model: nn.Module) -> nn.Module:
    """A norm of gain 1 again in every place that lost one."""
    wrong = copy.deepcopy(model)
    for site in architecture_of(wrong).norms(wrong):
        wrong.set_submodule(site, LlamaRMSNorm(model.config.hidden_size).double())
    return wrong


def largest_gap(got: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("bos", [False, True])
def test_choices_are_scored_by_the_models_own_log_probabilities(bos, tasks):
    coder, model = tokenizer(bos=bos), folded()
    wanted, right = [], 0
    for question in QUESTIONS:
        before = coder(question["before"])["input_ids"]
        sums = []
        for end in question["ends"]:
            ids = coder(question["before"] + end)["input_ids"]
            sums.append(log_probabilities(model, ids)[len(before) - 1 :].sum())
        wanted += sums
        right += int(np.argmax(sums)) == question["right"]
    score, *rows = samples(model, tasks, "ends", coder, batch_size=4)
    got = [answer[0][0] for row in rows for answer in row]
    assert largest_gap(got, wanted) < 1e-5  # log-probabilities are float32's
    assert score["acc,none"] == pytest.approx(right / len(QUESTIONS))
    _, *others = samples(renormalising(model), tasks, "ends", coder)
    assert largest_gap([answer[0][0] for row in others for answer in row], wanted) > 1e-3


def test_rolling_windows_are_scored_by_the_models_own_log_probabilities(tasks):
    coder, model = tokenizer(bos=False), folded()
    wanted = []
    for text in TEXTS:
        ids = coder(text)["input_ids"]
        marked, total, done = [coder.eos_token_id, *ids], 0.0, 0
        while done < len(ids):  # each window ends CONTEXT ids on, and sees as much of what is before as fits
            end = min(done + CONTEXT, len(ids))
            seen = marked[max(0, end - CONTEXT) : end + 1]
            total += log_probabilities(model, seen)[done - end :].sum()
            done = end
        wanted.append(total)
    assert len(coder(TEXTS[1])["input_ids"]) > 2 * CONTEXT
    score, *rows = samples(model, tasks, "texts", coder, batch_size=3)
    assert largest_gap([row[0][0] for row in rows], wanted) < 1e-5
    size = sum(len(text.encode()) for text in TEXTS)
    assert score["bits_per_byte,none"] == pytest.approx(-sum(wanted) / size / np.log(2), rel=1e-5)
    _, *others = samples(renormalising(model), tasks, "texts", coder)
    assert largest_gap([row[0][0] for row in others], wanted) > 1e-3


def test_text_is_generated_greedily_from_the_models_own_logits(tasks):
    coder, model = tokenizer(bos=True), folded("gpt2")
    _, *rows = samples(model, tasks, "goes_on", coder, batch_size=2)
    for question, row in zip(QUESTIONS, rows, strict=True):
        ids = coder(question["before"])["input_ids"]
        start = len(ids)
        while len(ids) < start + 6 and ids[-1] != coder.eos_token_id:
            ids.append(int(logits_of(model, torch.tensor([ids]))[0, -1].argmax()))
        assert row[0][0] == coder.decode(ids[start:], skip_special_tokens=True).split(EOS)[0]


def test_model_and_tokenizer_stay_as_they_were(tasks):
    coder, model = tokenizer(bos=True), folded("llama")
    before = snapshot(model.state_dict())
    made = interop.lm_eval(model, coder)
    assert made.model is model
    assert not has_tied_head(model)
    assert snapshot(model.state_dict()) == before
    assert coder.pad_token is None
    assert made.tokenizer.pad_token is not None
    assert (made.max_length, made.batch_size, made.softmax_dtype) == (CONTEXT, 8, torch.float32)


def test_length_and_first_mark_are_those_that_are_asked_for():
    coder, model = tokenizer(bos=True), folded("llama")
    asked = interop.lm_eval(model, coder, max_length=9, add_bos_token=False)
    assert asked.max_length == 9
    assert [coder.bos_token_id, *asked.tok_encode("the cat")] == interop.lm_eval(model, coder).tok_encode("the cat")


def test_where_no_mark_ends_a_text_the_one_that_begins_it_does():
    made = interop.lm_eval(folded("llama"), tokenizer(bos=True, eos=False))
    assert made.eot_token_id == made.prefix_token_id == made.tokenizer.bos_token_id
    with pytest.raises(UserError, match="eos_token"):
        interop.lm_eval(folded("llama"), tokenizer(bos=False, eos=False))


def test_what_the_harness_has_no_place_for_is_refused():
    with pytest.raises(UserError, match=r"model .*Decoder: `tapernorm evaluate`"):
        interop.lm_eval(decoder(), tokenizer(bos=True))
    with pytest.raises(UserError, match=r"tokenizer .*str: "):
        interop.lm_eval(folded("llama"), "some/where")


def test_without_the_harness_its_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval" or name.endswith("interop._harness")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"lm_eval is not installed: pip install '\.\[lm_eval\]'"):
        interop.lm_eval(folded("llama"), tokenizer(bos=True))
