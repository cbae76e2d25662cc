"""The packed decoder against the one it was packed from, and as one graph for all positions."""

import builders
import pytest
import torch
from builders import close, decoder, tokens
from torch import nn
from torch._dynamo.testing import CompileCounter

from tapernorm.folding import fold
from tapernorm.models.decode import decode_step, prefill
from tapernorm.models.decoder import RotaryTable
from tapernorm.models.kv_cache import KVCache
from tapernorm.models.packed_decoder import PackedDecoder
from tapernorm.models.packed_linear import PackedLinear


def folded(*, fused=True, **options):
    gated, _ = builders.calibrated(**options)
    return fold(gated, fused=fused)[0].requires_grad_(False)


def allocate(model, *, batch=2, dtype=torch.float64):
    return KVCache.allocate(model.config, batch=batch, capacity=10, dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("norm", builders.NORMS)
@pytest.mark.parametrize("n_kv_head", [1, 3])
@torch.no_grad()
def test_packed_weights_are_the_unpacked_ones_stacked(norm, n_kv_head):
    model = folded(final=True, model_options={"norm": norm, "n_kv_head": n_kv_head})
    for block, packed in zip(model.model.layers, PackedDecoder(model).blocks, strict=True):
        parts = {
            packed.qkv: [getattr(block.self_attn, f"{n}_proj") for n in "qkv"],
            packed.gate_up: [block.mlp.gate_proj, block.mlp.up_proj],
        }
        for stacked, layers in parts.items():
            assert torch.equal(stacked.weight, torch.cat([layer.weight for layer in layers]))
            assert (stacked.bias is None) == (norm == "rmsnorm")  # a folded LayerNorm leaves biases
            if stacked.bias is not None:
                assert torch.equal(stacked.bias, torch.cat([layer.bias for layer in layers]))
        assert packed.out.weight.data_ptr() == block.self_attn.o_proj.weight.data_ptr()  # shared, not copied
        assert packed.down.weight.data_ptr() == block.mlp.down_proj.weight.data_ptr()


@torch.no_grad()
def test_one_bias_among_stacked_maps_is_kept_and_the_others_are_zero():
    model = decoder()
    mlp = model.model.layers[0].mlp
    mlp.up_proj.bias = nn.Parameter(builders.normal(20, seed=4))
    packed = PackedDecoder(model)
    assert torch.equal(
        packed.blocks[0].gate_up.bias, torch.cat([torch.zeros(20, dtype=torch.float64), mlp.up_proj.bias])
    )
    assert packed.blocks[1].gate_up.bias is None
    assert close(packed(tokens()), model(tokens())[:, -1])
    packed.blocks[0].gate_up.bias.zero_()
    assert not close(packed(tokens()), model(tokens())[:, -1], 1e-3)


@pytest.mark.parametrize("g", builders.GATES)
@torch.no_grad()
def test_without_a_cache_it_gives_the_last_logits(g):
    model, _ = builders.calibrated(g)
    assert close(PackedDecoder(model)(tokens()), model(tokens())[:, -1])
    assert not close(PackedDecoder(model)(tokens()), model(tokens())[:, -2], 1e-3)


def test_packing_leaves_the_source_as_it_was():
    model, driver = builders.calibrated(0.37)
    model.train()
    before, modes = builders.snapshot(model.state_dict()), [m.training for m in model.modules()]
    packed = PackedDecoder(model)
    prefill(packed, tokens(2, 5), cache := allocate(model))
    decode_step(packed, tokens(2, 1)[:, 0], cache, 5)
    assert builders.snapshot(model.state_dict()) == before
    assert [m.training for m in model.modules()] == modes  # its norms still observe
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    assert driver.gate.item() == pytest.approx(0.37)
    with torch.no_grad():
        packed.blocks[0].qkv.weight.zero_()
    assert builders.snapshot(model.state_dict()) == before


def test_packed_weights_are_leaves_without_a_graph_behind_them():
    packed = PackedDecoder(decoder())  # whose parameters require gradients
    assert all(p.is_leaf for p in packed.parameters())
    assert not packed.blocks[0].qkv.weight.requires_grad


def test_a_tied_head_stays_tied():
    packed = PackedDecoder(decoder(tie_head=True))
    assert packed.head.weight.data_ptr() == packed.embed.weight.data_ptr()
    untied = PackedDecoder(decoder())
    assert untied.head.weight.data_ptr() != untied.embed.weight.data_ptr()


def test_norms_that_are_gone_are_not_called():
    packed = PackedDecoder(folded(final=True))
    assert packed.norm is None
    assert all(b.attention_norm is None and b.mlp_norm is None for b in packed.blocks)
    kinds = {type(module) for module in packed.modules() if not list(module.children())}
    assert kinds == {PackedLinear, nn.Embedding, RotaryTable}


def test_bfloat16_decodes_close_to_float64():
    model = folded()
    exact = model(tokens(2, 8))[:, 5:]
    packed = PackedDecoder(model.bfloat16())
    cache, ids = allocate(model, dtype=torch.bfloat16), tokens(2, 8)
    found = [prefill(packed, ids[:, :6], cache)]
    found += [decode_step(packed, ids[:, t], cache, t) for t in (6, 7)]
    uncached = model(ids)[:, 5:].double()
    error, own = ((x - exact).square().mean().sqrt() for x in (torch.stack(found, 1).double(), uncached))
    assert 0 < error < 1.5 * own  # rounding as in the uncached model


# --- one graph ---


def steps(packed, ids, start, step, place):
    cache = allocate(packed, batch=len(ids))
    prefill(packed, ids[:, :start], cache)
    return torch.stack([step(packed, ids[:, t], cache, place(t)) for t in range(start, ids.shape[1])], dim=1)


def compiled(counter):
    torch._dynamo.reset()

    def step(packed, column, cache, position):
        return packed(column[:, None], cache, position)

    return torch.compile(step, backend=counter, fullgraph=True, dynamic=False)


@pytest.mark.parametrize("form", ["gated", "unfused", "fused"])
def test_one_graph_serves_every_tensor_position(form):
    model = builders.calibrated()[0].requires_grad_(False) if form == "gated" else folded(fused=form == "fused")
    packed, ids, counter = PackedDecoder(model), tokens(2, 9), CompileCounter()
    with torch.inference_mode():
        found = steps(packed, ids, 3, compiled(counter), torch.tensor)
        eager = steps(packed, ids, 3, decode_step, int)
    assert counter.frame_count == 1
    assert close(found, eager, 1e-10)
    assert close(eager, model(ids)[:, 3:], 1e-10)


def test_int_positions_would_compile_again_and_again():
    packed, counter = PackedDecoder(folded()), CompileCounter()
    with torch.inference_mode():
        steps(packed, tokens(2, 7), 3, compiled(counter), int)
    assert counter.frame_count == 4
