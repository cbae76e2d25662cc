"""Scores of rows against transformers' own loss, NumPy's statistics and losses by hand."""

import math
import weakref

import builders
import numpy as np
import pytest
import reference
import torch
from builders import array
from scipy import stats as scipy_stats
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

from tapernorm_lab.experiments.loss_quantiles import RESOLUTION, quantile, rounded
from tapernorm_lab.experiments.row_losses import RowScores, score_rows, target_losses

CPU = torch.device("cpu")
VOCABULARY, CONTEXT = 31, 9


def gpt2(dtype=torch.float32):
    sizes = {"vocab_size": VOCABULARY, "n_positions": 13, "n_embd": 12, "n_layer": 2, "n_head": 3}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    builders.randomise(model, seed=4)
    return model.to(dtype)


def rows_of(count, context=CONTEXT, dtype=torch.uint16):
    return torch.randint(VOCABULARY, (count, context), generator=builders.generator(count, "rows")).to(dtype)


def by_hand(model, rows):
    """(n, T-1) losses of every target, one row at a time, log-softmax in NumPy."""
    ids = array(rows.long()).astype(int)
    with torch.no_grad():
        logits = [array(model(input_ids=row[None].long()).logits[0]) for row in rows]
    return np.stack([reference.cross_entropies(z[:-1], row[1:]) for z, row in zip(logits, ids, strict=True)])


def scores_of(rows, tokens=()):
    return RowScores(torch.tensor(rows, dtype=torch.float64), rounded(torch.tensor([*(tokens or [1.0])])))


@pytest.mark.parametrize("batch", [1, 4, 100])
def test_the_mean_is_transformers_own_loss_on_a_stock_gpt2(batch):
    model, rows = gpt2().eval(), rows_of(11)
    with torch.no_grad():
        expected = model(input_ids=rows.long(), labels=rows.long()).loss.item()
    statistics = score_rows(model, rows, batch=batch, device=CPU).statistics()
    assert statistics["rows"]["mean"] == pytest.approx(expected, abs=1e-6)
    assert statistics["tokens"]["mean"] == statistics["rows"]["mean"]


@pytest.mark.parametrize("batch", [1, 3, 5, 64])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32])
def test_every_row_is_scored_in_order_the_last_partial_batch_included(batch, dtype):
    model, rows = gpt2(torch.float64).eval(), rows_of(14, dtype=dtype)
    expected = by_hand(model, rows)
    scores = score_rows(model, rows, batch=batch, device=CPU)
    np.testing.assert_allclose(scores.rows.numpy(), expected.mean(axis=1), rtol=1e-12)
    for q in (0.5, 0.999):
        assert quantile(scores.tokens, q) == pytest.approx(np.quantile(expected, q), rel=1.01 * RESOLUTION)
    full = len(rows) // batch * batch
    if 0 < full < len(rows):  # what would be said without the rest
        assert abs(expected[:full].mean() - expected.mean()) > 1e-4


def test_a_row_is_scored_by_itself_whatever_stands_beside_it():
    model, rows = gpt2().eval(), rows_of(6)
    together = score_rows(model, rows, batch=6, device=CPU).rows
    alone = torch.cat([score_rows(model, row[None], batch=1, device=CPU).rows for row in rows])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=0)


def test_end_of_text_targets_count():
    a, b, c, d, end = 1, 2, 3, 4, 0
    ids = torch.tensor([[a, b, end, c, d, end]])
    probability = torch.full((1, 6, 5), 0.125)
    probability[0, :, end] = 0.5  # so that b, c and d cost log 8 each, an end log 2
    losses = target_losses(probability.log(), ids)
    assert losses.shape == (1, 5)
    expected = [math.log(x) for x in (8, 2, 8, 8, 2)]
    np.testing.assert_allclose(losses[0], expected, rtol=1e-6)
    assert losses.mean().item() == pytest.approx(11 / 5 * math.log(2), rel=1e-6)
    without_ends = losses[0][ids[0, 1:] != end].mean().item()
    assert without_ends == pytest.approx(3 * math.log(2), rel=1e-6)  # a collator that masks ends would say so


