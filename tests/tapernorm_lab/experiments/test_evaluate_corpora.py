"""One evaluation of a small tapered GPT-2, gated and folded, against transformers' own loss on the same rows."""

import json
import shutil

import pytest
import torch
from hugging_face import gpt2
from mixed import close_gate
from scored_texts import make_tokenizer, write_corpus

from tapernorm.checkpoints.store import load, save
from tapernorm.folding import fold
from tapernorm.util.atomic_files import sha256_of, write_json
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json, digest
from tapernorm_lab.cli.main import main
from tapernorm_lab.config.jobs import BlocksJob, EvaluateJob
from tapernorm_lab.data.blocks import Blocks, write_blocks
from tapernorm_lab.data.sentencepiece import Tokenizer
from tapernorm_lab.experiments.evaluate_corpora import evaluate_model
from tapernorm_lab.report.frames import gpt2 as gpt2_rows

CONTEXT, VOCABULARY = 11, 300
TEXTS = {
    "stories": [f"Story {i}: the {('cat', 'dog', 'owl', 'fox')[i % 4]} ran.\n\nIt hid in {i} holes." for i in range(9)],
    "code": [f"def f{i}(x):\n\treturn x ** {i}  # naïve — “quoted”\n" for i in range(7)],
}
LABELS = {"stories": "stories, held out", "code": "code"}
COLUMNS = {"stories": "owt", "code": "pile"}
HOW = {"device": "cpu", "threads": 1, "batch": 4}


