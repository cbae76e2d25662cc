"""The models that several benchmarks build: our decoder and transformers' LLaMA of one shape."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tapernorm import Decoder, attach
from tapernorm.config import DecoderConfig
from tapernorm.rng import generator


def decoder(shape: DecoderConfig) -> Decoder:
    """A fresh decoder; speed does not depend on its weights."""
    return Decoder(shape).initialize(generator(0, "init"))


def tapered(shape: DecoderConfig, *, gate: float, c: float | None = None, anchored: bool = False) -> Decoder:
    """A fresh Internal-Taper model at `gate`, calibrated on random tokens, or with c set by hand."""
    model = decoder(shape)
    taper = attach(model, anchor_weight=0.1 if anchored else 0.0)
    tokens = torch.randint(shape.vocab_size, (4, min(shape.context, 64)), generator=generator(0, "calibrate"))
    with taper.observe(), torch.no_grad():
        model(tokens)
        taper.anchor_loss()
    taper.calibrate()
    if c is not None:
        for name in taper.swapped:
            model.get_submodule(name).get_buffer("c").fill_(c)
    taper.set_gate(gate)
    return model


def stock_llama(shape: DecoderConfig) -> LlamaForCausalLM:
    """transformers' LLaMA of the same shape."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.d_model,
            intermediate_size=shape.d_ff,
            num_hidden_layers=shape.n_layer,
            num_attention_heads=shape.n_head,
            num_key_value_heads=shape.n_kv_head,
            max_position_embeddings=shape.context,
            rms_norm_eps=shape.norm_eps,
            rope_theta=shape.rope_theta,
            tie_word_embeddings=shape.tie_head,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
