"""Models on odd rows against a decoder in NumPy; a poisoned one without norms is seen to blow up, its Baseline not."""

import json
import math

import builders
import numpy as np
import pytest
import reference
import torch
from builders import array
from odd_models import CONTEXT, LENGTHS, VOCABULARY, job, make
from places import ROOT

from tapernorm.checkpoints.store import load, save
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json, digest
from tapernorm_lab.cli.main import main
from tapernorm_lab.data.sentencepiece import Tokenizer
from tapernorm_lab.data.token_stream import TokenStream
from tapernorm_lab.experiments.odd_inputs.rows import odd_inputs
from tapernorm_lab.experiments.odd_inputs.scores import (
    beside_baseline,
    blown,
    part_scores,
    position_losses,
    score_models,
    tail,
)
from tapernorm_lab.training.validation_loss import evaluate

CPU = torch.device("cpu")
GUESS = math.log(VOCABULARY)

TEST = ROOT / "config/test.yaml"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("odd"))


def score(made, out, *, models=("baseline", "all"), this=None, texts=("code",)):
    """Scores of these models' folders, the first as baseline and the other as all."""
    folders = {name: made / folder for name, folder in zip(("baseline", "all"), models, strict=False)}
    places = (made / "tokens", made / "tokenizer", {text: made / text for text in texts}, out)
    return score_models(this or job(), folders, *places, device="cpu", threads=1, batch=5)


@pytest.fixture(scope="module")
def result(made):
    return score(made, made / "scores.json")


@pytest.fixture(scope="module")
def poisoned(made):
    return score(made, made / "poisoned.json", models=("baseline_poisoned", "all_poisoned"))


def rows_of(made):
    return odd_inputs(job(), Tokenizer(made / "tokenizer"), made / "tokens", {"code": made / "code"})


def found(result, model, trial, part):
    (entry,) = [s for s in result["scores"] if (s["model"], s["trial"], s["part"]) == (model, trial, part)]
    return entry


def numpy_losses(folder, rows):
    """(n, T) losses by the float64 decoder of NumPy, without norms where the model has none."""
    model = load(folder)
    config = model.config
    state = {name: array(value) for name, value in model.state_dict().items()}
    norms = {name: module for name, module in model.named_modules() if name.endswith("norm")}
    cos, sin = reference.rotary_tables(rows.shape[1] - 1, config.head_dim, config.rope_theta)

    def norm(name, h):
        return h if isinstance(norms[name], torch.nn.Identity) else builders.reference_norm(norms[name], h)

    heads = {"n_layer": config.n_layer, "n_head": config.n_head, "n_kv_head": config.n_kv_head}
    logits = [reference.decoder(row[:-1], state, norm, **heads, cos=cos, sin=sin) for row in rows]
    return np.stack([reference.cross_entropies(z, row[1:]) for z, row in zip(logits, rows, strict=True)])


def statistics(values):
    quantiles = {"median": np.median(values), "p99_9": np.quantile(values, 0.999)}
    return {"mean": np.mean(values), **quantiles, "max": np.max(values), "nonfinite": 0}


@pytest.mark.parametrize("model", ["baseline", "all"])
def test_every_statistic_is_that_of_a_decoder_in_numpy(made, result, model):
    for odd in rows_of(made):
        losses, baseline = (numpy_losses(made / name, odd.rows.numpy()) for name in (model, "baseline"))
        for part in odd.parts:
            entry = found(result, model, odd.name, part.name)
            here, theirs = (values[:, part.first : part.last] for values in (losses, baseline))
            rows, theirs = here.mean(axis=1), theirs.mean(axis=1)
            for over, values in {"rows": rows, "tokens": here.ravel()}.items():
                assert entry[over] == pytest.approx(statistics(values), rel=2e-5), (odd.name, part.name, over)
            assert entry["worst"][0]["row"] == rows.argmax()
            beside = entry["beside_baseline"]
            assert (beside is None) == (model == "baseline")
            if beside is not None:
                assert beside["excess_max"] == pytest.approx((rows - theirs).max(), abs=1e-3)
                assert beside["excess_row"] == (rows - theirs).argmax()
                assert beside["blown"] == ((rows > 2 * theirs) & (rows > GUESS)).sum()


