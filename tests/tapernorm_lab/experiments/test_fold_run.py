"""`tapernorm fold` on a finished run: two exports that score as the run did, and a result that says so."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from training import STEPS, VOCABULARY, command, make_job, outcome_of, write_stream

import tapernorm_lab.experiments.fold_run
from tapernorm.checkpoints.store import load
from tapernorm.norms import FixedScale, TaperNorm
from tapernorm.util.atomic_files import read_json
from tapernorm_lab.cli.main import main
from tapernorm_lab.experiments.fold_run import FORMS, fold_run
from tapernorm_lab.report.frames import pretraining as rows

VARIANTS = ("internal", "all_aux")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stream(tmp_path_factory.mktemp("data") / "tokens")


def trained(variant: str, tokens: Path, run: Path, **changes: Any) -> Path:
    assert main(command(make_job(variant, **changes), tokens, run)) == 0
    return run


@pytest.fixture(scope="module")
def runs(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Variant -> the run folder and the folder of its folds."""
    made = {}
    for variant in VARIANTS:
        run, out = (tmp_path_factory.mktemp(variant) / name for name in ("run", "fold"))
        trained(variant, tokens, run, norm="layernorm" if variant == "internal" else "rmsnorm")
        fold_run(run, tokens, out, device="cpu", threads=1)
        made[variant] = run, out
    return made


each_variant = pytest.mark.parametrize("variant", VARIANTS)


def probe() -> torch.Tensor:
    return torch.randint(VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(0))


def value(result: dict[str, Any], name: str) -> float:
    assert result["values"][name]["unit"] == "nats/token"
    return result["values"][name]["value"]


@each_variant
def test_the_files_are_two_models_and_a_result(runs, variant: str) -> None:
    _, out = runs[variant]
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    models = {f"{form}/{name}" for form in FORMS for name in ("config.json", "model.safetensors")}
    assert files == models | {"result.json", "lock", ".tapernorm.json"}


@each_variant
@torch.no_grad()
def test_the_exports_compute_what_the_run_does(runs, variant: str) -> None:
    run, out = runs[variant]
    model = load(run)
    swapped = 4 if variant == "internal" else 5
    for form, kind in {"unfused": FixedScale, "fused": torch.nn.Identity}.items():
        folded = load(out / form)
        torch.testing.assert_close(folded(probe()), model(probe()), rtol=1e-4, atol=1e-5)
        assert len([m for m in folded.modules() if type(m) is kind]) == swapped
        assert not [m for m in folded.modules() if isinstance(m, TaperNorm)]
    assert load(out / "unfused").config.tie_head
    assert load(out / "fused").config.tie_head == (variant == "internal")


@each_variant
def test_the_losses_are_equal_and_those_of_the_evaluation(runs, tokens: Path, variant: str, tmp_path: Path) -> None:
    run, out = runs[variant]
    result = read_json(out / "result.json")
    loss = read_json(run / "result.json")["values"]["valid_ce"]["value"]
    assert value(result, "valid_ce_gated") == pytest.approx(loss, rel=1e-6)
    for form in FORMS:
        assert value(result, f"valid_ce_{form}") == pytest.approx(loss, rel=1e-6)
        arguments = ["evaluate", "--model", str(out / form), "--tokens", str(tokens), "--device", "cpu"]
        assert main([*arguments, "--out", str(tmp_path / "score.json")]) == 0
        assert read_json(tmp_path / "score.json")["ce_nats_per_token"] == value(result, f"valid_ce_{form}")


def test_a_fold_that_changes_the_loss_shows_in_the_result(runs, tokens: Path, tmp_path: Path, monkeypatch) -> None:
    run, _ = runs["all_aux"]
    right = tapernorm_lab.experiments.fold_run.fold

    def wrong(model, *, fused):
        folded, report = right(model, fused=fused)
        if fused:
            folded.model.layers[0].mlp.up_proj.weight.data.mul_(-3)
        return folded, report

    monkeypatch.setattr(tapernorm_lab.experiments.fold_run, "fold", wrong)
    result = fold_run(run, tokens, tmp_path, device="cpu", threads=1)
    assert value(result, "valid_ce_fused") != pytest.approx(value(result, "valid_ce_gated"), rel=1e-5)
    assert value(result, "valid_ce_unfused") == pytest.approx(value(result, "valid_ce_gated"), rel=1e-6)


