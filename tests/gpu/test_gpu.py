"""What a GPU does otherwise than a CPU: bf16 autocast, compiled training, CUDA graphs, folding where weights lie."""

from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from training import HARDWARE, make_job, metrics_of, write_stream

from tapernorm.folding import fold
from tapernorm.models.packed_decoder import PackedDecoder
from tapernorm_lab.experiments.pretrain import pretrain
from tapernorm_lab.experiments.speed.decode_speed import Stepper

DEVICE = "cuda"
SEEDS = (3, 4)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stream(tmp_path_factory.mktemp("data") / "tokens")


def losses(tokens: Path, out: Path, *, seed: int, precision: str = "float32", **hardware: Any) -> list[float]:
    place = HARDWARE.model_copy(update={"device": DEVICE, **hardware})
    pretrain(make_job("all_aux", seed=seed, precision=precision), tokens, out, place)
    return [row["loss"] for row in metrics_of(out)]


@pytest.mark.parametrize("seed", SEEDS)
def test_float32_training_is_that_of_a_cpu(tokens: Path, tmp_path: Path, seed: int) -> None:
    cpu, gpu, again = (
        losses(tokens, tmp_path / name, seed=seed, device=device)
        for name, device in (("cpu", "cpu"), ("gpu", DEVICE), ("again", DEVICE))
    )
    other = losses(tokens, tmp_path / "other", seed=seed + 10)
    assert gpu == pytest.approx(cpu, rel=1e-4)
    assert again == pytest.approx(gpu, rel=1e-5)  # some sums of a GPU have no fixed order
    assert other != pytest.approx(cpu, rel=1e-2)


@pytest.mark.parametrize("seed", SEEDS)
def test_bf16_training_follows_float32_through_a_whole_taper(tokens: Path, tmp_path: Path, seed: int) -> None:
    """bf16 keeps 8 bits: 4e-3 of each product, and a few such in a loss."""
    wide = losses(tokens, tmp_path / "float32", seed=seed)
    narrow = losses(tokens, tmp_path / "bf16", seed=seed, precision="bf16")
    assert narrow != wide
    assert narrow == pytest.approx(wide, rel=2e-2)


def test_compiled_training_is_eager_training(tokens: Path, tmp_path: Path) -> None:
    eager, compiled = (losses(tokens, tmp_path / str(flag), seed=3, compile=flag) for flag in (False, True))
    assert compiled == pytest.approx(eager, rel=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("fused", [True, False])
def test_folding_on_a_gpu_keeps_the_function(fused: bool) -> None:
    model, driver = builders.calibrated(final=True)
    driver.set_gate(0.0)
    model.to(DEVICE)
    ids = builders.tokens().to(DEVICE)
    folded, _ = fold(model, fused=fused)
    assert {value.device.type for value in folded.state_dict().values()} == {DEVICE}
    assert builders.close(folded(ids).cpu(), model(ids).cpu())
    first = next(parameter for parameter in folded.parameters() if parameter.ndim == 2)
    first.mul_(1.001)
    assert not builders.close(folded(ids).cpu(), model(ids).cpu())


def test_a_cuda_graph_decodes_the_tokens_of_eager_decoding() -> None:
    packed = PackedDecoder(builders.decoder(context=24).requires_grad_(False).to(DEVICE))
    prompts = builders.tokens(2, 5).to(DEVICE)
    found = []
    for mode in ("eager", "cudagraph"):
        stepper = Stepper(packed, batch=2, capacity=24, mode=mode)
        stepper.load(prompts)
        path = []
        for step in range(12):
            stepper.run(step, 1)
            path.append(stepper.token.clone())
        found.append(torch.stack(path, dim=1))
    assert len(found[0].unique()) > 2
    assert torch.equal(*found)
