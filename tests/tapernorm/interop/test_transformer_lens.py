"""TransformerLens on folded models, against the models themselves under PyTorch's own hooks; and the page on it."""

import copy
import re
import subprocess
import sys

import builders
import pytest
import torch
from doc_blocks import blocks
from offline import offline
from own_models import BOS, tokenizer
from places import ROOT
from tiny_models import CASES, gated, tiny
from torch import nn
from transformer_lens.model_bridge.generalized_components import NormalizationBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformer_lens.tools.analysis import direct_logit_attribution

from tapernorm import fold, interop
from tapernorm.architectures import architecture_of, kept_norms, logits_of
from tapernorm.interop import _lens
from tapernorm.norms import FixedScale
from tapernorm.util.errors import UserError

PAGE = ROOT / "docs/interpretability.md"
WAYS = {  # what is tapered, and whether its fold is fused
    "all": ({"final": True}, True),
    "internal": ({"final": False}, True),
    "some": ({"final": True, "sites": ["*.0.*"]}, True),
    "unfused": ({"final": True}, False),
}
NOT_THEIRS = {("phi with norms of q and k", way) for way in WAYS} | {
    ("gpt_neox, one half after the other", "some"),  # their adapter asks for biases, which a folded LayerNorm brings
    ("gpt_neox, one half after the other", "unfused"),
}
GROUPED_PHI = "phi"  # their weight processing takes its key-value heads to be as many as its heads


@pytest.fixture(autouse=True)
def no_network():
    with offline():
        yield


def folded_model(name, way="all", **overrides):
    """A folded model, its attention computed in the precisions in which TransformerLens computes it.

    That is transformers' eager form, with a softmax in float32; of a GPT-NeoX the other, wholly in the model's dtype.
    """
    options, fused = WAYS[way]
    folded = fold(gated(name, options=options, **overrides)[1], fused=fused)[0]
    folded.set_attn_implementation("sdpa" if name.startswith("gpt_neox") else "eager")
    return folded


def norm_components(bridge):
    return [module for module in bridge.modules() if isinstance(module, NormalizationBridge)]