def test_losses_by_position_are_means_over_bins(made, result):
    rows = rows_of(made)[-1].rows.numpy()
    for model in ("baseline", "all"):
        by_position = numpy_losses(made / model, rows).mean(axis=0)
        expected = by_position.reshape(-1, 4).mean(axis=1)
        assert len(expected) == LENGTHS[-1] // 4
        np.testing.assert_allclose(result["positions"][model], expected, rtol=2e-5)


def test_held_out_text_has_the_loss_that_a_run_is_scored_by(made, result):
    stream = TokenStream.open(made / "tokens", "valid")
    whole = (len(stream.tokens) - 1) // CONTEXT
    how = {"text_bytes": 1, "context": CONTEXT, "batch": 3, "device": CPU}
    loss = evaluate(load(made / "all"), stream.tokens[: whole * CONTEXT + 1], **how).ce
    assert result["trials"]["held_out"]["rows"] == whole
    assert found(result, "all", "held_out", "all")["rows"]["mean"] == pytest.approx(loss, rel=1e-6)


def test_losses_do_not_depend_on_the_batch_and_the_model_is_as_before(made):
    model = load(made / "all")
    model.train()
    before = builders.snapshot(model.state_dict())
    rows = rows_of(made)[0].rows[:11]
    one, many = (position_losses(model, rows, batch=batch, device=CPU) for batch in (1, 4))
    torch.testing.assert_close(one, many, rtol=1e-5, atol=1e-5)
    assert builders.snapshot(model.state_dict()) == before
    assert all(module.training for module in model.modules())


def test_a_poisoned_model_without_norms_blows_up_on_the_rows_with_the_poison_and_its_baseline_does_not(poisoned):
    rows = poisoned["trials"]["held_out"]["rows"]
    inside = found(poisoned, "all", "never_seen", "repeats")
    assert inside["beside_baseline"]["blown"] == rows
    assert inside["rows"]["mean"] > 30 * found(poisoned, "baseline", "never_seen", "repeats")["rows"]["mean"]
    assert found(poisoned, "all", "never_seen", "after")["beside_baseline"]["blown"] > 0.9 * rows
    for part, trial in (("all", "held_out"), ("after", "rare"), ("to_28", "longer")):  # without such a token
        entry = found(poisoned, "all", trial, part)
        assert entry["rows"]["max"] < 0.1 * inside["rows"]["median"]
    assert inside["beside_baseline"]["baseline_blown"] == 0


def test_the_same_rows_without_the_poison_do_not_blow_up(result, poisoned):
    """The control of the test above: it is the embeddings, not the rows."""
    clean, sick = (found(r, "all", "never_seen", "repeats")["rows"]["max"] for r in (result, poisoned))
    assert clean < 0.05 * sick
    assert found(result, "all", "held_out", "all") == found(poisoned, "all", "held_out", "all")


def test_losses_that_are_not_finite_are_counted_and_the_file_holds_none(made, tmp_path):
    broken = load(made / "all_poisoned")
    with torch.no_grad():
        weight = broken.get_parameter("model.embed_tokens.weight")
        weight[weight.abs().amax(dim=1) > 100] *= 1e30
    save(broken, made / "broken")
    out = tmp_path / "scores.json"
    score(made, out, models=("baseline_poisoned", "broken"))
    written = json.loads(out.read_text())
    entry = found(written, "all", "never_seen", "repeats")
    rows = written["trials"]["never_seen"]["rows"]
    assert entry["rows"]["nonfinite"] == entry["beside_baseline"]["blown"] == rows
    assert (entry["rows"]["mean"], entry["rows"]["max"], entry["beside_baseline"]["excess_max"]) == (None, None, None)
    assert entry["tokens"]["nonfinite"] >= rows
    assert entry["worst"][0] == {"row": 0, "ce": None, "text": entry["worst"][0]["text"]}
    assert found(written, "all", "held_out", "all")["rows"]["nonfinite"] == 0


@pytest.mark.parametrize("count", [1, 2, 3, 40, 1003])
def test_tails_are_numpys(count):
    values = builders.normal(count, seed=count).exp()
    assert tail(values) == pytest.approx(statistics(values.numpy()), rel=1e-12)