def job(**changes):
    model = {"kind": "finetuned", "size": "tiny", "method": "all_aux", "seed": 3, "base": "pre-trained here"}
    return EvaluateJob.model_validate({"model": model, "labels": LABELS, "columns": COLUMNS} | changes)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Tokenizer, blocks of two corpora, and a GPT-2 with closed gates, gated and folded, in float32."""
    folder = tmp_path_factory.mktemp("scoring")
    corpora = {name: write_corpus(folder / "corpora" / name, texts) for name, texts in TEXTS.items()}
    tokenizer = make_tokenizer(folder / "tokenizer", corpora["stories"])
    cut = BlocksJob(context=CONTEXT, block_documents=None, max_rows=None)
    for name, corpus in corpora.items():
        write_blocks(cut, corpus, tokenizer, folder / "blocks" / name)
    model = gpt2(vocab_size=VOCABULARY)
    close_gate(model, final=True)
    fused, _ = fold(model, fused=True)
    for form, one in {"gated": model, "fused": fused}.items():
        save(one.float(), folder / form)
    return folder


def forms(made, *names):
    return {name: made / name for name in names or ("gated", "fused")}


def blocks(made):
    return {name: made / "blocks" / name for name in TEXTS}


@pytest.fixture(scope="module")
def result(made):
    return evaluate_model(job(), forms(made), blocks(made), made / "tokenizer", made / "out" / "seed3.json", **HOW)


def test_means_are_transformers_own_loss_over_every_row(made, result):
    model = load(made / "gated")
    for name, folder in blocks(made).items():
        rows = Blocks.open(folder, "valid").rows.long()
        assert len(rows) % HOW["batch"]  # the last batch is a partial one
        with torch.no_grad():
            expected = model(input_ids=rows, labels=rows).loss.item()
        found = result["corpora"][name]
        assert found["forms"]["gated"]["rows"]["mean"] == pytest.approx(expected, abs=1e-6 * expected)
        assert (found["rows"], found["targets"]) == (len(rows), len(rows) * (CONTEXT - 1))


def test_the_folded_model_scores_as_the_gated_one_and_an_unfolded_one_does_not(made, result, tmp_path):
    for entry in result["corpora"].values():
        gated, fused = entry["forms"]["gated"], entry["forms"]["fused"]
        for over in ("rows", "tokens"):
            assert fused[over] == pytest.approx(gated[over], rel=2e-4)  # quantiles of tokens: two buckets
        assert fused["rows"]["mean"] == pytest.approx(gated["rows"]["mean"], rel=1e-5)
        assert [w["row"] for w in fused["worst"]] == [w["row"] for w in gated["worst"]]
    broken = load(made / "fused")
    broken.lm_head.bias.data.zero_()  # beta of the final norm, not folded
    save(broken, tmp_path / "broken")
    both = {"gated": made / "gated", "fused": tmp_path / "broken"}
    wrong = evaluate_model(job(), both, blocks(made), made / "tokenizer", tmp_path / "wrong.json", **HOW)
    means = [f["rows"]["mean"] for f in wrong["corpora"]["code"]["forms"].values()]
    assert means[0] != pytest.approx(means[1], rel=1e-3)


@pytest.mark.parametrize(
    ("beside", "model"),
    [
        ({"kind": "base", "source": "gpt2"}, {"kind": "original", "size": "unknown", "method": "original"}),
        (
            {"kind": "base", "job": {"size": "mini", "seed": 3}},
            {"kind": "original", "size": "mini", "method": "original"},
        ),
        (
            {"kind": "finetune", "job": {"size": "mini", "method": "fakeln", "seed": 3}},
            {"kind": "finetuned", "size": "mini", "method": "fakeln", "seed": 3},
        ),
        (None, {"kind": "finetuned", "size": "unknown", "method": "unknown"}),
    ],
)
def test_by_hand_a_run_says_itself_what_it_is(made, tmp_path, beside, model):
    shutil.copytree(made / "gated", tmp_path / "run")
    if beside:
        write_json(tmp_path / "run" / "result.json", beside)
    folders = ["--model", str(tmp_path / "run"), "--tokenizer", str(made / "tokenizer")]
    scored = ["--blocks", f"code={made}/blocks/code", "--device", "cpu", "--out", str(tmp_path / "scores.json")]
    assert main(["evaluate", *folders, *scored]) == 0
    assert (
        json.loads((tmp_path / "scores.json").read_text())["job"]["model"] == {"seed": None, "base": "unknown"} | model
    )


def test_the_file_is_the_result_and_says_what_was_scored(made, result):
    assert json.loads((made / "out" / "seed3.json").read_text(encoding="utf-8")) == result
    assert (result["kind"], result["schema_version"], result["job"]) == ("evaluate", 1, job().model_dump(mode="json"))
    manifest = json.loads((made / "blocks" / "code" / "manifest.json").read_text(encoding="utf-8"))
    entry = result["corpora"]["code"]
    assert (entry["label"], entry["column"]) == ("code", "pile")
    assert (entry["context"], entry["vocab_size"]) == (CONTEXT, VOCABULARY)
    assert entry["tokenizer_sha256"] == manifest["tokenizer_sha256"]
    assert entry["blocks_sha256"] == manifest["splits"]["valid"]["sha256"]
    assert result["parameters"] == sum(p.numel() for p in load(made / "gated").parameters())
    source = result["provenance"]
    assert source["config_hash"] == digest(canonical_json(job()))
    assert source["weights_sha256"] == {f: sha256_of(made / f / "model.safetensors") for f in ("gated", "fused")}


def test_the_worst_rows_come_with_their_whole_text(made, result):
    coder = Tokenizer(made / "tokenizer")
    rows = Blocks.open(made / "blocks" / "code", "valid").rows
    worst = result["corpora"]["code"]["forms"]["gated"]["worst"]
    assert len(worst) == min(10, len(rows))
    assert worst[0]["ce"] == pytest.approx(result["corpora"]["code"]["forms"]["gated"]["rows"]["max"])
    assert [w["ce"] for w in worst] == sorted((w["ce"] for w in worst), reverse=True)
    for entry in worst:
        assert entry["text"] == coder.decode(rows[entry["row"]].tolist())
    assert any("\n\t" in entry["text"] for entry in worst)  # as it is: made printable in reports alone


def test_bytes_are_those_of_the_targets_text(made, result):
    coder = Tokenizer(made / "tokenizer")
    for name, slack in {"stories": 0, "code": 6}.items():  # a row may cut a character at either end; stories is ASCII
        rows = Blocks.open(made / "blocks" / name, "valid").rows
        text = coder.decode(rows.flatten().tolist())
        first = sum(len(coder.decode([token]).encode()) for token in rows[:, 0].tolist())
        assert text.startswith(TEXTS[name][0])
        assert abs(result["corpora"][name]["bytes"] - (len(text.encode()) - first)) <= slack * len(rows)
    assert result["corpora"]["code"]["bytes"] > len(text) - first  # bytes, not characters


@pytest.mark.parametrize("batch", [1, 100])
def test_no_number_depends_on_the_batch_but_for_rounding(made, result, batch, tmp_path):
    again = evaluate_model(
        job(), forms(made, "gated"), blocks(made), made / "tokenizer", tmp_path / "a.json", **(HOW | {"batch": batch})
    )
    for name, entry in again["corpora"].items():
        assert list(entry["forms"]) == ["gated"]
        for over in ("rows", "tokens"):
            expected = result["corpora"][name]["forms"]["gated"][over]
            assert entry["forms"]["gated"][over] == pytest.approx(expected, rel=2e-4)


def test_the_report_reads_what_is_written(made, result, tmp_path):
    original = job(model={"kind": "original", "size": "tiny", "method": "original", "seed": None, "base": "gpt2"})
    path = tmp_path / "seed0.json"
    evaluate_model(original, forms(made, "gated"), blocks(made), made / "tokenizer", path, **HOW)
    scores = gpt2_rows.collect([path], [], run="demo").scores
    assert scores["rows_mean"].tolist() == [
        result["corpora"][name]["forms"]["gated"]["rows"]["mean"] for name in ("stories", "code")
    ]


def test_weights_that_were_saved_narrow_are_scored_in_float32(made, result, tmp_path):
    from safetensors.torch import load_file, save_file

    state = load_file(made / "gated" / "model.safetensors")
    (tmp_path / "narrow").mkdir()
    save_file({k: v.bfloat16() for k, v in state.items()}, tmp_path / "narrow" / "model.safetensors")
    (tmp_path / "narrow" / "config.json").write_bytes((made / "gated" / "config.json").read_bytes())
    widened = load(tmp_path / "narrow").float()
    rows = Blocks.open(made / "blocks" / "code", "valid").rows.long()
    with torch.no_grad():
        expected = widened(input_ids=rows, labels=rows).loss.item()
    narrow = {"gated": tmp_path / "narrow"}
    found = evaluate_model(job(), narrow, blocks(made), made / "tokenizer", tmp_path / "n.json", **HOW)
    mean = found["corpora"]["code"]["forms"]["gated"]["rows"]["mean"]
    assert mean == pytest.approx(expected, rel=1e-6)
    assert mean != pytest.approx(result["corpora"]["code"]["forms"]["gated"]["rows"]["mean"], rel=1e-6)


def test_what_does_not_fit_is_refused_and_nothing_is_written(made, tmp_path):
    out = tmp_path / "out.json"

    def refused(match, *, of=None, forms_=None, corpora=None, tokenizer=None):
        with pytest.raises(UserError, match=match):
            evaluate_model(
                of or job(),
                forms_ or forms(made),
                corpora or blocks(made),
                tokenizer or made / "tokenizer",
                out,
                **HOW,
            )
        assert not out.exists()

    refused("give the same names", corpora={"stories": made / "blocks" / "stories"})
    refused("give the same names", of=job(columns={"stories": "owt"}))
    refused("the forms gated and", forms_={"fused": made / "fused"})
    refused("the forms gated and", forms_=forms(made) | {"unfused": made / "gated"})
    other = make_tokenizer(tmp_path / "tokenizer", made / "corpora" / "code", vocab_size=290)
    refused("was not cut with the tokenizer", tokenizer=other)
    save(gpt2(vocab_size=VOCABULARY - 1).float(), tmp_path / "smaller")
    refused("vocabulary of 300, but the model one of 299", forms_={"gated": tmp_path / "smaller"})
    save(gpt2(vocab_size=VOCABULARY, n_positions=CONTEXT - 1).float(), tmp_path / "shorter")
    refused("takes 10 tokens and .* holds rows of 11", forms_={"gated": tmp_path / "shorter"})
    refused("no file|holds no", forms_={"gated": tmp_path / "nowhere"})


def test_scoring_moves_no_global_state(made, tmp_path):
    before = torch.get_rng_state()
    evaluate_model(job(), forms(made, "gated"), blocks(made), made / "tokenizer", tmp_path / "a.json", **HOW)
    assert torch.equal(torch.get_rng_state(), before)
