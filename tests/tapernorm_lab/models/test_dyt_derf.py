"""DyT and Derf against NumPy, in the decoder, through its store, and in the decoding that is timed."""

import json
import math

import numpy as np
import pytest
import torch
from builders import NORMS, array, close, decoder, normal, randomise, snapshot, tokens, uniform

from tapernorm.architectures import architecture_of, has_tied_head
from tapernorm.checkpoints.store import load, save
from tapernorm.folding import fold
from tapernorm.models.decode import compiled_step, decode_step, prefill
from tapernorm.models.decoder import Decoder
from tapernorm.models.kv_cache import KVCache
from tapernorm.models.packed_decoder import PackedDecoder
from tapernorm.norms import is_norm
from tapernorm.taper import attach
from tapernorm.util.compiler import has_compiler
from tapernorm.util.errors import UserError
from tapernorm_lab.models.dyt_derf import (
    REPLACEMENTS,
    DynamicErf,
    ScaledEmbedding,
    replace_norms,
    scale_embedding,
)

every_kind = pytest.mark.parametrize("kind", REPLACEMENTS)


def erf(x):
    return np.vectorize(math.erf)(x)


def random_replacement(kind, width=7):
    replacement = REPLACEMENTS[kind](width, 0.4).double()
    with torch.no_grad():
        replacement.weight.copy_(uniform(width, seed=1))
        replacement.bias.copy_(normal(width, seed=2))
        if isinstance(replacement, DynamicErf):
            replacement.shift.fill_(-0.31)
    return replacement


def by_hand(replacement, x):
    alpha, gamma, beta = (array(p) for p in (replacement.alpha, replacement.weight, replacement.bias))
    if isinstance(replacement, DynamicErf):
        return gamma * erf(alpha * x + array(replacement.shift)) + beta
    return gamma * np.tanh(alpha * x) + beta


def replaced(kind, *, scaled=True, dtype=torch.float32, **options) -> Decoder:
    """A random decoder with a replacement in the place of every norm, none of its parameters where it started."""
    model = decoder(dtype=torch.float64, **options)
    replace_norms(model, kind, alpha=0.5, attention_alpha=0.8)
    if scaled:
        scale_embedding(model)
    randomise(model, 4)
    return model.to(dtype)


@every_kind
def test_agrees_with_the_formula(kind):
    replacement, x = random_replacement(kind), 2 * normal(3, 5, 7, seed=3)
    assert close(replacement(x), by_hand(replacement, array(x)))


def test_each_formula_is_told_from_its_neighbours():
    x = 2 * normal(3, 7, seed=3)
    tanh, shifted = random_replacement("dyt"), random_replacement("derf")
    alpha, gamma, beta = (array(p) for p in (shifted.alpha, shifted.weight, shifted.bias))
    assert not close(tanh(x), gamma * erf(array(tanh.alpha * x)) + beta, 1e-2)
    assert not close(shifted(x), gamma * erf(alpha * array(x)) + beta, 1e-2)  # s ignored
    assert not close(shifted(x), gamma * erf(alpha * (array(x) + array(shifted.shift))) + beta, 1e-2)  # s inside alpha
    assert not close(tanh(x), gamma * np.tanh(array(x)) + beta, 1e-2)


@every_kind
def test_every_parameter_has_the_gradient_of_the_formula(kind):
    replacement = random_replacement(kind)
    x = normal(2, 7, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda *_: replacement(x), (x, *replacement.parameters()))


@every_kind
@pytest.mark.parametrize("norm", NORMS)
def test_a_replacement_takes_every_norms_place_and_alpha_starts_apart_before_attention(kind, norm):
    model = decoder(norm=norm)
    matrices = {name: p.clone() for name, p in model.named_parameters() if p.ndim == 2}
    replace_norms(model, kind, alpha=0.3, attention_alpha=0.9)
    places = {name: model.get_submodule(name) for name in architecture_of(model).norms(model)}
    assert len(places) == 5
    assert {type(place) for place in places.values()} == {REPLACEMENTS[kind]}
    assert not any(is_norm(module) for module in model.modules())
    for name, place in places.items():
        assert place.alpha.item() == pytest.approx(0.9 if name.endswith("input_layernorm") else 0.3)
        assert place.alpha.dtype is torch.float64
        assert torch.equal(place.weight, torch.ones_like(place.weight))
        assert not place.bias.any()
    assert all(torch.equal(model.get_parameter(name), p) for name, p in matrices.items())


def test_a_decoder_of_replacements_is_the_reference_decoder_with_their_formula(monkeypatch):
    """The norms of a plain decoder are made to compute the formula, and nothing else of it changes."""
    model = replaced("derf", scaled=False, dtype=torch.float64)
    plain = decoder(norm="rmsnorm")
    state = {k: v for k, v in model.state_dict().items() if not k.endswith(("alpha", "shift", "norm.bias"))}
    plain.load_state_dict({k: v for k, v in state.items() if k in plain.state_dict()})
    for name in architecture_of(model).norms(model):
        replacement = model.get_submodule(name)
        monkeypatch.setattr(
            plain.get_submodule(name),
            "forward",
            lambda x, norm=replacement: torch.tensor(by_hand(norm, array(x))),
        )
    assert close(model(tokens()), plain(tokens()))
    other = replaced("dyt", scaled=False, dtype=torch.float64)
    assert not close(other(tokens()), plain(tokens()), 1e-2)


