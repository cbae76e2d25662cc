"""Decoding on the cache against the full forward pass, at every position, for every split, in float64."""

import builders
import pytest
import torch
from builders import close, decoder, shape, tokens

from tapernorm.folding import fold
from tapernorm.models.decode import decode_step, pad_left, prefill
from tapernorm.models.kv_cache import KVCache
from tapernorm.models.packed_decoder import PackedDecoder
from tapernorm.util.errors import UserError

CAPACITY = 11
HEADS = {"grouped": 1, "multi-head": 3}
FORMS = ("plain", "g = 0.37", "g = 0", "unfused", "fused")
LENGTHS = (4, 7, 5)  # of left-padded prompts


def model_in(form, *, final=False, **options):
    """One random model as it was trained, in the taper, at its end, or folded."""
    if form == "plain":
        return decoder(**options).requires_grad_(False)
    gated, _ = builders.calibrated(0.37 if form == "g = 0.37" else 0.0, final=final, model_options=options)
    if form in ("unfused", "fused"):
        gated, _ = fold(gated, fused=form == "fused")
    return gated.requires_grad_(False)


def dirty_cache(model, *, batch, capacity=CAPACITY, pads=None):
    """A cache full of what nobody must look at."""
    cache = KVCache.allocate(
        model.config, batch=batch, capacity=capacity, dtype=torch.float64, device=torch.device("cpu"), pads=pads
    )
    for index, tensor in enumerate([*cache.keys, *cache.values]):
        tensor.copy_(9 * builders.normal(*tensor.shape, seed=index))
    return cache


def place(position, kind):
    return torch.tensor(position) if kind == "tensor" else position


