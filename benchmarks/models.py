"""The models of several benchmarks: a `Decoder` and transformers' LLaMA of the same shape."""

from typing import Any

import torch
from transformers import LlamaForCausalLM

from tapernorm import Decoder, attach
from tapernorm.interop._llama import as_llama
from tapernorm.models.decoder_config import DecoderConfig
from tapernorm.util.rng import generator


def decoder(shape: DecoderConfig) -> Decoder:
    """Return a decoder with random weights. Its speed does not depend on them."""
    return Decoder(shape).initialize(generator(0, "init"))


def tapered(shape: DecoderConfig, *, gate: float, c: float | None = None, anchored: bool = False) -> Decoder:
    """Return a random Internal-Taper model at g = `gate`, calibrated on random tokens. `c` replaces the constants."""
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


def stock_llama(source: Decoder) -> Any:
    """Return transformers' LlamaForCausalLM with the shape and weights of `source`, and compare their logits.

    Raises:
        RuntimeError: the logits differ by more than 1e-4.
    """
    shape = source.config
    stock = LlamaForCausalLM(as_llama(source).config)
    stock.load_state_dict(source.state_dict())
    tokens = torch.randint(shape.vocab_size, (2, 16), generator=generator(0, "compare"))
    with torch.no_grad():
        difference = (stock(tokens).logits - source(tokens)).abs().max().item()
    if difference > 1e-4:
        raise RuntimeError(f"the arms are not the same model: logits differ by {difference:g}")
    return stock