@pytest.mark.parametrize("tie_head", [False, True])
def test_the_embedding_scale_starts_at_the_root_of_the_width_and_the_head_does_not_see_it(tie_head):
    model = decoder(tie_head=tie_head)
    read: list[torch.Tensor] = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: read.append(args[0]))
    model(tokens())
    embedding = scale_embedding(model)
    assert embedding.scale.item() == pytest.approx(math.sqrt(12))
    assert scale_embedding(decoder(), 64.0).scale.item() == 64.0
    with torch.no_grad():
        embedding.scale.fill_(1.7)
    model(tokens())
    assert close(read[1], 1.7 * read[0])
    assert not close(read[1], read[0], 1e-2)
    assert has_tied_head(model) == tie_head
    h = normal(3, 12)
    assert close(model.lm_head(h), h @ model.lm_head.weight.T)


@every_kind
@pytest.mark.parametrize("tie_head", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_saved_model_comes_back_bitwise(tmp_path, kind, tie_head, scaled):
    model = replaced(kind, scaled=scaled, tie_head=tie_head)
    save(model, tmp_path)
    again = load(tmp_path, Decoder)
    assert snapshot(again.state_dict()) == snapshot(model.state_dict())
    assert torch.equal(again(tokens()), model(tokens()))
    assert isinstance(again.model.embed_tokens, ScaledEmbedding) == scaled
    config = json.loads((tmp_path / "config.json").read_text())
    assert set(config["norms"].values()) == {kind}
    assert ("embedding" in config) == scaled


def test_a_plain_model_is_saved_without_a_word_of_replacements(tmp_path):
    save(decoder(dtype=torch.float32), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.keys() == {"format", "architecture", "config", "norms"}


@every_kind
def test_cached_decoding_gives_the_logits_of_the_whole_text(kind):
    model = replaced(kind, dtype=torch.float64).requires_grad_(False)
    expected = model(tokens())  # (B, T, V)
    packed = PackedDecoder(model)
    cache = KVCache.allocate(model.config, batch=4, capacity=7, dtype=torch.float64, device=torch.device("cpu"))
    found = [prefill(packed, tokens()[:, :3], cache)]
    found += [decode_step(packed, tokens()[:, t], cache, t) for t in range(3, 7)]
    assert close(torch.stack(found, dim=1), expected[:, 2:])


@every_kind
@pytest.mark.skipif(not has_compiler(torch.device("cpu")), reason="torch.compile needs a C++ compiler on a CPU")
def test_traced_decoding_gives_the_logits_of_the_whole_text(kind, monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **options: compile(step, backend="aot_eager", **options))
    model = replaced(kind).requires_grad_(False)
    expected = model(tokens())
    packed = PackedDecoder(model)
    cache = KVCache.allocate(model.config, batch=4, capacity=7, dtype=torch.float32, device=torch.device("cpu"))
    prefill(packed, tokens()[:, :3], cache)
    step = compiled_step(packed, cache)
    for t in range(3, 7):
        assert close(step(tokens()[:, t], torch.tensor(t)), expected[:, t], 2e-5)


@every_kind
def test_a_replacement_is_no_norm_to_taper_or_to_fold(kind):
    model = replaced(kind)
    with pytest.raises(UserError, match=f"cannot taper a {REPLACEMENTS[kind].__name__}"):
        attach(model)
    with pytest.raises(UserError, match="no norm of this model is tapered"):
        fold(model)


def test_only_plain_norms_are_replaced():
    model = decoder()
    attach(model, sites=["*.1.input_layernorm"])
    before = [type(module) for module in model.modules()]
    with pytest.raises(UserError, match=r"layers\.1\.input_layernorm is a TaperRMSNorm"):
        replace_norms(model, "dyt", alpha=0.5, attention_alpha=0.5)
    assert [type(module) for module in model.modules()] == before


@every_kind
def test_the_final_gain_alone_starts_where_it_is_told_to(kind):
    model, published = decoder(), decoder()
    replace_norms(model, kind, alpha=0.5, attention_alpha=0.8, final_gain=8.0)
    replace_norms(published, kind, alpha=0.5, attention_alpha=0.8)
    found, expected = dict(model.named_parameters()), dict(published.named_parameters())
    different = {name for name, p in found.items() if not torch.equal(p, expected[name])}
    assert different == {"model.norm.weight"}
    assert torch.equal(found["model.norm.weight"], torch.full_like(expected["model.norm.weight"], 8.0))


@every_kind
def test_logits_are_bounded_by_the_final_gain_times_the_rows_of_the_head(kind):
    """Why narrow models need another start than 1: the bound grows with gamma and with the width."""
    largest = []
    for gain in (1.0, 8.0):
        model = decoder()
        replace_norms(model, kind, alpha=50.0, attention_alpha=50.0, final_gain=gain)
        bound = gain * array(model.lm_head.weight.abs().sum(-1))
        logits = np.abs(array(model(tokens())))
        assert np.all(logits <= bound + 1e-9)
        largest.append(bound.max())
    assert largest[1] == pytest.approx(8 * largest[0])