def cached_logits(model, ids, split, *, kind="int", pads=None, shift=0, chunk=None):
    """Logits of the columns split-1 ... of ids (B, T): prefill `split` of them, in chunks, then one at a time."""
    packed, cache = PackedDecoder(model), dirty_cache(model, batch=len(ids), pads=pads)
    chunk = chunk or split
    for start in range(0, split, chunk):
        columns = ids[:, start : min(start + chunk, split)]
        logits = prefill(packed, columns, cache) if start == 0 else packed(columns, cache, place(start, kind))
    rest = range(split, ids.shape[1])
    steps = [decode_step(packed, ids[:, column], cache, place(column + shift, kind)) for column in rest]
    return torch.stack([logits, *steps], dim=1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("final", [False, True], ids=["internal", "all"])
@pytest.mark.parametrize("norm", builders.NORMS)
@pytest.mark.parametrize("n_kv_head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("kind", ["int", "tensor"])
def test_prefill_and_decode_equal_the_full_forward_at_every_split(form, final, norm, n_kv_head, kind):
    model, ids = model_in(form, final=final, norm=norm, n_kv_head=n_kv_head), tokens(3, 8)
    full = model(ids)
    for split in range(1, 9):
        assert close(cached_logits(model, ids, split, kind=kind), full[:, split - 1 :], 1e-10), split


@pytest.mark.parametrize("form", ["plain", "fused"])
@pytest.mark.parametrize("kind", ["int", "tensor"])
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_prompt_may_be_prefilled_in_pieces(form, kind, chunk):
    model, ids = model_in(form), tokens(3, 9)
    assert close(cached_logits(model, ids, 7, kind=kind, chunk=chunk), model(ids)[:, 6:], 1e-10)


@pytest.mark.parametrize("kind", ["int", "tensor"])
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_wrong_position_is_seen(kind, shift):
    model, ids = model_in("fused"), tokens(3, 8)
    assert not close(cached_logits(model, ids, 4, kind=kind, shift=shift), model(ids)[:, 3:], 1e-3)


@pytest.mark.parametrize("wider", [-1, 1])
def test_a_mask_off_by_one_column_is_seen(monkeypatch, wider):
    model, ids = model_in("fused"), tokens(3, 8)
    right = PackedDecoder._mask
    monkeypatch.setattr(PackedDecoder, "_mask", lambda self, columns, *rest: right(self, columns + wider, *rest))
    assert not close(cached_logits(model, ids, 4, kind="tensor"), model(ids)[:, 3:], 1e-3)


# --- left padding ---


def padded():
    """(rows of different lengths, their left-padded columns (B, T), pads)."""
    rows = [tokens(1, length + 3, seed=length)[0] for length in LENGTHS]  # 3 to be decoded
    ids, pads = pad_left([row.tolist() for row in rows], pad=0)
    return rows, ids, pads


def largest_error(model, split, *, pads=None, **options):
    """Of any column that is no pad, against each row alone in the full forward."""
    rows, ids, true_pads = padded()
    found = cached_logits(model, ids, split, pads=true_pads if pads is None else pads, **options)
    assert torch.isfinite(found).all()  # those of pads too
    errors = []
    for row, pad, logits in zip(rows, true_pads.tolist(), found, strict=True):
        alone = model(row[None])[0]  # row column j stands in column pad + j, at found[pad + j - (split - 1)]
        first = max(pad, split - 1)
        errors.append((logits[first - split + 1 :] - alone[first - pad :]).abs().max() / alone.abs().max())
    return max(errors).item()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("norm", builders.NORMS)
@pytest.mark.parametrize("n_kv_head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("kind", ["int", "tensor"])
def test_each_padded_row_equals_itself_alone_at_every_split(form, norm, n_kv_head, kind):
    model = model_in(form, final=True, norm=norm, n_kv_head=n_kv_head)
    for split in range(1, 11):
        assert largest_error(model, split, kind=kind) < 1e-10, split


@pytest.mark.parametrize("kind", ["int", "tensor"])
def test_padded_prompts_may_be_prefilled_in_pieces(kind):
    assert largest_error(model_in("g = 0"), 7, kind=kind, chunk=2) < 1e-10


@pytest.mark.parametrize("wrong", [[2, 0, 2], [4, 0, 2], [0, 0, 0]], ids=["one less", "one more", "none"])
def test_a_wrong_number_of_pads_is_seen(wrong):
    _, _, pads = padded()
    assert pads.tolist() == [3, 0, 2]
    assert largest_error(model_in("g = 0"), 7, pads=torch.tensor(wrong)) > 1e-3


def test_pads_of_zero_cost_no_mask():
    assert dirty_cache(decoder(), batch=2, pads=torch.tensor([0, 0])).pads is None
    assert dirty_cache(decoder(), batch=2, pads=torch.tensor([0, 1])).pads is not None


# --- memory ---


@pytest.mark.parametrize("kind", ["int", "tensor"])
def test_the_cache_is_allocated_once_and_written_in_place(kind):
    model = model_in("fused", n_layer=3)
    packed, cache, ids = PackedDecoder(model), dirty_cache(model, batch=2), tokens(2, 9)
    held = [*cache.keys, *cache.values]
    before = [(t.data_ptr(), t.untyped_storage().nbytes(), t.shape) for t in held]
    prefill(packed, ids[:, :4], cache)
    for column in range(4, 9):
        old = [t.clone() for t in held]
        decode_step(packed, ids[:, column], cache, place(column, kind))
        for was, now in zip(old, held, strict=True):
            changed = (was != now).flatten(0, 1).any(0).any(-1)
            assert changed.nonzero().flatten().tolist() == [column]
    assert [(t.data_ptr(), t.untyped_storage().nbytes(), t.shape) for t in [*cache.keys, *cache.values]] == before
    assert len(held) == 6
    assert cache.capacity == CAPACITY
    assert cache.nbytes == 3 * 2 * 2 * 1 * CAPACITY * 4 * 8  # layers, k and v, batch, heads, slots, head size, bytes


def test_a_cache_beyond_the_context_is_refused():
    assert dirty_cache(decoder(context=6), batch=1, capacity=6).capacity == 6
    with pytest.raises(UserError, match="a cache of 7 tokens exceeds the model's context of 6: shorten the prompt"):
        dirty_cache(decoder(context=6), batch=1, capacity=7)


@pytest.mark.parametrize(("split", "capacity"), [(5, 5), (1, 1)])
@pytest.mark.parametrize(("kind", "error"), [("int", ValueError), ("tensor", IndexError)])
def test_a_step_past_the_end_of_the_cache_is_refused(split, capacity, kind, error):
    model = model_in("plain")
    packed, cache = PackedDecoder(model), dirty_cache(model, batch=2, capacity=capacity)
    prefill(packed, tokens(2, split), cache)
    with pytest.raises(error, match=r"1 tokens at position . exceed the capacity of . tokens|out of bounds"):
        decode_step(packed, tokens(2, 1)[:, 0], cache, place(capacity, kind))


def test_a_prompt_longer_than_the_cache_and_a_batch_of_another_size_are_refused():
    model = model_in("plain")
    packed, cache = PackedDecoder(model), dirty_cache(model, batch=2, capacity=5)
    with pytest.raises(ValueError, match=r"6 tokens at position 0 exceed .* 5 tokens"):
        prefill(packed, tokens(2, 6), cache)
    with pytest.raises(ValueError, match="1 rows of tokens do not fit a cache of 2 sequences"):
        decode_step(packed, tokens(1, 1)[:, 0], cache, 3)
    with pytest.raises(ValueError, match=r"12 tokens at position 0 exceed .* 11 tokens"):
        packed(tokens(2, 12))


def test_the_cache_has_the_dtype_and_heads_of_the_model():
    config = shape(n_layer=1, n_kv_head=3)
    cache = KVCache.allocate(config, batch=2, capacity=5, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert [(t.dtype, tuple(t.shape)) for t in [*cache.keys, *cache.values]] == [(torch.bfloat16, (2, 3, 5, 4))] * 2
