"""The growing metrics file, its TensorBoard twin, and what a step is measured by."""

import json
import math
import resource
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from training import HARDWARE, make_job, metrics_of, write_stream

from tapernorm.models.decoder import Decoder
from tapernorm.util.errors import UserError
from tapernorm_lab.experiments.pretrain import attach_variant, pretrain
from tapernorm_lab.training.metrics import GROUPS, MetricsFile, StepMeter, gradient_norm, parameter_groups


def row(step: int) -> dict[str, float]:
    return {"step": step, "ce": 1 / (step + 3), "gate": 1.0}


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- the file ---


def test_rows_come_back_exactly(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "new" / "metrics.jsonl", keep_bytes=0)
    for step in range(5):
        file.write(row(step))
        assert lines(file.path)[-1] == row(step)  # written at once: nothing waits in this process
    file.close()
    assert lines(file.path) == [row(step) for step in range(5)]


def test_a_resumed_file_is_cut_back_to_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, keep_bytes=0)
    first.write(row(0))
    first.write({"step": 0, "valid_ce": 3.0})
    kept = first.sync()
    first.write(row(1))
    first.close()
    with open(path, "ab") as file:
        file.write(b'{"step": 2, "ce"\x00\x00\xff')  # what a kill or a power cut leaves of a line
    second = MetricsFile(path, keep_bytes=kept)
    assert second.sync() == kept  # even where no line follows
    second.write(row(1))
    assert second.sync() == path.stat().st_size
    second.close()
    assert lines(path) == [row(0), {"step": 0, "valid_ce": 3.0}, row(1)]
    MetricsFile(path, keep_bytes=0).close()
    assert path.read_bytes() == b""


def test_what_is_not_a_number_is_never_written(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", keep_bytes=0)
    with pytest.raises(ValueError, match="not JSON compliant"):
        file.write({"step": 0, "ce": math.nan})
    file.close()
    assert file.path.read_bytes() == b""


def test_a_file_that_cannot_grow_is_one_clear_error(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", keep_bytes=0)
    file.write(row(0))
    kept = file.sync()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kept + 10, hard))
    try:
        with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl: .*size limit"):
            file.write(row(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.close()
    assert file.path.stat().st_size == kept + 10  # ten bytes of the line went through, and are cut off on resume
    MetricsFile(file.path, keep_bytes=kept).close()
    assert lines(file.path) == [row(0)]


# --- TensorBoard ---


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_event_files_hold_the_scalars_of_the_lines_and_outlive_the_run(tmp_path: Path) -> None:
    tokens, run = write_stream(tmp_path / "tokens"), tmp_path / "run"
    hardware = HARDWARE.model_copy(update={"tensorboard": True})
    pretrain(make_job(eval_every=4, log_every=2), tokens, run, hardware)
    expected: dict[str, dict[int, float]] = {}
    for line in lines(run / "metrics.jsonl"):
        step = line.pop("step")
        for name, value in line.items():
            if value is not None:
                expected.setdefault(name, {})[step] = value
    found = scalars(run / "tensorboard")
    assert found.keys() == expected.keys() >= {"ce", "gate", "scale_target", "valid_ce", "grad_norm_mlp"}
    for tag, points in expected.items():
        assert found[tag] == pytest.approx(points, rel=1e-6), tag  # float32 there
    pretrain(make_job(eval_every=4, log_every=2), tokens, tmp_path / "without", HARDWARE)
    assert not (tmp_path / "without" / "tensorboard").exists()
    assert metrics_of(tmp_path / "without") == metrics_of(run)


def test_a_resumed_run_hides_the_events_past_its_checkpoint(tmp_path: Path) -> None:
    path, events = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    first = MetricsFile(path, keep_bytes=0, events=events)
    for step in range(6):
        first.write({"step": step, "ce": 1.0})
    first.close()
    second = MetricsFile(path, keep_bytes=0, events=events, step=3)
    second.write({"step": 3, "ce": 2.0})
    second.close()
    assert scalars(events) == {"ce": {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0}}


def test_tensorboard_asked_for_and_absent_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"hardware\.tensorboard .* pip install '\.\[tensorboard\]'"):
        MetricsFile(tmp_path / "metrics.jsonl", keep_bytes=0, events=tmp_path / "events")
    assert list(tmp_path.iterdir()) == []


# --- measures ---


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_every_parameter_is_in_one_group(tied: bool, norm: str) -> None:
    job = make_job(tie_head=tied, norm=norm)
    model = Decoder(job.model)
    attach_variant(model, job)
    groups = parameter_groups(model)
    assert tuple(groups) == GROUPS
    grouped = [parameter for group in groups.values() for parameter in group]
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters()}
    assert len(grouped) == len(list(model.parameters()))
    per_norm = 2 if norm == "rmsnorm" else 3  # gamma, gamma_t (, beta)
    counts = {"embeddings": 1 if tied else 2, "attention": 2 * 4, "mlp": 2 * 3, "norms": 5 * per_norm}
    assert {name: len(group) for name, group in groups.items()} == counts


def test_the_gradient_norm_is_euclidean_and_a_missing_gradient_is_zero() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad = torch.tensor([3.0, 0.0])
    parameters[1].grad = torch.tensor([[0.0, 4.0], [0.0, 12.0]])
    assert gradient_norm(parameters).item() == 13.0
    assert gradient_norm(parameters[2:]).item() == 0.0


def test_the_meter_weighs_micro_batches_by_their_share() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(5, 3, 7, generator=draw, dtype=torch.float64)
    scale = torch.rand(5, 3, 1, generator=draw, dtype=torch.float64)
    meter = StepMeter()
    for part in (slice(0, 2), slice(2, 4), slice(4, 5)):
        meter.add(len(logits[part]) / 5, logits[part].flatten(0, 1).split(4), scale[part])
    found = meter.row()
    assert found["logit_rms"] == pytest.approx(logits.square().mean().sqrt().item(), rel=1e-12)
    centred = logits - logits.mean(-1, keepdim=True)
    assert found["logit_rms_centred"] == pytest.approx(centred.square().mean().sqrt().item(), rel=1e-12)
    assert found["logit_max"] == logits.abs().max().item()
    assert found["scale_mean"] == pytest.approx(scale.mean().item(), rel=1e-12)
    assert found["scale_max"] == scale.max().item()


def test_a_shift_that_all_logits_of_a_token_share_leaves_the_centred_magnitude() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shift = torch.tensor([3.0, -50.0, 1000.0])[:, None]
    rows = []
    for shown in (logits, logits + shift):
        meter = StepMeter()
        meter.add(1.0, shown.flatten(0, 1).split(4), torch.ones(2, 3, 1))
        rows.append(meter.row())
    assert rows[1]["logit_rms_centred"] == pytest.approx(rows[0]["logit_rms_centred"], rel=1e-9)
    assert rows[1]["logit_rms"] > 100 * rows[0]["logit_rms"]
