"""What arms of a study change: each treatment trains, survives a kill and folds; and what it leaves alone."""

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from builders import array, attached, attached_as, close, decoder, normal, snapshot, tokens
from crashing import at_step, kill
from training import HARDWARE, START, STEPS, make_job, metrics_of, outcome_of, write_stream

from tapernorm.checkpoints.store import load
from tapernorm.folding import fold
from tapernorm.models.decoder import Decoder
from tapernorm.norms import Form, TaperNorm
from tapernorm.scale_loss import fixed_target_loss, relative_target_loss
from tapernorm.taper import Taper
from tapernorm.util.errors import UserError
from tapernorm.util.hashing import canonical_json
from tapernorm.util.rng import generator
from tapernorm_lab.config.study import ArmJob, Treatment
from tapernorm_lab.config.variants import Variant
from tapernorm_lab.experiments.fold_run import fold_run
from tapernorm_lab.experiments.pretrain import pretrain
from tapernorm_lab.experiments.study_arm import run_arm
from tapernorm_lab.experiments.taper_start_jump import ScoredTaper
from tapernorm_lab.experiments.treatments import attach_arm, prepare
from tapernorm_lab.models.c_per_feature import FeaturewiseNorm, make_featurewise
from tapernorm_lab.models.dyt_derf import DynamicErf, DynamicTanh, ScaledEmbedding
from tapernorm_lab.models.logit_temperature import Tempered
from tapernorm_lab.training.validation_loss import Evaluation, evaluate_blocks

REPLACED = {"alpha_init": 0.5, "attention_alpha_init": 0.8, "embedding_scale": True}
TREATMENTS: dict[str, tuple[str, dict[str, Any] | None]] = {  # name -> variant, treatment
    "none": ("all_aux", None),
    "dyt": ("baseline", {"norm": {"kind": "dyt", **REPLACED}}),
    "derf": ("baseline", {"norm": {"kind": "derf", **REPLACED}}),
    "start": ("baseline", {"embedding_scale": True, "final_gain_init": 8.0}),
    "temperature": ("baseline", {"temperature": True}),
    "final": ("final_aux", None),
    "relative": ("all_relative", None),
    "vector": ("all_aux", {"calibration": "vector"}),
    "anchored": ("baseline_aux", None),
    "several": ("internal_relative", {"temperature": True, "calibration": "vector"}),
}
TAPERED = tuple(name for name, (variant, _) in TREATMENTS.items() if Variant.named(variant).tapers)
every_treatment = pytest.mark.parametrize("name", TREATMENTS)
every_taper = pytest.mark.parametrize("name", TAPERED)
LATE = 8  # a step after START and after a checkpoint


def arm_of(name: str, **changes: Any) -> ArmJob:
    variant, treatment = TREATMENTS[name]
    return ArmJob.model_validate({"pretrain": make_job(variant, **changes).model_dump(), "treatment": treatment})


def built(name: str, validate=None) -> tuple[Decoder, Taper | None]:
    job = arm_of(name)
    model = Decoder(job.pretrain.model).initialize(generator(3, "init"))
    prepare(model, job.treatment)
    return model, attach_arm(model, job, validate or (lambda: Evaluation(1.0, 1, None)))


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stream(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="module")
def trained(streams: Path, tmp_path_factory: pytest.TempPathFactory):
    """name -> folder of its run, trained once."""
    known: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in known:
            known[name] = tmp_path_factory.mktemp(name)
            run_arm(arm_of(name), streams, known[name], HARDWARE)
        return known[name]

    return run


# --- what is changed ---


def test_without_a_treatment_nothing_changes() -> None:
    job = arm_of("none")
    model = Decoder(job.pretrain.model).initialize(generator(3, "init"))
    before = snapshot(model.state_dict())
    kinds = [type(module) for module in model.modules()]
    prepare(model, None)
    assert snapshot(model.state_dict()) == before
    assert [type(module) for module in model.modules()] == kinds


@every_treatment
def test_arms_of_a_seed_start_from_the_same_matrices(name: str) -> None:
    model, _ = built(name)
    plain = Decoder(arm_of(name).pretrain.model).initialize(generator(3, "init"))
    found = {n: p for n, p in model.named_parameters() if p.ndim == 2}
    assert all(torch.equal(found[n], p) for n, p in plain.named_parameters() if p.ndim == 2)


