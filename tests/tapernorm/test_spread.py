"""The spread of per-token scales, against the NumPy reference's own passes through the same models."""

import copy
import math

import numpy as np
import pytest
import reference
import torch
from builders import NORMS, array, decoder, reference_decoder, reference_norm, snapshot
from mixed import close_gate
from tiny_models import CASES, tiny

from tapernorm import spread
from tapernorm.architectures import architecture_of
from tapernorm.folding import fold
from tapernorm.norms import kind_of
from tapernorm.taper import attach
from tapernorm.util.errors import UserError
from tapernorm.util.rng import generator

MARKED = 7  # a token whose embedding is made large
ROUNDING = 3e-7  # of float32, in which scales are kept


def rows_of(count=7, length=9):
    """Rows without the marked token."""
    rows = torch.randint(28, (count, length), generator=generator(3, "rows"))
    return torch.where(rows == MARKED, 28, rows)


def reference_scales(model, rows):
    """Norm -> scales (R, T) in the reference's own forward pass of a decoder of ours or a GPT-2."""
    found = {}

    def norm_of(name, h):
        norm = model.get_submodule(name)
        scale = reference.sigma if kind_of(norm).centres else reference.rms
        found.setdefault(name, []).append(scale(h, norm.eps)[..., 0])
        output = reference_norm(norm, h)
        return (output, output) if name.endswith("ln_1") else output

    state = {name: array(value) for name, value in model.state_dict().items()}
    for row in rows:
        if "transformer.wte.weight" in state:
            reference.gpt2(row.numpy(), state, norm_of, n_layer=model.config.n_layer, n_head=model.config.n_head)
        else:
            reference_decoder(model, row, norm=norm_of)
    return {name: np.stack(scales) for name, scales in found.items()}


MODELS = {
    "rmsnorm": lambda: decoder(norm="rmsnorm"),
    "layernorm": lambda: decoder(norm="layernorm"),
    "gpt2": lambda: tiny("gpt2"),
}