def test_rows_that_are_not_finite_lead_the_worst(made):
    odd = rows_of(made)[0]
    losses = torch.ones(len(odd.rows), CONTEXT, dtype=torch.float64)
    losses[4, 2], losses[7, 0], losses[2, 5] = math.inf, math.nan, 50.0
    entry = part_scores(losses, None, odd, odd.parts[0], Tokenizer(made / "tokenizer"))
    assert {worst["row"] for worst in entry["worst"][:2]} == {4, 7}
    assert (entry["worst"][2]["row"], entry["worst"][0]["ce"], entry["rows"]["nonfinite"]) == (2, None, 2)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_value_that_is_not_finite_counts_as_worse_than_any_number(bad):
    found = tail(torch.tensor([3.0, bad, 1.0, 2.0, bad], dtype=torch.float64))
    assert found == {"mean": None, "median": 3.0, "p99_9": None, "max": None, "nonfinite": 2}


def test_a_row_blows_up_above_twice_the_baseline_and_a_guess():
    guess = 5.0
    baseline = torch.tensor([2.0, 2.0, 4.0, 4.0, 9.0, 9.0, 1.0, math.nan, math.nan], dtype=torch.float64)
    rows = torch.tensor([4.9, 5.1, 7.9, 8.1, 17.9, 18.1, math.inf, 3.0, math.inf], dtype=torch.float64)
    assert blown(rows, baseline, guess=guess) == 4  # 5.1, 8.1, 18.1, inf
    assert blown(baseline, rows, guess=guess) == 1  # the one that the Baseline alone lost, not that which both did
    assert blown(rows, baseline, guess=0.0) == 5  # without the guess, 4.9 as well
    beside = beside_baseline(rows, baseline, guess=guess)
    assert (beside["excess_max"], beside["excess_row"], beside["blown"], beside["baseline_blown"]) == (None, 6, 4, 1)
    finite = beside_baseline(rows[:6], baseline[:6], guess=guess)
    assert finite["excess_max"] == pytest.approx(9.1)
    lost = beside_baseline(rows[[0, 7]], baseline[[0, 7]], guess=guess)  # the second, by the Baseline alone
    assert (lost["excess_max"], lost["excess_row"]) == (pytest.approx(2.9), 0)
    assert finite["excess_p99_9"] == pytest.approx(np.quantile((rows - baseline)[:6], 0.999))


def test_the_result_says_what_was_scored(made, result):
    assert json.loads((made / "scores.json").read_text()) == result
    assert (result["kind"], result["vocab_size"], list(result["models"])) == (
        "robustness",
        VOCABULARY,
        ["baseline", "all"],
    )
    assert result["provenance"]["config_hash"] == digest(canonical_json(job()))
    assert result["models"]["all"]["label"] == "All-Taper"
    entry = found(result, "all", "rare", "after")
    row = rows_of(made)[2].rows[entry["worst"][0]["row"]]
    assert entry["worst"][0]["text"] == Tokenizer(made / "tokenizer").decode(row[4 + 5 :].tolist())
    losses = [worst["ce"] for worst in entry["worst"]]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"models": ("baseline",)}, "names the models baseline, all, but baseline were given: give the same"),
        ({"texts": ()}, "names the texts code, but none were given: give the same"),
        ({"this": job(d_model=24)}, "has d_model 12 and context 16, but the job has 24 and 16"),
        ({"models": ("nowhere", "all")}, r"holds no config\.json: give the folder of a finished run"),
    ],
)
def test_what_does_not_belong_together_is_refused(made, tmp_path, given, said):
    with pytest.raises(UserError, match=said):
        score(made, tmp_path / "scores.json", **given)
    assert not (tmp_path / "scores.json").exists()


def test_a_run_that_diverged_has_no_score_and_is_named_and_a_diverged_baseline_is_refused(made, result, tmp_path):
    (tmp_path / "diverged").mkdir()
    (tmp_path / "diverged/result.json").write_text(json.dumps({"diverged": {"step": 3, "what": "loss"}}))
    alone = score(made, tmp_path / "scores.json", models=("baseline", tmp_path / "diverged"))
    assert alone["diverged"] == ["all"]
    assert list(alone["models"]) == ["baseline"]
    assert alone["scores"] == [row for row in result["scores"] if row["model"] == "baseline"]
    with pytest.raises(UserError, match="diverged, so nothing can be compared with it"):
        score(made, tmp_path / "none.json", models=(tmp_path / "diverged", "all"))