def test_each_treatment_changes_what_it_says() -> None:
    kinds = {name: {type(module) for module in built(name)[0].modules()} for name in TREATMENTS}
    assert DynamicTanh in kinds["dyt"]
    assert DynamicErf in kinds["derf"]
    assert ScaledEmbedding in kinds["dyt"] & kinds["derf"] & kinds["start"]
    assert ScaledEmbedding not in kinds["temperature"]
    started, _ = built("start")
    assert started.model.norm.weight.tolist() == [8.0] * started.config.d_model
    assert started.model.layers[0].input_layernorm.weight.tolist() == [1.0] * started.config.d_model
    assert any(issubclass(kind, Tempered) for kind in kinds["temperature"] & kinds["several"])
    _, taper = built("final")
    assert taper is not None
    assert taper.swapped == ("model.norm",)
    assert len(taper.kept) == 4
    vector, _ = built("vector")
    assert sum(isinstance(m, FeaturewiseNorm) for m in vector.modules()) == 5
    for name in TAPERED:
        driver = built(name)[1]
        assert driver is not None
        relative = name in ("relative", "several")
        assert driver.scale_loss is (relative_target_loss if relative else fixed_target_loss)
    alone = built("anchored")[1]
    assert alone is not None
    assert not isinstance(alone, ScoredTaper)
    assert (alone.swapped, len(alone.kept)) == ((), 5)
    assert all(built(name)[1] is None for name in TREATMENTS if name not in (*TAPERED, "anchored"))


def test_an_unscaled_embedding_stays_plain() -> None:
    _, treatment = TREATMENTS["dyt"]
    assert treatment is not None
    model = decoder()
    prepare(model, Treatment.model_validate({"norm": {**treatment["norm"], "embedding_scale": False}}))
    assert not isinstance(model.model.embed_tokens, ScaledEmbedding)


def test_the_scale_of_the_embedding_starts_where_it_is_told_to() -> None:
    model = decoder()
    prepare(model, Treatment.model_validate({"norm": {"kind": "derf", **REPLACED, "embedding_scale_init": 40.0}}))
    assert isinstance(model.model.embed_tokens, ScaledEmbedding)
    assert model.model.embed_tokens.scale.item() == 40.0
    with pytest.raises(ValueError, match="embedding_scale is false"):
        Treatment.model_validate(
            {"norm": {"kind": "dyt", **REPLACED, "embedding_scale": False, "embedding_scale_init": 4.0}}
        )


def test_a_temperature_and_a_replaced_norm_do_not_go_together() -> None:
    with pytest.raises(UserError, match="this one is a DynamicTanh"):
        prepare(decoder(), Treatment.model_validate({**(TREATMENTS["dyt"][1] or {}), "temperature": True}))


# --- the relative anchor ---


def test_the_relative_anchor_is_the_squared_relative_distance_and_pulls_alike_at_every_size() -> None:
    scale, target = normal(3, 5, 1).abs() + 0.1, torch.tensor(0.3, dtype=torch.float64)
    s, t = array(scale), 0.3
    assert close(relative_target_loss(scale, target), np.mean(((s - t) / t) ** 2))
    assert not close(relative_target_loss(scale, target), np.mean(((s - t) / s) ** 2), 1e-3)
    assert close(relative_target_loss(7 * scale, 7 * target), relative_target_loss(scale, target))
    assert not close(fixed_target_loss(7 * scale, 7 * target), fixed_target_loss(scale, target), 1e-2)


def test_the_taper_weights_it_and_its_gradient_is_that_of_the_formula() -> None:
    model, taper = attached(anchor_weight=0.4, final=True)
    with taper.observe(), torch.no_grad():
        model(tokens())
        taper.anchor_loss()
    taper.calibrate()
    taper.scale_loss = relative_target_loss
    model(tokens(seed=6))
    h = taper._probe.hidden
    assert h is not None
    (gradient,) = torch.autograd.grad(taper.anchor_loss(), h)
    target = taper.scale_target.item()
    expected = reference.anchor_gradient(array(h), target, 0.4 / target**2, 1e-5, layer_norm=False)
    assert close(gradient, expected, 1e-9)
    absolute = reference.anchor_gradient(array(h), target, 0.4, 1e-5, layer_norm=False)
    assert not close(gradient, absolute, 1e-2)


# --- the scale loss alone ---