@each_variant
def test_the_result_is_the_contract(runs, variant: str) -> None:
    run, out = runs[variant]
    result, training = read_json(out / "result.json"), read_json(run / "result.json")
    assert (result["schema_version"], result["kind"], result["job"]) == (1, "fold", training["job"])
    assert result["provenance"]["config_hash"] == training["provenance"]["config_hash"]
    assert (result["provenance"]["seed"], result["provenance"]["device"]) == (3, "cpu")
    assert set(result["values"]) == {"valid_ce_gated", "valid_ce_unfused", "valid_ce_fused"}
    constants = load(run)
    for form, fused in FORMS.items():
        report = result["reports"][form]
        assert report["fused"] == fused
        assert report["head_untied"] == (fused and variant == "all_aux")
        assert report["parameters_before"] == training["values"]["parameters"]["value"]
        assert report["parameters_after"] == sum(p.numel() for p in load(out / form).parameters())
        assert fused <= (report["largest_logit_difference"] > 0)  # unfused may be bitwise the same
        assert report["largest_logit_difference"] < 1e-4
        assert [norm["c"] for norm in report["norms"]] == [
            constants.get_submodule(norm["name"]).c.item() for norm in report["norms"]
        ]


def test_folding_leaves_the_run_as_it_was_and_is_repeatable(runs, tokens: Path, tmp_path: Path) -> None:
    run, out = runs["all_aux"]
    before = outcome_of(run)
    fold_run(run, tokens, tmp_path, device="cpu", threads=1)
    assert outcome_of(run) == before
    for form in FORMS:
        for name in ("config.json", "model.safetensors"):
            assert (tmp_path / form / name).read_bytes() == (out / form / name).read_bytes()
    results = [{**read_json(folder / "result.json"), "provenance": None} for folder in (out, tmp_path)]
    assert results[0] == results[1]


def test_the_rows_join_the_fold_to_its_training(runs, tmp_path: Path) -> None:
    run, out = runs["all_aux"]
    results, _ = rows.collect([out / "result.json", run / "result.json"], run="r")
    (row,) = results.to_dict("records")
    fold = read_json(out / "result.json")
    for form in ("gated", *FORMS):
        assert row[f"valid_ce_{form}"] == value(fold, f"valid_ce_{form}")
    assert row["fold_logit_difference"] == fold["reports"]["fused"]["largest_logit_difference"]
    assert (row["variant"], row["steps"]) == ("all_aux", STEPS)


# --- from the command line ---


def fold_command(run: Path, tokens: Path, out: Path) -> list[str]:
    return ["fold", "--model", str(run), "--tokens", str(tokens), "--out", str(out), "--device", "cpu"]


def test_the_command_line_writes_the_same_and_says_what_moved(runs, tokens: Path, tmp_path: Path, capsys) -> None:
    run, out = runs["internal"]
    assert main(fold_command(run, tokens, tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads((tmp_path / "result.json").read_text())
    assert {**result, "provenance": None} == {**read_json(out / "result.json"), "provenance": None}
    for line, form in zip(lines, FORMS, strict=True):
        moved = value(result, f"valid_ce_{form}") - value(result, "valid_ce_gated")
        difference = result["reports"][form]["largest_logit_difference"]
        assert line == (
            f"{form}: 4 norms, largest logit difference {difference:.2g} of "
            f"{result['reports'][form]['largest_logit']:.2g}, "
            f"validation loss moved by {moved:+.2g} nats/token"
        )


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("baseline", "no norm of this model is tapered"),
        ("folded", "holds no result.json: give the run folder of a tapered model"),
        ("absent", "holds no result.json: give the run folder of a tapered model"),
        ("other vocabulary", "vocab"),
    ],
)
def test_what_cannot_be_folded_is_one_line(runs, tokens: Path, tmp_path: Path, capsys, case: str, message: str) -> None:
    model, stream = runs["all_aux"][0], tokens
    if case == "baseline":
        model = trained("baseline", tokens, tmp_path / "run")
    elif case == "folded":
        model = runs["all_aux"][1] / "fused"
    elif case == "absent":
        model = tmp_path / "absent"
    else:
        stream = write_stream(tmp_path / "tokens")
        manifest = read_json(stream / "manifest.json")
        (stream / "manifest.json").write_text(json.dumps({**manifest, "vocab_size": VOCABULARY + 3}))
    capsys.readouterr()
    assert main(fold_command(model, stream, tmp_path / "out")) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert not (tmp_path / "out" / "result.json").exists()


def test_a_stale_result_does_not_vouch_for_an_unfinished_fold(runs, tokens: Path, tmp_path: Path, monkeypatch) -> None:
    run, _ = runs["internal"]
    fold_run(run, tokens, tmp_path, device="cpu", threads=1)

    def stopped(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(tapernorm_lab.experiments.fold_run, "fold", stopped)
    assert main(fold_command(run, tokens, tmp_path)) == 130
    assert not (tmp_path / "result.json").exists()