def log_probabilities(logits):
    return logits.detach().float().log_softmax(-1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_the_bridge_is_the_folded_model_also_with_processed_weights(name, way):
    folded = folded_model(name, way)
    if (name, way) in NOT_THEIRS:
        with pytest.raises(UserError, match=r"TransformerLens cannot bridge this \w+: .+nnsight"):
            interop.transformer_lens(folded)
        return
    tokens, before = builders.tokens(), builders.snapshot(folded.state_dict())
    attention = folded.config._attn_implementation
    expected = logits_of(folded, tokens)
    lens = interop.transformer_lens(folded)
    assert builders.close(lens(tokens), expected)
    if not name.endswith("norms of q and k"):  # TransformerLens leaves those as they are
        assert len(norm_components(lens)) == len(kept_norms(folded, []))
    gone = [n for n in architecture_of(folded).norms(folded) if isinstance(folded.get_submodule(n), nn.Identity)]
    everything = len(gone) == len(architecture_of(folded).norms(folded))
    assert (lens.cfg.normalization_type is None) == everything
    assert builders.snapshot(folded.state_dict()) == before
    assert folded.config._attn_implementation == attention
    if name == GROUPED_PHI:
        return
    if (name, way) == ("gemma", "unfused"):
        with pytest.warns(UserWarning, match="does not support fold_ln"):
            lens.enable_compatibility_mode(disable_warnings=True)
    else:
        lens.enable_compatibility_mode(disable_warnings=True)
    wanted = log_probabilities(expected)  # logits are centred there, in float32
    assert builders.close(log_probabilities(lens(tokens)), wanted, 2e-6)


def test_weights_processed_for_norms_that_are_not_there_are_another_model():
    """Negative control of the test above: TransformerLens goes by the type of norm that the bridge states."""
    lens = interop.transformer_lens(folded_model("llama"))
    lens.cfg.normalization_type, lens.cfg.final_rms = "LN", False
    expected = log_probabilities(lens(builders.tokens()))
    lens.enable_compatibility_mode(disable_warnings=True)
    assert not builders.close(log_probabilities(lens(builders.tokens())), expected, 1e-2)


@pytest.mark.parametrize("norm", builders.NORMS)
@pytest.mark.parametrize("way", WAYS)
def test_our_decoder_is_bridged_as_a_llama(norm, way):
    options, fused = WAYS[way]
    model, _ = builders.calibrated(model_options={"norm": norm, "tie_head": norm == "rmsnorm"}, **options)
    folded = fold(model, fused=fused)[0]
    tokens = builders.tokens()
    lens = interop.transformer_lens(folded)
    assert builders.close(lens(tokens), folded(tokens), 1e-6)  # their softmax runs in float32
    assert len(norm_components(lens)) == len(kept_norms(folded, []))
    lens.enable_compatibility_mode(disable_warnings=True)
    assert builders.close(log_probabilities(lens(tokens)), log_probabilities(folded(tokens)), 5e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_stay_what_they_are(dtype):
    folded = folded_model("llama").to(dtype)
    rotary = folded.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.float()  # as transformers loads it
    lens = interop.transformer_lens(folded)
    assert {p.dtype for p in lens.parameters()} == {dtype}
    assert {b.dtype for name, b in lens.named_buffers() if name.endswith(".inv_freq")} == {torch.float32}
    assert torch.equal(lens(builders.tokens()), logits_of(folded, builders.tokens()))


# Negative controls: a component that normalises, in the place of a norm that is gone.


def as_theirs(folded):
    """The bridge that TransformerLens makes by itself."""
    return build_bridge_from_module(copy.deepcopy(folded), type(folded).__name__, hf_config=folded.config)


def test_by_itself_transformer_lens_normalises_by_an_explicit_scale_in_silence():
    folded, tokens = folded_model("gpt2", "unfused"), builders.tokens()
    assert isinstance(folded.transformer.ln_f, FixedScale)
    assert not builders.close(as_theirs(folded)(tokens), logits_of(folded, tokens), 0.1)


class Normalising(_lens.NormFreeBridge):
    def forward(self, h):
        return super().forward(h / h.square().mean(-1, keepdim=True).sqrt())


class Off(_lens.NormFreeBridge):
    def forward(self, h):
        return 1.01 * super().forward(h)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["all", "unfused"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(("wrong", "far"), [(Normalising, 100), (Off, 5)])
def test_a_bridge_that_is_another_function_is_refused_with_both_values(wrong, far, name, way, dtype, monkeypatch):
    """One that normalises again, and one that is a hundredth off, which bfloat16 hides."""
    monkeypatch.setattr(_lens, "NormFreeBridge", wrong)
    with pytest.raises(UserError, match="logits differ by") as caught:
        interop.transformer_lens(folded_model(name, way).to(dtype))
    found = re.search(r"differ by (\S+), and rounding explains (\S+)\. ", str(caught.value))
    difference, allowed = (float(word) for word in found.groups())
    assert difference > far * allowed


# The hooks.


def watched(folded, tokens, edits=None):
    """Inputs and outputs of modules by PyTorch's hooks, and the logits; `edits`: name -> new output of that module."""
    seen = {}

    def watch(name, module):
        def note(_, args, output):
            seen[f"{name} in"] = args[0] if args else None
            seen[f"{name} out"] = output[0] if isinstance(output, tuple) else output
            return None if name not in (edits or {}) else edits[name](output)

        return module.register_forward_hook(note)

    handles = [watch(name, module) for name, module in folded.named_modules() if name]
    try:
        return seen, logits_of(folded, tokens)
    finally:
        for handle in handles:
            handle.remove()


def test_every_step_of_a_gpt2_is_cached_as_it_is():
    folded, tokens = folded_model("gpt2"), builders.tokens()
    seen, logits = watched(folded, tokens)
    cached_logits, cache = interop.transformer_lens(folded).run_with_cache(tokens)
    assert builders.close(cached_logits, logits)
    patterns = folded(tokens, output_attentions=True).attentions
    for i in range(2):
        block, theirs = f"transformer.h.{i}", f"blocks.{i}"
        pairs = {
            f"{theirs}.hook_resid_pre": seen[f"{block}.ln_1 in"],
            f"{theirs}.ln1.hook_normalized": seen[f"{block}.ln_1 in"],
            f"{theirs}.hook_attn_out": seen[f"{block}.attn out"],
            f"{theirs}.hook_resid_mid": seen[f"{block}.ln_2 in"],
            f"{theirs}.mlp.hook_pre": seen[f"{block}.mlp.c_fc out"],
            f"{theirs}.mlp.hook_post": seen[f"{block}.mlp.c_proj in"],
            f"{theirs}.hook_mlp_out": seen[f"{block}.mlp out"],
            f"{theirs}.hook_resid_post": seen[f"{block} out"],
            f"{theirs}.attn.hook_pattern": patterns[i],
        }
        for hook, expected in pairs.items():
            assert builders.close(cache[hook], expected), hook
        assert not builders.close(cache[f"{theirs}.hook_resid_pre"], cache[f"{theirs}.hook_resid_mid"], 0.1)
        for norm in ("ln1", "ln2"):
            assert torch.equal(cache[f"{theirs}.{norm}.hook_scale"], torch.ones(*tokens.shape, 1))
    assert builders.close(cache["unembed.hook_in"], seen["lm_head in"])
    assert builders.close(cache["unembed.hook_out"], seen["lm_head out"])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_ablation_is_the_one_that_pytorchs_hooks_make(name):
    folded, tokens = folded_model(name), builders.tokens()
    lens = interop.transformer_lens(folded)
    place = {"gpt2": "transformer.h.0.mlp", "llama": "model.layers.0.mlp"}[name]
    _, expected = watched(folded, tokens, {place: lambda output: 0.3 * output})
    ablated = lens.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_mlp_out", lambda output, hook: 0.3 * output)])
    assert builders.close(ablated, expected)
    assert not builders.close(ablated, lens(tokens), 0.01)
    assert builders.close(lens(tokens), logits_of(folded, tokens))  # it has left no trace


def test_what_hooks_do_in_a_norms_place_takes_effect():
    folded, tokens = folded_model("gpt2"), builders.tokens()
    lens = interop.transformer_lens(folded)
    _, expected = watched(folded, tokens, {"transformer.h.1.ln_2": lambda output: output / 3})
    for hook, edit in {"hook_scale": 3.0, "hook_normalized": 1 / 3, "hook_in": 1 / 3, "hook_out": 1 / 3}.items():
        edited = lens.run_with_hooks(tokens, fwd_hooks=[(f"blocks.1.ln2.{hook}", lambda x, hook, f=edit: x * f)])
        assert builders.close(edited, expected), hook
    assert not builders.close(expected, logits_of(folded, tokens), 0.01)


def test_the_untied_head_keeps_its_weight_and_the_folded_beta():
    stock, gated_model, _ = gated("gpt2", options={"final": True})
    folded = fold(gated_model)[0]
    lens = interop.transformer_lens(folded)
    beta, embedding = stock.transformer.ln_f.bias, stock.transformer.wte.weight  # the stock head is tied to it
    assert builders.close(lens.b_U, embedding @ beta)
    assert torch.equal(lens.W_E, embedding)
    assert builders.close(lens.W_U, folded.lm_head.weight.T)
    assert not builders.close(lens.W_U, embedding.T, 0.1)
    with torch.no_grad():
        lens.unembed.bias.zero_()
    assert not builders.close(lens(builders.tokens()), logits_of(folded, builders.tokens()), 1e-3)


def test_shares_add_up_without_norms_and_foretell_a_removal():
    tokens = builders.tokens()

    def errors(model, *, processed=False, **options):
        lens = interop.transformer_lens(model)
        if processed:
            lens.enable_compatibility_mode(disable_warnings=True)
        logits, cache = lens.run_with_cache(tokens)
        shares = cache.decompose_resid(**options) @ lens.W_U
        remove = [("blocks.1.hook_mlp_out", lambda output, hook: torch.zeros_like(output))]
        without, size = lens.run_with_hooks(tokens, fwd_hooks=remove), logits.abs().max()
        return ((shares.sum(0) + lens.b_U - logits).abs().max() / size).item(), (
            (logits - without - shares[-1]).abs().max() / size
        ).item()

    exact = errors(folded_model("gpt2"))
    assert max(exact) < 1e-12
    assert max(errors(folded_model("gpt2"), apply_ln=True)) < 1e-12  # there is nothing to apply
    stock = tiny("gpt2")
    assert min(errors(stock)) > 0.1
    in_sum, foretold = errors(stock, processed=True, apply_ln=True)
    assert in_sum < 1e-6
    assert foretold > 0.01


def test_their_own_attribution_takes_the_bridge():
    lens, tokens = interop.transformer_lens(folded_model("llama")), builders.tokens()
    lens.enable_compatibility_mode(disable_warnings=True)
    shares = direct_logit_attribution(lens, tokens, answer_tokens=5, pos=None).attribution
    assert builders.close(shares.sum(0) + lens.b_U[5], lens(tokens)[..., 5], 1e-6)


# Text.


@pytest.mark.parametrize("mark", ["none", "put first", "known and not put first"])
def test_text_becomes_the_tokens_of_the_tokenizer(mark):
    known = tokenizer(bos=mark == "put first")
    if mark == "known and not put first":  # as a GPT-2's
        known.bos_token = BOS
    folded = folded_model("gpt2", vocab_size=len(known))
    lens = interop.transformer_lens(folded, known)
    texts = ["the cat sat", "a dog"]
    for text in texts:
        ids = known(text, return_tensors="pt").input_ids
        assert torch.equal(lens.to_tokens(text), ids)
        assert builders.close(lens(text), logits_of(folded, ids))
    if mark != "none":
        marked = lens.to_tokens("a dog", prepend_bos=True)
        assert known.decode(marked[0, 0]) == BOS
        assert torch.equal(lens.to_tokens("a dog", prepend_bos=False), marked[:, 1:])
    assert known.pad_token is None  # it stays as it was given
    together = lens(texts)
    alone = lens(texts[1])
    assert builders.close(together[1, : alone.shape[1]], alone[0])


# What is refused.


def test_a_tapered_model_is_to_be_folded_first():
    model = gated("gpt2", options={"final": True})[1]
    with pytest.raises(UserError, match=r"transformer.h.0.ln_1 is a TaperLayerNorm, .*fold\(model\)"):
        interop.transformer_lens(model)


class Doubled(nn.LayerNorm):
    def forward(self, h):
        return 2 * super().forward(h)


@pytest.mark.parametrize("other", [nn.Hardtanh(), Doubled(12)])
def test_a_module_that_is_neither_gone_nor_a_plain_norm_is_refused(other):
    model = tiny("gpt2")
    model.transformer.ln_f = other
    with pytest.raises(UserError, match=rf"transformer\.ln_f is a {type(other).__name__}, .*TransformerLens"):
        interop.transformer_lens(model)


def test_a_class_that_transformer_lens_does_not_know_is_refused(monkeypatch):
    monkeypatch.setattr(_lens, "SUPPORTED_ARCHITECTURES", {})
    with pytest.raises(UserError, match=r"TransformerLens has no adapter for a GPT2LMHeadModel: .*nnsight"):
        interop.transformer_lens(folded_model("gpt2"))


def test_without_the_extra_the_message_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "tapernorm.interop._lens")
    monkeypatch.setitem(sys.modules, "transformer_lens", None)
    for name in [name for name in sys.modules if name.startswith("transformer_lens.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"transformer_lens is not installed: pip install '\.\[interp\]'"):
        interop.transformer_lens(tiny("gpt2"))


def test_the_package_is_imported_only_when_it_is_asked_for():
    code = "import sys, tapernorm, tapernorm.interop; sys.exit('transformer_lens' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# The page.


def test_the_page(tmp_path, capsys):
    known = {}
    pieces = [block.code for block in blocks(PAGE) if block.language == "python"]
    assert len(pieces) == 4
    for long, short in {
        "range(200)": "range(60)",
        "start=20, end=140": "start=5, end=40",
        "set_step(200)": "set_step(60)",
    }.items():
        assert long in pieces[0]
        pieces[0] = pieces[0].replace(long, short)
    for i, code in enumerate(pieces):
        path = tmp_path / f"piece{i}.py"  # nnsight reads the source of a trace
        path.write_text(code, encoding="utf-8")
        exec(compile(code, str(path), "exec"), known)
    size = known["logits"].abs().max().item()
    assert max(known["exact"]) < 1e-5 * size
    assert min(known["naive"]) > 1e-2
    in_sum, foretold = known["frozen"]
    assert in_sum < 1e-4
    assert foretold > 1e-2
    with torch.no_grad():
        assert torch.equal(known["same_logits"], logits_of(known["normfree"], known["prompt"]))
    last = known["shares"]["2_mlp_out"]
    assert (known["logits"] - known["without_mlp"])[0, -1].sub(last).abs().max() < 1e-5 * size
    assert capsys.readouterr().out.count("\n") == 8 + 3