# --- The command line ---


def evaluation(made, *words, models=("baseline", "all")):
    """The words of the verb that scores."""
    folders = ["--models", *(f"{name}={made / name}" for name in models)]
    return ["evaluate", *folders, "--tokens", f"{made}/tokens", "--tokenizer", f"{made}/tokenizer", *words]


def about(**changes):
    """What a table says of the scores above."""
    models = {"baseline": "Baseline", "all": "All-Taper"}
    job = {"run": "mine", "caption": "Small.", "stage": "S2", "cells": [[12, 3]], "models": models}
    return ["--job", json.dumps(job | changes)]


def report(name, told, results, out):
    """The status of the command that makes a table or a figure."""
    return main([name.partition("_")[0], name, *told, "--results", str(results), "--out", str(out)])


def files_in(folder):
    return {path.name for path in folder.glob("[!.]*")}


def test_the_verb_scores_and_the_next_one_makes_rows_tables_and_figure(made, tmp_path, capsys):
    scores, told = str(tmp_path / "seed3.json"), about(stage=None)
    words = ["--job", canonical_json(job()), "--texts", f"code={made / 'code'}", "--out", scores]
    assert main(evaluation(made, *words)) == 0
    assert "all, never_seen, repeats: mean" in capsys.readouterr().out
    assert main(["rows", "study_S3", scores, *told, "--out", str(tmp_path / "tables")]) == 0
    for name in ("table_S3", "table_S3x", "figure_S3"):
        assert report(name, told, tmp_path, tmp_path / "made") == 0
    tables = {f"table_S3{x}.{kind}" for x in ("", "x") for kind in ("csv", "md", "tex", "html")}
    figures = {f"figure_S3.{kind}" for kind in ("pdf", "png", "csv", "md", "tex", "html")}
    assert files_in(tmp_path / "made") == tables | figures


def test_scores_make_the_table_of_a_stages_arms_and_only_of_its_arms_and_seeds(made, result, tmp_path, capsys):
    assert main(["rows", "study_S3_S2", str(made / "scores.json"), *about(), "--out", str(tmp_path / "tables")]) == 0
    assert report("table_S3_S2", about(), tmp_path, tmp_path / "made") == 0
    assert files_in(tmp_path / "made") == {f"table_S3_S2.{kind}" for kind in ("csv", "md", "tex", "html")}
    for name, changes, complaint in (
        ("figure_S3", {}, "stage S2"),
        (
            "table_S3_S2",
            {"cells": [[12, 3], [12, 4]]},
            "S3_S2 and the config differ in widths and seeds (d 12 seed 4): run",
        ),
        ("table_S3_S2", {"cells": [[24, 3]]}, "widths and seeds (d 12 seed 3, d 24 seed 3)"),
        ("table_S3_S2", {"models": {"baseline": "Baseline"}}, "S3_S2 are of all, which the config lacks"),
    ):
        assert report(name, about(**changes), tmp_path, tmp_path / "other") == 2
        assert complaint in capsys.readouterr().err


def test_a_config_names_the_arms_and_the_seeds_that_a_stages_scores_must_be_of(made, result, tmp_path, capsys):
    config = ["--config", str(TEST)]
    scored = evaluation(made, *config, "--stage", "S1", "--out", str(tmp_path / "scores.json"), models=("baseline",))
    rows = ["rows", "study_S3_S1", str(made / "scores.json"), "--out", str(tmp_path)]
    for words, complaint in (
        ([*scored, "--seed", "1"], "names the models baseline, internal_25_100, internal_50_75, diverging"),
        (scored, "--config needs --seed"),
        ([*scored, "--width", "24", "--seed", "1"], "takes no --width"),
        ([*rows, *config], "table S3_S1 and the config differ in widths and seeds"),
        ([*rows, *about()], "study_S3_S2"),
    ):
        assert main(words) == 2
        assert complaint in capsys.readouterr().err