def test_the_scale_loss_alone_pulls_at_a_frozen_running_mean_and_leaves_every_norm_as_it_is() -> None:
    model, driver = built("anchored")
    assert driver is not None
    model.double()
    plain = Decoder(model.config).double()
    plain.load_state_dict(model.state_dict())
    taper_config = arm_of("anchored").pretrain.taper
    assert taper_config is not None
    rate, weight, eps = taper_config.ema_rate, taper_config.anchor_weight, model.config.norm_eps
    means = []
    for step in range(START):
        driver.set_step(step)
        with driver.observe(), torch.no_grad():
            model(tokens(seed=step))
            assert driver.anchor_loss().item() == 0.0
        h = driver._probe.hidden
        assert h is not None
        means.append(np.mean(reference.rms(array(h), eps)))
    target = reference.corrected_ema(means, rate)
    for step in (START, STEPS - 1):  # frozen at the first of the two, whatever comes after
        driver.set_step(step)
        with driver.observe():
            assert close(model(tokens(seed=90 + step)), plain(tokens(seed=90 + step)))
            loss = driver.anchor_loss()
        h = driver._probe.hidden
        assert h is not None
        assert driver.scale_target.item() == pytest.approx(target, rel=1e-12)
        assert loss.item() == pytest.approx(reference.anchor_loss(array(h), target, weight, eps, layer_norm=False))
        assert loss.item() != pytest.approx(reference.anchor_loss(array(h), means[-1], weight, eps, layer_norm=False))
        (gradient,) = torch.autograd.grad(loss, h)
        assert close(gradient, reference.anchor_gradient(array(h), target, weight, eps, layer_norm=False), 1e-9)
    assert driver.gate.item() == 1.0


def test_a_run_of_the_scale_loss_alone_is_the_baselines_until_it_starts_and_another_after(
    streams: Path, trained, tmp_path: Path
) -> None:
    pretrain(make_job("baseline"), streams, tmp_path, HARDWARE)
    plain, anchored = ([row["ce"] for row in metrics_of(run)] for run in (tmp_path, trained("anchored")))
    steps = [row["step"] for row in metrics_of(tmp_path)]
    same = {step for step, a, b in zip(steps, plain, anchored, strict=True) if a == b}
    assert same >= {step for step in steps if step <= START}
    assert not {step for step in steps if step > START + 1} <= same
    config = json.loads((trained("anchored") / "config.json").read_text())
    assert config["norms"] == {}  # a plain model, as Baseline's
    aux = {row["step"]: row["aux"] for row in metrics_of(trained("anchored"))}
    assert all((aux[step] > 0) == (step >= START) for step in steps)


# --- the loss jump ---


def block_losses(model: torch.nn.Module, rows: torch.Tensor) -> float:
    with torch.no_grad():
        logits = array(model(rows))[:, :-1]
    return float(np.mean(reference.cross_entropies(logits, rows[:, 1:].numpy())))


@pytest.mark.parametrize("vector", [False, True])
def test_the_jump_is_the_loss_of_the_linear_maps_less_that_of_the_norms(vector: bool) -> None:
    model, driver = attached_as(ScoredTaper, final=True)
    rows = tokens(seed=8)
    driver.validate = partial(evaluate_blocks, model, rows, batch=3, device=torch.device("cpu"))
    if vector:
        for name in driver.swapped:
            norm = model.get_submodule(name)
            assert isinstance(norm, TaperNorm)
            make_featurewise(norm)
    with pytest.raises(UserError, match="the taper has not started"):
        driver.values()
    with driver.observe(), torch.no_grad():
        model(tokens())
    before = snapshot(model.state_dict())
    driver.set_step(3)
    values = {name: entry["value"] for name, entry in driver.values().items()}
    assert {entry["unit"] for entry in driver.values().values()} == {"nats/token"}
    standard = block_losses(decoder(), rows)
    linear = copy.deepcopy(model)
    linear.__dict__["_tapernorm"].set_gate(0.0)
    expected = block_losses(fold(linear)[0], rows)
    assert values["taper_start_ce_norms"] == pytest.approx(standard, rel=1e-9)
    assert values["taper_start_ce_linear"] == pytest.approx(expected, rel=1e-9)
    assert values["taper_start_jump"] == pytest.approx(expected - standard, rel=1e-6)
    assert abs(expected - standard) > 1e-3
    assert (driver.gate.item(), driver._gate.form) == (1.0, Form.MIX)  # where the schedule has it
    changed = {name for name, value in snapshot(model.state_dict()).items() if value != before[name]}
    assert changed == {f"{name}.c" for name in driver.swapped}  # gamma_t was a copy of gamma, which nothing trained
    driver.set_step(4)
    driver.set_step(20)
    assert driver.values()["taper_start_jump"]["value"] == values["taper_start_jump"]  # measured once


