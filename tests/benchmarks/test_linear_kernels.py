"""Steps by the chosen kernel: bounds hold where oneDNN is much faster, and a row without one says why."""

import pytest
import torch
from builders import VOCABULARY, shape

from benchmarks import linear_kernels, steps
from benchmarks.linear_kernels import Subject, compare
from benchmarks.models import decoder, stock_llama
from benchmarks.report import line
from tapernorm.linear_kernel import get_linear_kernel
from tapernorm.util.rng import generator

SHAPE = shape(tie_head=True, context=16)


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(linear_kernels, "ROUNDS", 2)
    monkeypatch.setattr(linear_kernels, "WARMUP", 1)
    yield
    torch.set_num_threads(threads)
    assert get_linear_kernel() == "aten"


def subject():
    both = torch.randint(VOCABULARY, (2, 9), generator=generator(0, "tokens"))
    ours, theirs = (lambda: decoder(SHAPE)), (lambda: stock_llama(decoder(SHAPE)))
    return Subject(
        "tiny", (both[:, :-1], both[:, 1:]), ours, theirs, ("bf16",), {("float32", 1): 1e-9, ("bf16", 1): 1e9}
    )


@pytest.mark.parametrize(("speedup", "held"), [(1.5, True), (1.49, False), (None, False)])
def test_a_bound_holds_where_the_probe_finds_onednn_much_faster(monkeypatch, speedup, held):
    kernel = "onednn" if speedup else "aten"
    monkeypatch.setattr(linear_kernels, "choose", lambda _: {"linear": kernel, "speedup": speedup})
    found = {figure.name.removeprefix("linear_kernels.tiny.threads1."): figure for figure in compare(subject(), 1)}
    bounded = [found["float32_over_reference"], found["bf16_over_reference"]]
    assert [figure.passes for figure in bounded] == ([True, False] if held else [None, None])
    assert [figure.bound is None for figure in bounded] == [not held] * 2
    assert [bool(figure.row().get("note")) for figure in bounded] == [not held] * 2
    assert all((figure.note or "") in line(figure) for figure in bounded)
    others = [figure for figure in found.values() if figure not in bounded]
    assert all(figure.bound is None and "note" not in figure.row() for figure in others)
    assert ("onednn_over_default" in found) is (speedup is not None)
    assert {f"{arm}_over_reference_same_kernel" for arm in ("float32", "bf16")} <= found.keys()


def test_each_arm_runs_by_its_kernel(monkeypatch):
    monkeypatch.setattr(linear_kernels, "choose", lambda _: {"linear": "onednn", "speedup": 2.0})
    loss, used = steps.training_loss, []

    def noted(*arguments):
        used.append((get_linear_kernel(), torch.is_autocast_enabled("cpu")))
        return loss(*arguments)

    def run(arms, **_):
        for step in arms.values():
            step()
        return {name: [1.0] for name in arms}

    monkeypatch.setattr(steps, "training_loss", noted)
    monkeypatch.setattr(linear_kernels, "interleave", run)
    list(compare(subject(), 1))
    assert used == [("aten", False), ("onednn", False), ("onednn", False), ("aten", True)]