def test_narrow_logits_are_scored_in_float32():
    logits, ids = builders.normal(2, 7, 29, dtype=torch.float32).bfloat16(), builders.tokens(2, 7)
    expected = reference.cross_entropies(array(logits)[:, :-1], ids[:, 1:].numpy())
    losses = target_losses(logits, ids)
    assert losses.dtype == torch.float32
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 39, 40, 79, 80, 1003])
def test_row_statistics_are_those_of_numpy_and_scipy(count):
    values = np.exp(builders.normal(count, seed=count).numpy())
    found = scores_of(values.tolist()).statistics()["rows"]
    expected = {
        "mean": values.mean(),
        "median": np.median(values),
        "trimmed_mean": scipy_stats.trim_mean(values, 0.025),
        "p99_9": np.quantile(values, 0.999),
        "max": values.max(),
        "nonfinite": 0,
    }
    spread = found.pop("std")
    assert spread is None if count == 1 else spread == pytest.approx(values.std(ddof=1), rel=1e-12)
    assert found == pytest.approx(expected, rel=1e-12)
    assert count < 40 or abs(found["trimmed_mean"] / found["mean"] - 1) > 1e-3


def test_three_rows_of_ten_thousand_make_the_mean_and_nothing_else():
    values = np.full(10_000, 2.5) + 0.1 * builders.normal(10_000).numpy()
    values[[17, 5000, 9999]] = [4e5, 5e5, 3.7e5]
    scores = scores_of(values.tolist())
    found = scores.statistics()["rows"]
    assert found["mean"] > 100
    assert found["median"] == pytest.approx(2.5, abs=0.01)
    assert found["trimmed_mean"] == pytest.approx(2.5, abs=0.01)
    assert found["p99_9"] < 3
    assert scores.worst(4)[:3] == [(5000, 5e5), (17, 4e5), (9999, 3.7e5)]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_rows_that_are_not_finite_are_counted_named_and_leave_no_mean(bad):
    scores = scores_of([3.0, bad, 1.0, 2.0, bad], tokens=[1.0, bad, 2.0, 1.5, 1.0])
    found = scores.statistics()
    nothing = {"mean", "trimmed_mean", "max", "std", "p99_9"}
    assert {key for key, value in found["rows"].items() if value is None} == nothing
    assert (found["rows"]["nonfinite"], found["rows"]["median"]) == (2, 3.0)
    assert found["tokens"] == {"mean": None, "median": pytest.approx(1.5, rel=RESOLUTION), "p99_9": None}
    assert scores.worst(3) == [(1, None), (4, None), (0, 3.0)]


def test_the_worst_rows_are_ten_and_fewer_where_there_are_fewer():
    values = [float(x) for x in range(25)]
    assert [index for index, _ in scores_of(values).worst()] == list(range(24, 14, -1))
    assert scores_of([2.0, 2.0]).worst() == [(0, 2.0), (1, 2.0)]


def test_modes_are_eval_inside_and_each_modules_own_after_and_no_state_moves():
    model, modes = gpt2().train(), []
    model.transformer.h[1].eval()  # as a user may freeze a part
    before = [module.training for module in model.modules()]
    state = builders.snapshot(model.state_dict())
    model.transformer.register_forward_pre_hook(lambda m, _: modes.append((m.training, torch.is_grad_enabled())))
    first = score_rows(model, rows_of(5), batch=2, device=CPU)
    assert modes == [(False, False)] * 3
    assert [module.training for module in model.modules()] == before
    assert builders.snapshot(model.state_dict()) == state
    again = score_rows(model, rows_of(5), batch=2, device=CPU)
    assert torch.equal(first.rows, again.rows)  # dropout would part them


def test_modes_are_restored_after_an_error():
    model = gpt2().train()
    with pytest.raises(IndexError):  # an id that the model does not have
        score_rows(model, rows_of(3).long() + VOCABULARY, batch=2, device=CPU)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("shape", [(0, 5), (3, 1), (4,)])
def test_nothing_to_score_is_refused(shape):
    with pytest.raises(ValueError, match="n >= 1 and T >= 2"):
        score_rows(gpt2(), torch.zeros(shape, dtype=torch.int64), batch=2, device=CPU)


class Held(TorchDispatchMode):
    """Bytes of storage that operations made and that are still held, and their peak."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                size = tensor.untyped_storage().nbytes()
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(tensor, self.free, size)
        return out

    def free(self, size):
        self.now -= size


def test_peak_memory_grows_by_the_losses_that_are_kept_and_no_more():
    model, few, many = gpt2().eval(), 8, 72

    def scored(rows):
        score_rows(model, rows, batch=4, device=CPU)

    @torch.no_grad()
    def gathered(rows):
        parts = [target_losses(model(input_ids=some.long()).logits, some.long()) for some in rows.split(4)]
        assert len(torch.cat(parts)) == len(rows)

    def growth(run):
        peaks = []
        for count in (few, many):
            rows = rows_of(count)
            with Held() as held:
                run(rows)
            peaks.append(held.peak)
        return peaks[1] - peaks[0]

    losses = 4 * (CONTEXT - 1) * (many - few)  # float32, of every target
    assert growth(scored) == 8 * (many - few) + losses
    assert growth(gathered) >= losses