@pytest.mark.parametrize("tapered", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_statistic_is_that_of_the_scales_of_the_reference(name, tapered):
    model, rows = MODELS[name](), rows_of()
    if tapered:
        close_gate(model)
    expected = reference_scales(model, rows)
    found = spread.measure(model, rows, batch=3)
    assert list(found) == list(expected) == architecture_of(model).norms(model)
    for norm, scales in expected.items():
        one, later = found[norm], scales[:, 1:]
        assert one.norm == norm
        assert (one.tokens, one.nonfinite) == (scales.size, 0)
        assert one.first == pytest.approx(np.median(scales[:, 0]), rel=ROUNDING)
        for q, value in one.quantiles.items():
            assert value == pytest.approx(np.quantile(later, q), rel=ROUNDING)
        assert one.largest == pytest.approx(later.max(), rel=ROUNDING)
        row, position = np.unravel_index(later.argmax(), later.shape)
        worst = one.worst[0]
        assert (worst.row, worst.position, worst.token) == (row, position + 1, rows[row, position + 1])
        assert [o.scale for o in one.worst] == pytest.approx(
            np.sort(later, axis=None)[: -spread.WORST - 1 : -1], rel=1e-6
        )


def test_counting_position_0_in_or_another_eps_would_be_seen():
    """The control of the test above."""
    model, rows = decoder(norm_eps=0.1), rows_of()
    scales = reference_scales(model, rows)["model.layers.1.input_layernorm"]
    found = spread.measure(model, rows)["model.layers.1.input_layernorm"]
    assert found.median == pytest.approx(np.median(scales[:, 1:]), rel=ROUNDING)
    assert abs(np.median(scales) / found.median - 1) > 1e-3
    without = np.sqrt(scales**2 - 0.1)
    assert abs(np.median(without[:, 1:]) / found.median - 1) > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_every_class_is_measured_before_and_after_folding_alike(name):
    model, rows = tiny(name, dtype=torch.float32), rows_of()
    whole = copy.deepcopy(model)
    close_gate(model)
    tapered = spread.measure(model, rows)
    folded, _ = fold(model)
    gone = spread.measure(folded, rows, like=whole.to("meta"))
    for norm, one in tapered.items():
        assert gone[norm].median == pytest.approx(one.median, rel=1e-3)
        assert gone[norm].first == pytest.approx(one.first, rel=1e-3)


def test_a_norm_that_is_gone_has_no_scale_unless_told_what_it_was():
    model = decoder()
    close_gate(model)
    folded, _ = fold(model)
    with pytest.raises(UserError, match=r"model\.layers\.0\.input_layernorm is a Identity .*`like`"):
        spread.measure(folded, rows_of())


@pytest.mark.parametrize("norm", NORMS)
def test_the_model_stays_as_it_was(norm):
    model = decoder(norm=norm).train()
    taper = attach(model, ema_rate=0.1)
    before, statistics = snapshot(model.state_dict()), snapshot(taper.state_dict())
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    with taper.observe():
        spread.measure(model, rows_of())
    assert snapshot(model.state_dict()) == before
    assert snapshot(taper.state_dict()) == statistics
    assert all(module.training for module in model.modules())
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks


def marked(factor, places, rows):
    """A decoder in which one token's embedding is `factor` times as large as the others, and rows that hold it."""
    model = decoder()
    with torch.no_grad():
        model.model.embed_tokens.weight[MARKED] *= factor
    rows = rows.clone()
    for row, position in places:
        rows[row, position] = MARKED
    return model, rows


def test_an_outlier_token_is_found_by_place_and_id_and_makes_a_tail():
    model, rows = marked(50.0, [(2, 5)], rows_of())
    found = spread.measure(model, rows)["model.layers.0.input_layernorm"]
    worst = found.worst[0]
    assert (worst.row, worst.position, worst.token) == (2, 5, MARKED)
    assert found.misfits == ("tail",)
    plain = spread.measure(*marked(1.0, [(2, 5)], rows_of()))["model.layers.0.input_layernorm"]
    assert plain.misfits == ()


def test_an_outlier_at_the_first_position_stands_apart():
    model, rows = marked(50.0, [(row, 0) for row in range(7)], rows_of())
    found = spread.measure(model, rows)["model.layers.0.input_layernorm"]
    assert found.misfits == ("first",)
    assert all(outlier.position > 0 for outlier in found.worst)
    one, rows = marked(50.0, [(3, 0)], rows_of())  # one row of seven is not the median
    assert spread.measure(one, rows)["model.layers.0.input_layernorm"].misfits == ()


@pytest.mark.parametrize(("factor", "misfits"), [(0.99, ()), (1.01, ("first", "tail"))])
def test_the_rule_compares_with_the_median(factor, misfits):
    quantiles = dict.fromkeys(spread.QUANTILES, 3.0) | {0.999: factor * 3.0 * spread.TAIL_LIMIT}
    first = factor * 3.0 * spread.FIRST_LIMIT
    made = spread.ScaleSpread("n", tokens=9, first=first, quantiles=quantiles, nonfinite=0, worst=())
    assert made.misfits == misfits


def test_what_is_not_finite_counts_as_larger_than_any_number():
    model, rows = decoder(dtype=torch.float32), rows_of(2, 9)
    rows[1, 8] = MARKED
    with torch.no_grad():
        model.model.embed_tokens.weight[MARKED] = 1e30  # its square is beyond float32
    found = spread.measure(model, rows)["model.layers.0.input_layernorm"]
    assert found.nonfinite == 1
    assert found.largest == math.inf
    assert found.p99_9 == math.inf  # between the last number and infinity
    assert math.isfinite(found.quantiles[0.75])
    assert found.misfits == ("tail",)


@pytest.mark.parametrize("shape", [(0, 4), (3, 1), (3,)])
def test_rows_that_cannot_be_measured_are_refused(shape):
    with pytest.raises(ValueError, match=r"rows must be \(R, T\)"):
        spread.measure(decoder(), torch.zeros(shape, dtype=torch.int64))
