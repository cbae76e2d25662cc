"""A decoder beyond its training context against NumPy's, whose rotary angles go on."""

import builders
import numpy as np
import pytest
import reference
import torch
from builders import array

from tapernorm.models.decoder import RotaryTable, lengthen

SHORT, LONG = 11, 23  # tokens


def numpy_logits(model, ids, cos, sin):
    config = model.config
    norms = {name: module for name, module in model.named_modules() if name.endswith("norm")}
    return reference.decoder(
        ids.numpy(),
        {name: array(value) for name, value in model.state_dict().items()},
        lambda name, h: builders.reference_norm(norms[name], h),
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_kv_head=config.n_kv_head,
        cos=cos,
        sin=sin,
    )


def test_positions_beyond_the_context_turn_as_in_numpy():
    model = builders.decoder(context=SHORT).eval()
    ids = builders.tokens(1, LONG)
    with pytest.raises(ValueError, match="23 tokens exceed the context of 11"):
        model(ids)
    lengthen(model, LONG)
    with torch.no_grad():
        found = array(model(ids)[0])
    cos, sin = reference.rotary_tables(LONG, model.config.head_dim, model.config.rope_theta)
    np.testing.assert_allclose(found, numpy_logits(model, ids[0], cos, sin), rtol=0, atol=2e-6)  # angles are float32
    held = np.minimum(np.arange(LONG), SHORT - 1)  # positions that stop at the last one trained on
    wrong = numpy_logits(model, ids[0], cos[held], sin[held])
    np.testing.assert_allclose(found[:SHORT], wrong[:SHORT], rtol=0, atol=2e-6)
    assert np.abs(found[SHORT:] - wrong[SHORT:]).max() > 0.01


def test_nothing_changes_at_the_positions_that_it_had():
    model = builders.decoder(context=SHORT, dtype=torch.float32).eval()
    ids, weights = builders.tokens(3, SHORT), builders.snapshot(model.state_dict())
    with torch.no_grad():
        before = model(ids)
        lengthen(model, LONG)
        assert torch.equal(model(ids), before)
    assert builders.snapshot(model.state_dict()) == weights
    assert model.config.context == LONG
    tables = {id(module) for module in model.modules() if isinstance(module, RotaryTable)}
    assert len(tables) == 1  # all layers share it
    with pytest.raises(ValueError, match="takes 23 tokens, and 11 are fewer"):
        lengthen(model, SHORT)
