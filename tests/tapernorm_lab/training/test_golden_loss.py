"""Ten steps of each taper and anchor give the losses that they gave when these digits were written.

Other kernels sum in another order: with ATEN_CPU_CAPABILITY=default these losses move by at most 2e-7 of themselves,
and the digits are rounded by as much. The tolerance is ten times that. Each changed constant below moves some loss by
ten times the tolerance or more.
"""

from pathlib import Path
from typing import Any

import finetuning
import pytest
import training

from tapernorm_lab.config.study import ArmJob
from tapernorm_lab.experiments.finetune import finetune
from tapernorm_lab.experiments.pretrain import pretrain
from tapernorm_lab.experiments.study_arm import run_arm

STEPS, TOLERANCE = 10, 4e-6  # relative


def table(text: str) -> dict[str, list[float]]:
    return {name: [float(digits) for digits in row] for name, *row in map(str.split, text.strip().splitlines())}


PRETRAIN = table("""
baseline     4.093637 4.086729 4.031215 3.964743 4.003614 3.934479 3.931885 3.951913 3.826371 3.870464
internal     4.093637 4.086729 4.031215 3.964758 4.004564 3.934277 3.934690 3.952575 3.815353 3.881101
internal_aux 4.093637 4.086729 4.031220 3.964773 4.004569 3.934302 3.934705 3.952650 3.815465 3.881223
all          4.093637 4.086729 4.031215 3.961783 3.999713 3.887196 3.865474 3.818080 3.406835 3.559796
all_aux      4.093637 4.086729 4.031220 3.961799 3.999721 3.887246 3.865564 3.818248 3.407195 3.559988
""")
RELATIVE = table("""
all_aux      4.093637 4.086729 4.045212 3.990823 4.006817 3.943247 3.942387 3.970870 3.763034 3.826426
""")["all_aux"]
FINETUNE = table("""
vanilla      4.116077 4.049214 4.096173 3.984011 3.979855 3.870227 3.774192 4.051358 3.822997 3.726838
fakeln       4.116080 4.049218 4.096178 3.986737 3.981505 3.874168 3.771602 4.033931 3.833202 3.741441
internal_aux 4.116077 4.049214 4.096173 3.984144 3.980304 3.872344 3.775389 4.047155 3.844462 3.758135
all_aux      4.116077 4.049214 4.096173 3.984144 3.972951 3.815551 3.473167 4.074063 3.872881 3.240894
""")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_stream(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finetuning.write_blocks(tmp_path_factory.mktemp("data") / "blocks")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without dropout: its masks are the random generator's affair."""
    return finetuning.write_base(tmp_path_factory.mktemp("base"), dropout=0.0)


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in training.metrics_of(run)]


def of_pretraining(tokens: Path, run: Path, variant: str, **changes: Any) -> list[float]:
    pretrain(training.make_job(variant, steps=STEPS, **changes), tokens, run, training.HARDWARE)
    return losses(run)


def golden(digits: list[float]) -> Any:
    assert len(digits) == STEPS
    return pytest.approx(digits, rel=TOLERANCE, abs=0)


@pytest.mark.parametrize("variant", PRETRAIN)
def test_pretraining(tokens: Path, tmp_path: Path, variant: str) -> None:
    assert of_pretraining(tokens, tmp_path, variant) == golden(PRETRAIN[variant])


def test_pretraining_with_the_relative_anchor(tokens: Path, tmp_path: Path) -> None:
    job = ArmJob(pretrain=training.make_job("all_relative", steps=STEPS), treatment=None)
    run_arm(job, tokens, tmp_path, training.HARDWARE)
    assert losses(tmp_path) == golden(RELATIVE)


@pytest.mark.parametrize("method", FINETUNE)
def test_finetuning(base: Path, blocks: Path, tmp_path: Path, method: str) -> None:
    finetune(finetuning.make_job(method, steps=STEPS), base, blocks, tmp_path, finetuning.MICRO)
    assert losses(tmp_path) == golden(FINETUNE[method])


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("baseline", {"lr": 1.001e-2}),
        ("baseline", {"adam_eps": 1e-6}),
        ("baseline", {"norm_eps": 1e-5}),
        ("internal", {"end_fraction": 0.9}),
        ("all", {"ema_rate": 0.2}),
        ("all_aux", {"anchor_weight": 0.2}),
    ],
)
def test_a_changed_constant_is_seen(tokens: Path, tmp_path: Path, variant: str, changes: dict[str, float]) -> None:
    assert of_pretraining(tokens, tmp_path, variant, **changes) != golden(PRETRAIN[variant])


def test_tapers_and_anchors_differ_by_more_than_the_tolerance() -> None:
    found = [*PRETRAIN.values(), RELATIVE]
    assert all(one != golden(other) for one in found for other in found if one is not other)
    assert all(one != golden(other) for one in FINETUNE.values() for other in FINETUNE.values() if one is not other)
