"""transformers' LLaMA of the same shape as ours, and its GPT-2."""

import copy

import builders
import torch
import transformers
from tiny_models import ReferenceNorm


def hugging_face(config, dtype=torch.float32):
    """A LlamaForCausalLM of the same shape with random weights, none of them small."""
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.n_kv_head,
            max_position_embeddings=config.context,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_head,
        )
    )
    builders.randomise(model, seed=6)
    return model.to(dtype).eval()


def gpt2_config(**overrides):
    """All sizes different, the hidden width not 4 d."""
    sizes = {"vocab_size": builders.VOCABULARY, "n_embd": 12, "n_head": 3, "n_layer": 2, "n_inner": 20}
    rest = {"n_positions": 11, "bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2Config(**{**sizes, **rest, **overrides})


def gpt2(*, dtype=torch.float64, seed=6, attention="sdpa", **overrides):
    """A GPT2LMHeadModel with random weights, gains and biases, none of them small; its head tied, as is stock."""
    config = gpt2_config(**overrides)
    config._attn_implementation = attention
    model = transformers.GPT2LMHeadModel(config)
    builders.randomise(model, seed)
    return model.to(dtype).eval()


def reference_gpt2(stock, gated, names, g):
    """`stock` with reference norms in the places `names`, which have the numbers of those of `gated`."""
    model = copy.deepcopy(stock)
    for name in names:
        model.set_submodule(name, ReferenceNorm(gated.get_submodule(name), g))
    return model
