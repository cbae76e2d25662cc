"""Validation cross-entropy against log-softmax in NumPy (method.md section 11)."""

import math

import builders
import numpy as np
import pytest
import reference
import torch
from builders import VOCABULARY, array

from tapernorm_lab.training import validation_loss
from tapernorm_lab.training.validation_loss import Evaluation, evaluate, scoring_windows

CPU = torch.device("cpu")
TABLE = builders.normal(VOCABULARY, VOCABULARY, dtype=torch.float32)


@pytest.fixture(autouse=True)
def models_of_a_test(monkeypatch):
    """Let the score take a model whose class has no row in the table of architectures."""
    monkeypatch.setattr(validation_loss, "logits_of", lambda model, ids: model(ids))


class Lookup(torch.nn.Module):
    """Logits of each id by a table (V, V)."""

    def __init__(self, table=TABLE):
        super().__init__()
        self.table = table

    def forward(self, ids):
        return self.table[ids]


def stream(length, dtype=torch.uint16):
    return builders.tokens(1, length)[0].to(dtype)


def score(model, tokens, *, context=5, batch=2, text_bytes=17):
    return evaluate(model, tokens, text_bytes=text_bytes, context=context, batch=batch, device=CPU)


@pytest.mark.parametrize("length", [2, 5, 6, 7, 11, 21, 22, 23, 41, 44])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32])
def test_every_token_but_the_first_is_a_target_once_and_in_order(length, dtype):
    tokens = stream(length, dtype)
    windows = list(scoring_windows(tokens, context=5, batch=3))
    assert torch.cat([inputs.flatten() for inputs, _ in windows]).tolist() == tokens[:-1].tolist()
    assert torch.cat([targets.flatten() for _, targets in windows]).tolist() == tokens[1:].tolist()
    assert all(inputs.shape == targets.shape for inputs, targets in windows)
    assert all(inputs.shape[1] <= 5 and inputs.shape[0] <= 3 for inputs, _ in windows)


def test_repeated_end_of_text_targets_are_counted():
    a, b, c, d, end = 3, 4, 5, 6, 0
    tokens = torch.tensor([a, b, end, c, d, end])
    assert score(Lookup(), tokens).tokens == 5
    ((_, targets),) = scoring_windows(tokens, context=5, batch=1)
    assert targets.tolist() == [[b, end, c, d, end]]


@pytest.mark.parametrize("length", [6, 23, 44])
@pytest.mark.parametrize("batch", [1, 2, 100])
def test_mean_over_all_targets_equals_the_reference_partial_window_included(length, batch):
    tokens = stream(length)
    result = score(Lookup(), tokens, batch=batch)
    ids = array(tokens.long()).astype(int)
    per_token = reference.cross_entropies(array(TABLE)[ids[:-1]], ids[1:])
    assert result.tokens == length - 1
    assert result.ce == pytest.approx(per_token.mean(), rel=1e-6)  # summed in float32
    without_last = per_token[: (length - 1) // 5 * 5].mean()
    assert (length - 1) % 5 == 0 or result.ce != pytest.approx(without_last, rel=1e-3)


@pytest.mark.parametrize("g", [1.0, 0.0])
def test_a_decoder_scores_each_window_with_its_own_context(g):
    model, _ = builders.calibrated(g, dtype=torch.float32)
    tokens = stream(23).long()
    nats = 0.0
    for first in range(0, 22, 5):
        window = tokens[first : first + 6]
        with torch.no_grad():
            logits = array(model(window[None, :-1])[0])
        nats += reference.cross_entropies(logits, window[1:].numpy()).sum()
    assert score(model, tokens).ce == pytest.approx(nats / 22, rel=1e-5)
    assert score(model, tokens, context=11).ce != pytest.approx(nats / 22, rel=1e-4)


def test_bits_per_byte_are_total_bits_over_the_bytes_of_the_text():
    assert Evaluation(nats=8 * math.log(2), tokens=3, bytes=4).bits_per_byte == pytest.approx(2.0)
    assert Evaluation(nats=6.0, tokens=3, bytes=4).ce == 2.0
    uniform = score(Lookup(torch.zeros(VOCABULARY, 32)), stream(12), text_bytes=50)
    assert uniform.ce == pytest.approx(math.log(32))
    assert uniform.bits_per_byte == pytest.approx(11 * 5 / 50)  # 11 targets of 5 bits


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_module_is_eval_inside_and_restored_after(training):
    model, modes = builders.decoder(dtype=torch.float32).train(training), []
    model.register_forward_pre_hook(lambda module, _: modes.append((module.training, torch.is_grad_enabled())))
    score(model, stream(23))
    assert set(modes) == {(False, False)}
    assert all(module.training == training for module in model.modules())


def test_the_mode_is_restored_after_an_error():
    model = builders.decoder(dtype=torch.float32)
    with pytest.raises(ValueError, match="exceed the context"):
        score(model, stream(23), context=12)
    assert model.training


def test_bfloat16_logits_are_scored_in_float32():
    narrow = TABLE.bfloat16()
    ids = stream(44).long().numpy()
    expected = reference.cross_entropies(array(narrow)[ids[:-1]], ids[1:]).mean()
    assert score(Lookup(narrow), stream(44)).ce == pytest.approx(expected, rel=1e-6)
    rounded = torch.log_softmax(narrow[ids[:-1]], -1)[np.arange(43), ids[1:]]
    assert -rounded.double().mean().item() != pytest.approx(expected, rel=1e-5)