def test_a_calibration_by_hand_is_measured_too_and_leaves_the_gate_where_it_was() -> None:
    model, driver = attached_as(ScoredTaper)
    scores: list[float] = []

    def validate() -> Evaluation:
        scores.append(driver.gate.item())
        return Evaluation(6.0 - scores[-1], 2, None)

    driver.validate = validate
    with driver.observe(), torch.no_grad():
        model(tokens())
    driver.calibrate()
    assert scores == [1.0, 0.0]
    assert (driver.gate.item(), driver._gate.form) == (1.0, Form.OBSERVE)
    assert driver.values()["taper_start_jump"]["value"] == 3.0 - 2.5
    driver.losses = (2.5, float("inf"))  # JSON has no such number
    assert [entry["value"] for entry in driver.values().values()] == [2.5, None, None]


def test_measuring_it_shifts_no_number_of_the_run(streams: Path, trained, tmp_path: Path) -> None:
    """An arm without a treatment is the paper's run, bit by bit."""
    pretrain(arm_of("none").pretrain, streams, tmp_path, HARDWARE)
    run = trained("none")
    paper, arm = outcome_of(tmp_path), outcome_of(run)
    assert {k: v for k, v in arm.items() if k != "job"} == {k: v for k, v in paper.items() if k != "job"}
    told = json.loads((run / "result.json").read_text())["taper_start"]
    assert told["taper_start_jump"]["value"] == pytest.approx(
        told["taper_start_ce_linear"]["value"] - told["taper_start_ce_norms"]["value"]
    )
    assert "taper_start" not in json.loads((tmp_path / "result.json").read_text())


# --- runs ---


@pytest.mark.parametrize("name", ["dyt", "anchored", "several"])
def test_a_killed_arm_ends_as_if_nothing_had_happened(streams: Path, trained, tmp_path: Path, name: str) -> None:
    job, out = arm_of(name), tmp_path / "run"
    settings = ["--job", canonical_json(job), "--hardware", canonical_json(HARDWARE)]
    kill(
        partial(at_step, LATE, "within"),
        ["pretrain", *settings, "--tokens", str(streams), "--out", str(out)],
        tmp_path / "log",
    )
    assert not (out / "result.json").exists()
    run_arm(job, streams, out, HARDWARE)
    whole = trained(name)
    assert outcome_of(out) == outcome_of(whole)
    results = [json.loads((run / "result.json").read_text()) for run in (out, whole)]
    assert results[0].get("taper_start") == results[1].get("taper_start")
    assert ("taper_start" in results[0]) == (name in TAPERED)


@every_treatment
def test_what_was_trained_is_what_is_loaded_and_it_learnt(trained, name: str) -> None:
    run = trained(name)
    metrics = metrics_of(run)
    assert metrics[-1]["ce"] < metrics[0]["ce"]
    model = load(run, Decoder)
    fresh, _ = built(name)
    kinds = [{type(m) for n, m in one.named_modules() if ".probe" not in n} for one in (model, fresh)]  # no driver here
    assert kinds[0] == kinds[1]
    started = dict(fresh.named_parameters())
    stayed = [n for n, p in model.named_parameters() if torch.equal(p, started[n])]
    assert stayed == []  # alpha, s, beta, the embedding's scale and the temperature among those that moved


@every_taper
def test_a_finished_arm_folds_without_loss(streams: Path, trained, tmp_path: Path, name: str) -> None:
    result = fold_run(trained(name), streams, tmp_path, device="cpu", threads=1)
    values = {key: entry["value"] for key, entry in result["values"].items()}
    assert values["valid_ce_fused"] == pytest.approx(values["valid_ce_gated"], rel=1e-6)
    assert values["valid_ce_unfused"] == pytest.approx(values["valid_ce_gated"], rel=1e-6)
    finished = json.loads((trained(name) / "result.json").read_text())["values"]["valid_ce"]["value"]
    assert values["valid_ce_gated"] == pytest.approx(finished, rel=1e-6)
    assert result["provenance"]["seed"] == 3


def test_the_taper_starts_where_its_arm_says(trained) -> None:
    gates = {row["step"]: row["gate"] for row in metrics_of(trained("final"))}
    assert min(k for k in range(STEPS) if gates[k] < 1.0) == START + 1
