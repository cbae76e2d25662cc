"""Small random models of every class that the package supports, and what judges them.

All sizes differ: width 12, three heads, a hidden width of 20, 29 tokens; no weight is small and no gain is 1.
"""

import copy

import builders
import torch
import transformers
from mixed import close_gate
from torch import nn

from tapernorm.norms import TaperNorm
from tapernorm.taper import Taper

_SIZES = {
    "vocab_size": builders.VOCABULARY,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 16,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GPT2 = {"n_embd": 12, "n_inner": 20, "n_layer": 2, "n_head": 3, "n_positions": 16}
_OPT = {**_SIZES, "ffn_dim": 20, "pad_token_id": 0}
_HALF_TURNED = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
_GROUPED = {**_SIZES, "num_key_value_heads": 1}
_WIDE_HEADS = {**_GROUPED, "head_dim": 6}
_STABLE = {**_GROUPED, **_HALF_TURNED}
_NEOX = {**_SIZES, **_HALF_TURNED}

CASES = {  # name -> class of transformers, its config
    "gpt2": ("GPT2LMHeadModel", {**_GPT2, "vocab_size": 29, "bos_token_id": None, "eos_token_id": None}),
    "llama": ("LlamaForCausalLM", _GROUPED),
    "llama, biased and tied": (
        "LlamaForCausalLM",
        {**_GROUPED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 0.1},
    ),
    "mistral": ("MistralForCausalLM", {**_WIDE_HEADS, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", _WIDE_HEADS),
    "gpt_neox": ("GPTNeoXForCausalLM", {**_NEOX, "tie_word_embeddings": True}),
    "gpt_neox, one half after the other": (
        "GPTNeoXForCausalLM",
        {**_NEOX, "use_parallel_residual": False, "attention_bias": False, "layer_norm_eps": 0.1},
    ),
    "opt": ("OPTForCausalLM", _OPT),
    "opt, untied and without biases": ("OPTForCausalLM", {**_OPT, "tie_word_embeddings": False, "enable_bias": False}),
    "gemma": ("GemmaForCausalLM", {**_WIDE_HEADS, "rms_norm_eps": 0.1}),
    "phi": ("PhiForCausalLM", _STABLE),
    "phi with norms of q and k": ("PhiForCausalLM", {**_STABLE, "qk_layernorm": True}),
    "stablelm": ("StableLmForCausalLM", {**_STABLE, "use_qkv_bias": True}),
    "stablelm with norms of q and k": ("StableLmForCausalLM", {**_STABLE, "qk_layernorm": True}),
}
SQUARE = {"vocab_size": 30, "d_model": 30, "n_head": 5, "n_kv_head": 5, "d_ff": 30}  # a transposed axis fits as well
OURS = {
    "decoder": {},
    "decoder, layer norms": {"norm": "layernorm"},
    "decoder, square": {"norm": "layernorm", **SQUARE},
}


def tiny(name, *, dtype=torch.float64, seed=6, **overrides):
    """A random model of the case `name`, of transformers or ours, in evaluation mode."""
    if name in OURS:
        return builders.decoder(dtype=dtype, seed=seed, **{**OURS[name], **overrides}).eval()
    class_name, config = CASES[name]
    kind = getattr(transformers, class_name)
    model = kind(kind.config_class(**{**config, **overrides}))
    builders.randomise(model, seed)
    return model.to(dtype).eval()


def gated(name, *, seed=6, options=None, **overrides) -> tuple[nn.Module, nn.Module, Taper]:
    """A stock model, one like it at g = 0 with random c, gamma_t, gamma and beta, and its taper."""
    stock = tiny(name, seed=seed, **overrides)
    model = copy.deepcopy(stock)
    driver = close_gate(model, seed=seed + 20, **(options or {}))
    with torch.no_grad():
        for norm in driver.swapped:
            model.get_submodule(norm).c.mul_(builders.uniform(1, seed=seed + len(norm))[0])
    stock.load_state_dict({key: value for key, value in model.state_dict().items() if key in stock.state_dict()})
    return stock, model, driver


class ReferenceNorm(nn.Module):
    """A norm as its equation says, in the precision of its input, with the numbers of a plain or tapered one."""

    def __init__(self, norm, g=1.0):
        super().__init__()
        name, tapered = type(norm).__name__, isinstance(norm, TaperNorm)
        self.g, self.centre = g, "RMSNorm" not in name
        self.eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        self.gamma = norm.weight.detach() + ("Gemma" in name)
        self.beta = norm.bias.detach() if self.centre and norm.bias is not None else 0.0
        self.c, self.gamma_t = (norm.c.detach(), norm.gamma_t.detach()) if tapered else (0.0, 0.0)

    def forward(self, h):
        if self.centre:
            h = h - h.sum(-1, keepdim=True) / h.shape[-1]
        scale = ((h**2).sum(-1, keepdim=True) / h.shape[-1] + self.eps) ** 0.5
        return self.g * h / scale * self.gamma + (1 - self.g) * self.c * h * self.gamma_t + self.beta


def exact(model):
    """A copy whose plain RMSNorms of transformers, which compute in float32, compute in the model's own precision."""
    made = copy.deepcopy(model)
    for name, module in model.named_modules():
        if type(module).__name__.endswith("RMSNorm") and not isinstance(module, TaperNorm | nn.RMSNorm):
            made.set_submodule(name, ReferenceNorm(module))
    return made


def judge(stock, model, names, g):
    """`stock`, exact, with reference norms at gate `g` in the places `names`, of the numbers of those of `model`."""
    made = exact(stock)
    for name in names:
        made.set_submodule(name, ReferenceNorm(model.get_submodule(name), g))
    return made
