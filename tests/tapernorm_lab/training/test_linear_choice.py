"""The kernel of a training's linear maps: named or chosen, kept by a run that resumes, and written down."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face import gpt2
from places import ROOT
from training import HARDWARE, make_job, write_stream

import tapernorm
from tapernorm import linear_kernel
from tapernorm.linear_kernel import get_linear_kernel
from tapernorm.models.decoder import Decoder
from tapernorm.util.atomic_files import read_json, write_json
from tapernorm_lab.cli.main import main
from tapernorm_lab.config.load import load_config
from tapernorm_lab.config.run_cost import LinearMap, is_probed, linear_job
from tapernorm_lab.experiments.pretrain import pretrain
from tapernorm_lab.training import device as kernels
from tapernorm_lab.training import plan
from tapernorm_lab.training.device import choose, maps_of

MAP = LinearMap(rows=64, d_in=16, d_out=24, times=1)
SLOW = 0.02  # seconds


@pytest.fixture(autouse=True)
def _default_kernel():
    yield
    tapernorm.set_linear_kernel("aten")


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return write_stream(tmp_path / "tokens")


def timed_as(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> list[LinearMap]:
    """Have each kernel take so long for any map; the maps that are timed."""
    timed = []

    def least(one: LinearMap) -> dict[str, float]:
        timed.append(one)
        return seconds

    monkeypatch.setattr(kernels, "_least_seconds", least)
    return timed


@pytest.mark.parametrize(
    ("aten", "onednn", "chosen"),
    [(2.0, 1.0, "onednn"), (1.0, 2.0, "aten"), (1.05, 1.0, "aten"), (1.15, 1.0, "onednn")],
)
def test_the_faster_kernel_is_chosen_and_a_near_tie_takes_the_default(monkeypatch, aten, onednn, chosen):
    timed_as(monkeypatch, aten=aten, onednn=onednn)
    assert choose([MAP]) == {"linear": chosen, "speedup": pytest.approx(aten / onednn)}


def test_each_map_counts_as_often_as_it_is_computed(monkeypatch):
    seconds = {16: {"aten": 1.0, "onednn": 3.0}, 32: {"aten": 4.0, "onednn": 1.0}}
    monkeypatch.setattr(kernels, "_least_seconds", lambda one: seconds[one.d_in])
    maps = [MAP, MAP.model_copy(update={"d_in": 32, "times": 0.5})]
    assert choose(maps)["speedup"] == pytest.approx((1 + 2) / (3 + 0.5))


def test_the_times_are_those_of_forward_and_backward_by_each_kernel(monkeypatch):
    calls: Counter[str] = Counter()
    grad = torch.autograd.grad

    def counted(*arguments: Any) -> Any:
        calls[get_linear_kernel()] += 1
        return grad(*arguments)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    state = torch.random.get_rng_state()
    least = kernels._least_seconds(MAP)
    assert calls["aten"] == calls["onednn"] > 1
    assert all(0 < seconds < 60 for seconds in least.values())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert get_linear_kernel() == "aten"


def test_without_onednn_nothing_is_timed(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert choose([MAP]) == {"linear": "aten", "speedup": None}


def test_the_maps_of_a_model_are_its_linear_modules():
    job = make_job().model
    expected = {(one.d_in, one.d_out): one.times for one in maps_of(Decoder(job), 100)}
    d, keys, f, v = job.d_model, job.n_kv_head * job.head_dim, job.d_ff, job.vocab_size
    assert expected == {(d, d): 2 * 2, (d, keys): 2 * 2, (d, f): 2 * 2, (f, d): 2, (d, v): 1}
    stock = gpt2()
    width, hidden = stock.config.n_embd, stock.config.n_inner
    shapes = {(one.d_in, one.d_out) for one in maps_of(stock, 100)}
    assert {(width, 3 * width), (width, hidden), (hidden, width)} <= shapes  # Conv1D holds (in, out)


@pytest.mark.parametrize("rows", [10, 10**6])
def test_a_large_map_is_timed_on_fewer_rows_and_counts_the_same(rows):
    one = LinearMap.at_most(rows, (512, 4096), 3)
    assert one.rows * one.times == pytest.approx(3 * rows)
    assert one.rows * 512 * 4096 <= max(1 << 27, rows * 512 * 4096 if rows < 64 else 0)


def test_the_maps_of_a_run_are_those_of_its_models():
    config = load_config(ROOT / "config/test.yaml")
    told = {(one.rows, one.d_in, one.d_out) for one in linear_job(config).maps}
    for cell in config.pretrain_cells():
        job = config.pretrain_job(*cell)
        own = maps_of(Decoder(job.model), job.train.batch * job.model.context)
        assert {(one.rows, one.d_in, one.d_out) for one in own} <= told
    assert sum(one.times for one in linear_job(config).maps) == pytest.approx(1)


@pytest.mark.parametrize(
    ("linear", "device", "probed"), [("auto", "cpu", True), ("auto", "cuda", False), ("onednn", "cpu", False)]
)
def test_a_run_is_probed_where_a_choice_can_matter(linear, device, probed):
    changes = [f"hardware.linear={linear}", f"hardware.device={device}"]
    assert is_probed(load_config(str(ROOT / "config/test.yaml"), changes)) is probed


def test_a_training_by_onednn_says_so_and_comes_to_the_same_loss(monkeypatch, tokens, tmp_path):
    monkeypatch.setattr(linear_kernel, "_LEAST_PRODUCTS", 1)
    onednn = HARDWARE.model_copy(update={"linear": "onednn"})
    results = [pretrain(make_job(), tokens, tmp_path / h.linear, h) for h in (HARDWARE, onednn)]
    assert [r["provenance"]["hardware"]["linear"] for r in results] == ["aten", "onednn"]
    assert len({r["provenance"]["fingerprint"] for r in results}) == 1  # hardware is no part of a job
    losses = [r["values"]["valid_ce"]["value"] for r in results]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("aten", "onednn")]
    assert weights[0] != weights[1]  # the control: another kernel was at work


def test_a_choice_is_made_once_and_kept_by_the_attempt_that_resumes(monkeypatch, tokens, tmp_path):
    auto, out, job = HARDWARE.model_copy(update={"linear": "auto"}), tmp_path / "run", make_job()
    timed = timed_as(monkeypatch, aten=2.0, onednn=1.0)
    monkeypatch.setattr(plan, "set_linear_kernel", _stop)
    with pytest.raises(KeyboardInterrupt):
        pretrain(job, tokens, out, auto)
    assert len(timed) > 1
    monkeypatch.undo()
    timed = timed_as(monkeypatch, aten=1.0, onednn=2.0)
    assert pretrain(job, tokens, out, auto)["provenance"]["hardware"]["linear"] == "onednn"
    assert not timed


def _stop(_: str) -> None:
    raise KeyboardInterrupt


def test_the_workflows_choice_is_taken_by_a_training(monkeypatch, capsys, tmp_path):
    timed_as(monkeypatch, aten=2.0, onednn=1.0)
    out = tmp_path / "kernels.json"
    words = ["--config", str(ROOT / "config/test.yaml"), "--device", "cpu", "--out", str(out)]
    assert main(["bench", "linear", *words]) in (0, None)
    result = read_json(out)
    assert result["linear"] == "onednn"
    assert result["values"]["onednn_speedup"] == {"value": 2.0, "unit": "x"}
    assert "2.00 times" in capsys.readouterr().out

    from tapernorm_lab.cli.arguments import read_kernel

    assert read_kernel(out) == "onednn"
    write_json(out, {"linear": "mkl"})
    with pytest.raises(tapernorm.UserError, match="bench linear"):
        read_kernel(out)
    with pytest.raises(tapernorm.UserError, match="bench linear"):
        read_kernel(tmp_path / "absent.json")
